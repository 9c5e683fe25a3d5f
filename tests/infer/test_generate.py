"""The engine: the tokens are those of the full forward pass, whatever the batch, the chunks, the calls, or the mesh."""

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import swiftkv_jax as skv
from swiftkv_jax import UsageError
from swiftkv_jax.infer.generate import Engine, generate
from swiftkv_jax.infer.sampling import SamplingParams
from swiftkv_jax.sharding import make_mesh
from tests import tiny

FIXTURES = Path(__file__).parents[1] / "fixtures"
PROMPTS = [tiny.tokens_for(tiny.hf_config(), 1, length, length)[0].tolist() for length in (6, 3, 1, 11, 2)]


@functools.cache
def model(group: int = 2) -> skv.Model:
    hf = tiny.hf_config(key_value_group_size=group)
    return tiny.model_of(hf, tiny.tensors_for(hf))


def greedy(prompt: list[int], count: int, swiftkv: bool) -> list[int]:
    """By the full forward pass, on rows padded to one length: what comes after a position does not change it."""
    row = np.zeros((1, 24), np.int32)
    row[0, : len(prompt)] = prompt
    for position in range(len(prompt), len(prompt) + count):
        row[0, position] = skv.logits(model(), jnp.asarray(row), swiftkv=swiftkv)[0, position - 1].argmax()
    return row[0, len(prompt) : len(prompt) + count].tolist()


@pytest.mark.parametrize("swiftkv", [True, False])
def test_greedy_tokens_are_those_of_the_full_forward(swiftkv):
    assert generate(model(), PROMPTS, max_tokens=9, swiftkv=swiftkv) == [greedy(prompt, 9, swiftkv) for prompt in PROMPTS]


@pytest.mark.parametrize("name", ["llama-init-4of8-group1", "llama-trained-4of8-group2-tied"])
@pytest.mark.parametrize("swiftkv", [True, False])
def test_greedy_tokens_are_those_of_the_authors_model(name, swiftkv):
    reference = load_file(FIXTURES / f"{name}.reference.safetensors")
    prompts = reference["input_ids"].tolist()
    tokens = skv.generate(skv.load(FIXTURES / name), prompts, max_tokens=16, swiftkv=swiftkv, ignore_eos=True)
    assert tokens == reference["swiftkv_greedy" if swiftkv else "teacher_greedy"].tolist()


SAMPLED: dict[str, Any] = {"max_tokens": 10, "temperature": 1.2, "top_k": 20, "top_p": 0.95, "seed": 4}


@functools.cache
def sampled() -> list[list[int]]:
    return generate(model(), PROMPTS, **SAMPLED)


@pytest.mark.parametrize("options", [{"decode_steps": 1}, {"decode_steps": 3}, {"max_num_seqs": 2}, {"max_model_len": 100}, {}], ids=str)
def test_draws_do_not_depend_on_how_they_are_computed(options: dict[str, Any]):
    assert generate(model(), PROMPTS, **SAMPLED, **options) == sampled()


def test_the_seed_matters():
    other: dict[str, Any] = SAMPLED | {"seed": 5}
    assert generate(model(), PROMPTS, **other) != sampled()


def test_chunks_do_not_matter():
    params = SamplingParams(**SAMPLED)
    for chunks in ((4,), (8, 2), (64,)):
        engine = Engine(model(), max_model_len=32, max_num_seqs=5, chunks=chunks)
        outputs = [[] for _ in PROMPTS]
        for event in engine.stream(PROMPTS, params):
            outputs[event.row] += event.tokens
        assert outputs == sampled()


def test_a_row_is_what_it_is_alone():
    alone = generate(model(), PROMPTS[:1], **SAMPLED)  # row 0 draws as row 0 of the batch
    assert alone[0] == sampled()[0]
    assert [generate(model(), [prompt], max_tokens=5)[0] for prompt in PROMPTS] == generate(model(), PROMPTS, max_tokens=5)


