"""Examples whose answers repeat parts of their prompts."""

import json

import pytest

from swiftkv_jax.errors import DataError
from swiftkv_jax.train.data import restated
from swiftkv_jax.train.recipe import DEMO
from swiftkv_jax.train.run.setup import open_tokenizer

LENGTH = 256


@pytest.fixture(scope="module")
def tokenizer():
    return open_tokenizer(DEMO)


@pytest.fixture(scope="module")
def examples(tokenizer):
    texts = restated.read_texts(["stdlib"])[:200]
    return list(restated.restate(texts, tokenizer, 40, LENGTH))


def test_answers_repeat_lines_of_their_prompts_in_another_order(examples, tokenizer):
    reordered = 0
    for example in examples:
        prompt, answer = (example[name].splitlines() for name in ("prompt", "completion"))
        assert answer and set(answer) <= set(prompt)
        places = [prompt.index(line) for line in answer if prompt.count(line) == 1]
        reordered += places != sorted(places)
        tokens = tokenizer(example["prompt"] + example["completion"])["input_ids"]
        assert len(tokens) <= LENGTH
    assert reordered > 30


def test_most_examples_are_records_of_keys_that_differ(examples):
    arrows = [one["prompt"] for one in examples if one["prompt"].count(" -> ") >= 4]
    assert arrows
    for prompt in arrows:
        keys = [line.split(" -> ")[0] for line in prompt.splitlines() if " -> " in line]
        assert len(set(keys)) == len(keys)


def test_the_seed_decides(examples, tokenizer):
    texts = restated.read_texts(["stdlib"])[:200]
    assert list(restated.restate(texts, tokenizer, 3, LENGTH)) == examples[:3]
    assert list(restated.restate(texts, tokenizer, 3, LENGTH, seed=1)) != examples[:3]


def test_conversations_are_their_messages(tmp_path):
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    file = tmp_path / "chat.jsonl"
    file.write_text(f"{json.dumps({'messages': turns})}\n{json.dumps({'text': 'three'})}\n")
    assert restated.read_texts([str(file)]) == ["one\ntwo", "three"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("only very few words", "different words"),
        (" ".join(f"a{number:04}".translate(str.maketrans("0123456789", "abcdefghij"))
                  for number in range(200)), "no document"),
    ],
)  # fmt: skip
def test_text_that_is_too_little(text, message, tokenizer):
    with pytest.raises(DataError, match=message):
        list(restated.restate([text], tokenizer, 20, LENGTH))
