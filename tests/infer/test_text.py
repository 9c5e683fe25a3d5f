"""Streamed text adds up to the whole text, never shows half a character, and ends before a stop
string."""

import random

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

import swiftkv_jax.infer.text as text_module
from swiftkv_jax import UsageError
from swiftkv_jax.infer.text import (
    HELD_TOKENS,
    Detokenizer,
    TextStream,
    encode,
    encode_chat,
    text_decoder,
)
from swiftkv_jax.text.stop_strings import StopStrings
from tests.infer.conftest import CHAT_TEMPLATE

# Byte -> how ByteLevel writes it: printable ones as themselves, the others from 256 on.
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
BYTES = [
    chr(byte if byte in _PRINTABLE else 256 + sum(other not in _PRINTABLE for other in range(byte)))
    for byte in range(256)
]
ALPHABET = "ab \nßé東京🙂👩‍👩‍👧\u0301�"


def streamed(tokenizer, ids) -> list[str]:
    detokenizer = Detokenizer(tokenizer)
    return [detokenizer.push(token) for token in ids] + [detokenizer.finish()]


@pytest.mark.parametrize("stops", [[], ["never"]])
def test_special_tokens_are_not_decoded_again(tokenizer, stops, monkeypatch):
    """They have no text, so nothing would ever be certain in a long run of them."""
    lengths = []
    decoder = text_decoder(tokenizer)

    def count(ids):
        lengths.append(len(ids))
        return decoder(ids)

    monkeypatch.setattr(text_module, "text_decoder", lambda _: count)
    stream = TextStream(tokenizer, stops)
    before, after = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in ("a ", "b"))
    ids = [*before, *[tokenizer.eos_token_id] * 1000, *after]
    pieces = [stream.push(ids[at : at + 8]) for at in range(0, len(ids), 8)]
    assert "".join([*pieces, stream.finish()]) == "a b"
    assert max(lengths) < 10 and stream.token_ids == ids


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_tokens_at_once_give_the_same_text(tokenizer, size):
    """Bytes of characters that other calls bring the rest of, bytes that become none, and special
    tokens."""
    rng = np.random.default_rng(size)
    for seed in range(40):
        ids = rng.integers(len(tokenizer), size=40 if seed % 2 else 8).tolist()
        ids += tokenizer("naïve – 漢字 🤖", add_special_tokens=False)["input_ids"]
        detokenizer = Detokenizer(tokenizer)
        parts = [detokenizer.push_all(ids[at : at + size]) for at in range(0, len(ids), size)]
        whole = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert "".join([*parts, detokenizer.finish()]) == whole


def test_a_stream_is_never_broken(tokenizer):
    """Every piece is UTF-8, and no piece shows a replacement character that the whole text does not
    have there."""
    rng = random.Random(3)
    bytes_of = [token for token in range(len(tokenizer)) if len(tokenizer.decode([token])) == 1]
    for _ in range(300):
        text = "".join(rng.choices(ALPHABET, k=rng.randint(0, 5)))
        ids = [
            *tokenizer(text, add_special_tokens=False)["input_ids"],
            *rng.choices(bytes_of, k=rng.randint(0, 8)),
        ]
        ids += tokenizer(text, add_special_tokens=False)["input_ids"]
        stream, shown = TextStream(tokenizer, ["東b"]), ""
        whole = tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        ).partition("東b")[0]
        while ids:
            count = rng.randint(1, 3)
            piece = stream.push(ids[:count])
            piece.encode("utf-8")
            shown, ids = shown + piece, ids[count:]
            assert whole.startswith(shown)
        assert shown + stream.finish() == whole


def test_a_character_appears_when_its_last_byte_does(tokenizer):
    ids = tokenizer("\U0001f9ed", add_special_tokens=False)["input_ids"]
    assert len(ids) > 1
    assert streamed(tokenizer, ids) == [""] * (len(ids) - 1) + ["\U0001f9ed", ""]
    assert streamed(tokenizer, ids[:-1])[-1] == "�"


