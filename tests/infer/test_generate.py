"""`generate`: the tokens are those of the full forward pass and of the authors' model, whatever the
options."""

import copy
import dataclasses
import functools
import importlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import swiftkv_jax as skv
from swiftkv_jax import UsageError
from swiftkv_jax.infer import Engine, EngineOptions, Request, SamplingParams
from swiftkv_jax.infer.generate import generate
from swiftkv_jax.infer.runner.choose_shapes import offline_num_seqs
from swiftkv_jax.infer.text import encode_chat
from tests import tiny
from tests.infer.conftest import CHAT_TEMPLATE

FIXTURES = Path(__file__).parents[1] / "fixtures"
PROMPTS = [
    tiny.tokens_for(tiny.hf_config(), 1, length, length)[0].tolist() for length in (6, 3, 1, 11, 2)
]


@functools.cache
def model(group: int = 2) -> skv.Model:
    hf = tiny.hf_config(num_hidden_layers=3, num_key_value_layers=1, key_value_group_size=group)
    return tiny.model_of(hf, tiny.tensors_for(hf))


def greedy(prompt: list[int], count: int, swiftkv: bool) -> list[int]:
    """By the full forward pass, on rows padded to one length: what comes after a position does not
    change it."""
    row = np.zeros((1, 24), np.int32)
    row[0, : len(prompt)] = prompt
    for position in range(len(prompt), len(prompt) + count):
        row[0, position] = skv.logits(model(), jnp.asarray(row), swiftkv=swiftkv)[
            0, position - 1
        ].argmax()
    return row[0, len(prompt) : len(prompt) + count].tolist()


@pytest.mark.parametrize("swiftkv", [True, False])
def test_greedy_tokens_are_those_of_the_full_forward(swiftkv):
    assert generate(model(), PROMPTS, max_tokens=9, swiftkv=swiftkv) == [
        greedy(prompt, 9, swiftkv) for prompt in PROMPTS
    ]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("llama-init-4of8-group1", marks=pytest.mark.long),
        "llama-trained-4of8-group2-tied",
    ],
)
@pytest.mark.parametrize("swiftkv", [True, pytest.param(False, marks=pytest.mark.long)])
def test_greedy_tokens_are_those_of_the_authors_model(name, swiftkv):
    reference = load_file(FIXTURES / f"{name}.reference.safetensors")
    prompts = reference["input_ids"].tolist()
    tokens = skv.generate(
        skv.load(FIXTURES / name), prompts, max_tokens=16, swiftkv=swiftkv, ignore_eos=True
    )
    assert tokens == reference["swiftkv_greedy" if swiftkv else "teacher_greedy"].tolist()


SAMPLED: dict[str, Any] = {
    "max_tokens": 10,
    "temperature": 1.2,
    "top_k": 20,
    "top_p": 0.95,
    "seed": 4,
}


@functools.cache
def sampled() -> list[list[int]]:
    return generate(model(), PROMPTS, **SAMPLED)


