"""Sources: what is read, what is a target, and what is refused by name."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from swiftkv_jax.errors import DataError
from swiftkv_jax.train.sources import STDLIB, read, tokenize

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<end>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    """One token a byte, with an end token and a chat template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    bpe = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate([*alphabet, "</s>"])}, merges=[]))
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    result = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="</s>")
    result.chat_template = TEMPLATE
    return result


def targets(document, tokenizer):
    (example,) = tokenize([document], tokenizer)
    return tokenizer.decode(example.tokens[example.is_target])


def test_text_and_folders(tmp_path, tokenizer):
    (tmp_path / "b.txt").write_text("two")
    (tmp_path / "a.py").write_text("one")
    (tmp_path / "c.bin").write_bytes(b"\0")
    (tmp_path / "empty.txt").write_text("\n")
    (tmp_path / "d.jsonl").write_text('{"text": "three"}\n\n')
    assert [d.text for d in read(str(tmp_path))] == ["one", "two", "three"]
    assert [d.text for d in read(str(tmp_path / "b.txt"))] == ["two"]
    (example,) = tokenize(read(str(tmp_path / "b.txt")), tokenizer)
    assert tokenizer.decode(example.tokens) == "two</s>" and example.is_target.all()


def test_only_assistant_turns_are_targets_even_when_their_text_repeats(tmp_path, tokenizer):
    """A search for the answer's text would find it in the question; the mask must not."""
    turns = [("system", "be brief"), ("user", "say yes"), ("assistant", "yes"), ("user", "yes?"), ("assistant", "yes")]
    file = tmp_path / "chat.jsonl"
    file.write_text(json.dumps({"messages": [{"role": r, "content": c} for r, c in turns]}) + "\n")
    (document,) = read(str(file))
    assert targets(document, tokenizer) == "yes<end>yes<end>"


def test_stdlib_is_split_by_package():
    training = {d.origin for d in read(STDLIB)}
    held_out = {d.origin for d in read(STDLIB, held_out=True)}
    assert training and held_out and not training & held_out
    assert any(origin.endswith("argparse.py") for origin in training)
    packages = [{origin.split("/python3.")[-1].split("/")[1] for origin in split} for split in (training, held_out)]
    assert not packages[0] & packages[1]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "fine"}\n{"text": ', r":2: not valid JSON"),
        ('{"txt": "?"}', r":1: expected"),
        ("[1, 2]", r":1: expected"),
        ('{"messages": [{"role": "user"}]}', r":1: expected"),
    ],
)
def test_malformed_rows_name_file_and_line(tmp_path, line, message):
    file = tmp_path / "rows.jsonl"
    file.write_text(line)
    with pytest.raises(DataError, match=f"rows.jsonl{message}"):
        list(read(str(file)))


def test_other_bad_input(tmp_path, tokenizer):
    with pytest.raises(DataError, match="nowhere: no such file or folder"):
        list(read(str(tmp_path / "nowhere")))
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="no text in it"):
        list(read(str(tmp_path / "empty.jsonl")))
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(DataError, match="latin.txt: not UTF-8"):
        list(read(str(tmp_path / "latin.txt")))
    (tmp_path / "latin.jsonl").write_bytes(b'{"text": "caf\xe9"}')
    with pytest.raises(DataError, match="latin.jsonl:1: not UTF-8"):
        list(read(str(tmp_path / "latin.jsonl")))
    (tmp_path / "deep.jsonl").write_text("[" * 100_000)
    with pytest.raises(DataError, match="deep.jsonl:1: not valid JSON"):
        list(read(str(tmp_path / "deep.jsonl")))
    (tmp_path / "user.jsonl").write_text('{"messages": [{"role": "user", "content": "hello"}]}')
    with pytest.raises(DataError, match="user.jsonl:1: no message with role 'assistant'"):
        list(tokenize(read(str(tmp_path / "user.jsonl")), tokenizer))
    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(DataError, match="user.jsonl:1: this tokenizer has no chat template"):
        list(tokenize(read(str(tmp_path / "user.jsonl")), plain))


def test_a_template_that_rewrites_earlier_turns_is_refused(tmp_path, tokenizer):
    """Some templates drop the reasoning of all but the last answer: a prefix difference would mask the wrong text."""
    tricky = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    tricky.chat_template = "{{ messages | length }}{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    (tmp_path / "c.jsonl").write_text(json.dumps({"messages": [{"role": r, "content": "x"} for r in ("user", "assistant")] * 2}))
    with pytest.raises(DataError, match="rewrites earlier turns"):
        list(tokenize(read(str(tmp_path / "c.jsonl")), tricky))