@pytest.fixture(scope="module")
def sentencepiece() -> PreTrainedTokenizerFast:
    """As Llama 2's and Mistral's: a word's first token begins with its space, which is dropped from
    the first word of a text."""
    vocabulary = {"<unk>": 0, "<s>": 1, "▁the": 2, "▁cat": 3, "s": 4, "▁sat": 5} | {
        f"<0x{byte:02X}>": 6 + byte for byte in range(256)
    }
    llama = Tokenizer(
        models.BPE(vocabulary, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    parts = [
        decoders.Replace("▁", " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ]
    llama.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=llama, bos_token="<s>", unk_token="<unk>")


@pytest.mark.parametrize("prompt", [[1, 2], [1, *[2] * 20], [2]])
def test_a_continuation_keeps_its_first_space(sentencepiece, prompt):
    stream = TextStream(sentencepiece, prompt=prompt)
    assert [stream.push([token]) for token in (3, 4, 5)] == [" cat", "s", " sat"]


def test_a_continuation_of_half_a_character(sentencepiece, tokenizer):
    """The half that the prompt has is not shown again, and what follows it is not lost."""
    first, *rest = (6 + byte for byte in "é".encode())
    stream = TextStream(sentencepiece, prompt=[2, first])
    assert stream.push([*rest, 3]) + stream.finish() == "� cat"
    ids = tokenizer("naïve café", add_special_tokens=False)["input_ids"]
    for at in range(len(ids)):
        stream = TextStream(tokenizer, prompt=ids[:at])
        assert (stream.push(ids[at:]) + stream.finish()).endswith(tokenizer.decode(ids[at:]))


def test_stop_strings_count_after_the_first_tokens(sentencepiece):
    """A string may begin in them."""
    for stops, texts in (
        (["cat", "sat"], [" ", " cats ", " cats ", " cats sat"]),
        (["ats ", "at"], [" c", " c", " c", " cats sat"]),
    ):
        for min_tokens, text in enumerate(texts):
            stream = TextStream(sentencepiece, stops, prompt=[1, 2], min_tokens=min_tokens)
            assert stream.push([3, 4, 5]) + stream.finish() == text


def test_bytes_that_become_no_character_are_not_held_for_ever(tokenizer, sentencepiece):
    """Nor decoded again and again: the last few are held, a character among them appears whole."""
    rng = random.Random(5)

    def check(used, garbage, between, byte) -> None:
        ids = [byte(value) for value in [*garbage, *between, *garbage]]
        stream, shown, most = Detokenizer(used), "", 0
        for number, token in enumerate(ids, start=1):
            shown += stream.push(token)
            most = max(most, number - stream._done)
        whole = used.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert shown + stream.finish() == whole and most <= HELD_TOKENS + 4

    for _ in range(20):
        garbage = rng.choices((0x80, 0xBF, 0xE2, 0xF0, 0xFF), k=60)
        check(
            tokenizer,
            garbage,
            "é🙂".encode(),
            lambda value: tokenizer.convert_tokens_to_ids(BYTES[value]),
        )
        check(
            sentencepiece, rng.choices((0x80, 0xBF, 0xFF), k=60), b"", lambda value: 6 + value
        )  # where no character can be


def test_min_tokens_guards_what_was_held_back(sentencepiece):
    stream = TextStream(sentencepiece, ["\ufffd"], min_tokens=2)
    assert stream.push([6 + 0xE2]) + stream.finish() == "\ufffd" and not stream.stopped


def test_stop_strings_split_anywhere():
    rng = random.Random(2)
    for _ in range(2000):
        text = "".join(rng.choices("ab", k=rng.randint(0, 14)))
        stops = ["".join(rng.choices("ab", k=rng.randint(1, 4))) for _ in range(rng.randint(0, 3))]
        found = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
        filter = StopStrings(stops)
        output, left = "", text
        while left:
            size = rng.randint(1, 3)
            output += filter.push(left[:size])
            left = left[size:]
            if filter.hit:
                break
        assert bool(filter.hit) == bool(found)
        assert output + filter.finish() == (text[: min(found)[1]] if found else text), (text, stops)


def test_hostile_stop_strings_take_no_longer_than_others():
    """Counted in lookups for each character: they nearly match for ever."""
    stops = [f"{'a' * length}b" for length in range(1, 256, 16)]
    filter, looked_up = StopStrings(stops), 0

    class Counted(dict):
        def __contains__(self, key):
            nonlocal looked_up
            looked_up += 1
            return super().__contains__(key)

    filter._automaton = filter._automaton._replace(
        children=[Counted(children) for children in filter._automaton.children]
    )
    text = ("a" * 255 + "c") * 20
    assert "".join(filter.push(text[at : at + 3]) for at in range(0, len(text), 3)) == text
    assert looked_up <= 2 * len(text) and filter.hit is None


def test_text_that_may_begin_a_stop_string_is_held_back():
    filter = StopStrings(["END"])
    assert [filter.push(piece) for piece in ("abE", "N", "x", "E", "ND", "y")] == [
        "ab",
        "",
        "ENx",
        "",
        "",
        "",
    ]
    assert filter.hit == "END"


def test_stream_counts_tokens_up_to_the_stop_string(tokenizer):
    ids = tokenizer('print(word, "x")', add_special_tokens=False)["input_ids"]
    stream = TextStream(tokenizer, ["word"])
    assert stream.push(ids) + stream.finish() == "print("
    assert (
        stream.stopped
        and stream.stop_reason == "word"
        and stream.token_ids == ids[: len(stream.token_ids)]
    )
    assert "word" in tokenizer.decode(stream.token_ids) and "word" not in tokenizer.decode(
        stream.token_ids[:-1]
    )


def test_an_empty_stop_string_is_refused():
    with pytest.raises(UsageError, match="at least one character"):
        StopStrings(["a", ""])


def test_the_first_special_token_is_never_doubled(tokenizer, monkeypatch):
    assert encode(tokenizer, "ab") == encode(tokenizer, "<s>ab")
    assert encode(tokenizer, "ab")[0] == 0
    monkeypatch.setattr(tokenizer, "chat_template", CHAT_TEMPLATE)
    ids = encode_chat(tokenizer, [{"role": "user", "content": "ab"}])
    assert ids.count(0) == 1 and ids[0] == 0
    assert tokenizer.decode(ids) == "<s>[user]ab\n[assistant]"


@pytest.mark.parametrize(
    "messages",
    [
        "hello",
        {"role": "user"},
        [{"content": "ab"}],
        ["ab"],
        [{"role": 1, "content": "ab"}],
        [{"role": "user"}],
        [{"role": "user", "content": 5}],
        None,
    ],
    ids=str,
)
def test_messages_that_are_none_are_refused(tokenizer, messages):
    with pytest.raises(UsageError, match="messages must be a list of objects with role"):
        encode_chat(tokenizer, messages)


def test_chat_without_a_template_is_refused(tokenizer):
    with pytest.raises(UsageError, match="no chat template"):
        encode_chat(tokenizer, [{"role": "user", "content": "ab"}])