@pytest.mark.parametrize(
    "options",
    [
        {"decode_steps": 1, "max_num_seqs": 2},
        pytest.param({"decode_steps": 3, "max_model_len": 100}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_draws_do_not_depend_on_how_they_are_computed(options: dict[str, Any]):
    assert generate(model(), PROMPTS, **SAMPLED, **options) == sampled()


@pytest.mark.parametrize(("given", "expected"), [({}, 100), ({"max_num_seqs": 7}, 7)])
def test_on_an_accelerator_more_prompts_run_at_once(given, expected, monkeypatch):
    def started(model, options, **others):
        raise InterruptedError(options.max_num_seqs)

    monkeypatch.setattr(Engine, "from_model", started)
    found = importlib.import_module("swiftkv_jax.infer.generate")
    monkeypatch.setattr(found, "offline_num_seqs", lambda _, count: offline_num_seqs("gpu", count))
    with pytest.raises(InterruptedError, match=f"^{expected}$"):
        generate(model(), [[5]] * 100, max_tokens=1, **given)


def test_tokens_do_not_depend_on_jax_enable_x64():
    params = SamplingParams(**SAMPLED, logprobs=1)
    found: list[list[int]] = [[] for _ in PROMPTS]
    with jax.enable_x64(True):
        engine = Engine.from_model(model(), EngineOptions(max_model_len=32, max_num_seqs=5))
        requests = [Request(prompt, params, rng_stream=at) for at, prompt in enumerate(PROMPTS)]
        for number, output in engine.run(requests):
            found[number] += output.token_ids
    assert found == sampled()


def test_the_seed_matters():
    other: dict[str, Any] = SAMPLED | {"seed": 5}
    assert generate(model(), PROMPTS, **other) != sampled()


def test_a_prompt_draws_by_its_number():
    assert generate(model(), PROMPTS[:1], **SAMPLED)[0] == sampled()[0]
    first, second = generate(model(), [PROMPTS[0]] * 2, **SAMPLED)
    assert first == sampled()[0] != second


def test_prompts_and_numbers_may_be_arrays():
    arrays = [jnp.asarray(PROMPTS[0]), *(np.asarray(prompt) for prompt in PROMPTS[1:])]
    answers = generate(model(), arrays, max_tokens=np.int64(3))  # pyright: ignore
    assert answers == generate(model(), PROMPTS, max_tokens=3)


def test_end_tokens_are_left_out():
    free = generate(model(), PROMPTS, max_tokens=9)
    end = free[0][3]
    ending = dataclasses.replace(model(), eos_token_ids=(end,))
    expected = [row[: row.index(end)] if end in row else row for row in free]
    assert generate(ending, PROMPTS, max_tokens=9) == expected
    assert generate(ending, PROMPTS, max_tokens=9, ignore_eos=True) == free
    assert generate(model(), PROMPTS, max_tokens=9, stop_token_ids=[end]) == expected


def test_no_prompts_give_no_answers():
    assert generate(model(), [], max_tokens=3) == []


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[1], [2], [3], []], {}, "prompt 3: the prompt must not be empty"),
        ([[1], [61]], {}, "prompt 1: the prompt: token id 61 is outside the vocabulary of 61"),
        ([[-1]], {}, "prompt 0: the prompt: token id -1 is outside the vocabulary of 61"),
        ([[1.5]], {}, "prompt 0: the prompt must be a list of token ids"),
        ([[1], 7], {}, "`prompts`: entry 1 is 7: expected token ids, all whole numbers, or a list"),
        ([1, [2]], {}, "`prompts`: entry 0 is 1: expected"),
        ([1.5], {}, "`prompts`: entry 0 is 1.5: expected"),
        ([[1]], {"max_model_len": 0}, "`max_model_len`=0"),
        ([[1]], {"max_new_tokens": 5}, "`max_new_tokens` says `max_tokens` a second time"),
        (5, {}, "`prompts` must be a text or token ids, or a list of either, got int"),
        (np.asarray(5), {}, "`prompts` must be .*got ndarray"),
        (None, {}, "`prompts` must be .*got NoneType"),
        ([[1], "a"], {}, "all texts or all token ids, got both"),
        ([61], {}, "^the prompt: token id 61 is outside"),
        ("a", {}, "the model has no tokenizer: give prompts as token ids"),
        ([[1]], {"stop": "a"}, "the model has no tokenizer"),
        (
            [[1] * 18],
            {"max_model_len": 20},
            "prompt 0: the prompt has 18 tokens, with 4 new ones that is 22, above the limit of 20",
        ),
        (
            [[1] * 126],
            {},
            "prompt 0: the prompt has 126 tokens, with 4 new ones that is 130, above the limit of "
            "128: .*`max_model_len`",
        ),
        (
            [[1]],
            {"max_model_len": 129},
            "`max_model_len`=129 must be from 2 to the model's 128 positions",
        ),
        ([[1]], {"max_num_seqs": 0}, "`max_num_seqs`=0"),
        ([[1]], {"temperature": -1.0}, "`temperature`=-1.0"),
        ([[1]], {"n": 2}, "`n`=2: this function returns one answer a prompt"),
        ([[1]], {"logprobs": 0}, "`logprobs`=0: this function .*; keep an Engine for more"),
        ([[1]], {"best_of": 2}, "best_of"),
        ([[1]], {"attention": "hopper"}, "^`attention`='hopper' .*'xla' runs"),
    ],
    ids=str,
)
def test_bad_input_is_named(prompts, options, message):
    with pytest.raises(UsageError, match=message):
        generate(model(), prompts, max_tokens=4, **options)