@pytest.mark.parametrize("shape", [(2, 2), (4, 1), (1, 4), (2, 4)], ids=str)
@pytest.mark.parametrize("swiftkv", [True, False])
def test_a_mesh_changes_nothing(shape, swiftkv, compilations):
    engine = Engine(model(), swiftkv=swiftkv, max_model_len=32, max_num_seqs=5, chunks=(8,), mesh=make_mesh(shape))
    engine.warm_up()
    outputs = [[] for _ in PROMPTS]
    compilations.clear()
    for _ in range(2):
        for event in engine.stream(PROMPTS, SamplingParams(max_tokens=10)):
            outputs[event.row] += event.tokens
        assert compilations == []
    single = generate(model(), PROMPTS, max_tokens=10, swiftkv=swiftkv, max_model_len=32)
    assert outputs == [row * 2 for row in single]


def test_prompts_may_be_numpy_arrays():
    arrays = [np.asarray(prompt) for prompt in PROMPTS]
    assert generate(model(), arrays, max_tokens=3) == generate(model(), PROMPTS, max_tokens=3)  # pyright: ignore[reportArgumentType]


def test_nothing_compiles_after_warm_up(compilations):
    engine = Engine(model(), max_model_len=64, max_num_seqs=3, chunks=(8, 4))
    engine.warm_up()
    compilations.clear()
    for params in (
        SamplingParams(max_tokens=20),
        SamplingParams(max_tokens=5, temperature=0.7),
        SamplingParams(max_tokens=5, temperature=0.7, top_k=3, top_p=0.8, seed=7, ignore_eos=True),
    ):
        for prompts in ([[1]], PROMPTS, PROMPTS[:1], [PROMPTS[0] * 6]):
            list(engine.stream(prompts, params))
    assert compilations == []


def test_end_tokens_are_left_out():
    free = generate(model(), PROMPTS, max_tokens=9)
    end = free[0][3]
    ending = dataclasses.replace(model(), eos_token_ids=(end,))
    expected = [row[: row.index(end)] if end in row else row for row in free]
    assert generate(ending, PROMPTS, max_tokens=9) == expected
    assert generate(ending, PROMPTS, max_tokens=9, ignore_eos=True) == free
    reasons = {event.row: event.finish_reason for event in Engine(ending, max_model_len=32).stream(PROMPTS, SamplingParams(9))}
    assert reasons == {row: "stop" if end in tokens else "length" for row, tokens in enumerate(free)}


def test_cancelled_rows_emit_nothing_more():
    cancelled: set[int] = set()
    events = []
    for event in Engine(model(), max_model_len=32, decode_steps=2).stream(PROMPTS, SamplingParams(8), cancelled=cancelled):
        events.append(event)
        cancelled.add(1)
    assert [sum(len(e.tokens) for e in events if e.row == row) for row in range(5)] == [8, 0, 8, 8, 8]


def test_stats_count_tokens():
    engine = Engine(model(), max_model_len=32, max_num_seqs=2)
    list(engine.stream(PROMPTS, SamplingParams(7)))
    assert (engine.stats.prompt_tokens, engine.stats.new_tokens) == (sum(map(len, PROMPTS)), 35)
    assert engine.stats.first_token_seconds and engine.stats.prefill_seconds and engine.stats.decode_seconds


def test_no_prompts_give_no_rows():
    assert generate(model(), [], max_tokens=3) == []


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([[1], [2], [3], []], {}, "prompt 3 is empty"),
        ([[1], [61]], {}, "prompt 1: token id 61 is outside the vocabulary of 61"),
        ([[-1]], {}, "prompt 0: token id -1 is outside the vocabulary of 61"),
        ([[1.5]], {}, "prompt 0 must be a list of token ids"),
        ([[1] * 30], {"max_model_len": 20}, "prompt 0 has 30 tokens, with 4 new ones that is 34, above the limit of 20: .*--max-model-len"),
        ([[1] * 18], {"max_model_len": 20}, "prompt 0 has 18 tokens, with 4 new ones that is 22, above the limit of 20: .*--max-model-len"),
        ([[1] * 126], {}, "prompt 0 has 126 tokens, with 4 new ones that is 130, above the limit of 128"),
        ([[1]], {"max_model_len": 129}, "--max-model-len 129 must be from 2 to the model's 128 positions"),
        ([[1]], {"max_num_seqs": 0}, "max_num_seqs=0"),
        ([[1]], {"temperature": -1.0}, "temperature=-1.0"),
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