def test_the_last_position_can_be_filled():
    assert len(generate(model(), [[1] * 124], max_tokens=4)[0]) == 4


def test_a_student_needs_a_delta():
    with pytest.raises(ValueError, match="no delta"):
        generate(dataclasses.replace(model(), swiftkv=None), [[1]], max_tokens=1, swiftkv=True)


def test_a_served_student_needs_no_teacher():
    served = dataclasses.replace(model(), llama=dataclasses.replace(model().llama, upper_qkv=None))
    assert generate(served, PROMPTS, max_tokens=3) == generate(model(), PROMPTS, max_tokens=3)
    with pytest.raises(ValueError, match="dropped"):
        generate(served, PROMPTS, max_tokens=3, swiftkv=False)


def test_one_prompt_gives_one_answer():
    answers = generate(model(), PROMPTS, max_tokens=3)
    assert generate(model(), PROMPTS[0], max_tokens=3) == answers[0]
    for array in (np.asarray(PROMPTS[3]), list(jnp.asarray(PROMPTS[3]))):
        assert generate(model(), array, max_tokens=3) == answers[3]  # pyright: ignore


# Text -------------------------------------------------------------------------


def text_of(tokenizer, token_ids) -> str:
    return tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def test_a_text_gives_a_text(checkpoint, tokenizer, greedy):
    """The one that the full forward pass gives, whole and up to a stop string."""
    model, prompts = skv.load(checkpoint), ["def main", "naïve"]
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    tokens = [greedy(prompt, 12) for prompt in ids]
    assert skv.generate(model, ids, max_tokens=12) == tokens
    texts = skv.generate(model, prompts, max_tokens=12)
    assert texts == [
        text_of(tokenizer, [*prompt, *new])[len(text_of(tokenizer, prompt)) :]
        for prompt, new in zip(ids, tokens, strict=True)
    ]
    assert skv.generate(model, prompts[0], max_tokens=12) == texts[0]
    stop = texts[0][3:5]
    assert skv.generate(model, prompts[0], max_tokens=12, stop=stop) == texts[0].partition(stop)[0]
    stopped = skv.generate(model, ids[0], max_tokens=12, stop=[stop])
    assert stopped == tokens[0][: len(stopped)] and 0 < len(stopped) < 12
    with pytest.raises(UsageError, match="prompt 1: the prompt is empty"):
        skv.generate(model, ["a", ""], max_tokens=1)


def test_chat_answers_a_conversation(checkpoint, tokenizer):
    model = skv.load(checkpoint)
    messages = [{"role": "user", "content": "print"}]
    with pytest.raises(UsageError, match="no chat template"):
        skv.chat(model, messages, max_tokens=4)
    chatty = copy.deepcopy(tokenizer)
    chatty.chat_template = CHAT_TEMPLATE
    model = dataclasses.replace(model, tokenizer=chatty)
    prompt = encode_chat(chatty, messages)
    text = text_of(tokenizer, skv.generate(model, prompt, max_tokens=12))
    answer = skv.chat(model, messages, max_tokens=12)
    assert answer == text
    assert skv.chat(model, messages, max_tokens=12, stop=text[2:4]) == text.partition(text[2:4])[0]
    chatty.chat_template = "{{ 1 / 0 }}"
    with pytest.raises(UsageError, match="chat template fails on the messages: ZeroDivisionError"):
        skv.chat(model, messages, max_tokens=4)
