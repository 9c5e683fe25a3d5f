"""Adapters on each kind of student and on a teacher: answers are those of the merged model, and
pages are shared by those whose keys and values of prompts are equal."""

import dataclasses
import functools
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import swiftkv_jax as skv
from swiftkv_jax.infer.engine.engine import Engine
from swiftkv_jax.infer.engine.requests import Request
from swiftkv_jax.infer.runner.model_runner import ModelRunner
from swiftkv_jax.model.mesh import MODEL, dp_size, make_mesh
from tests.checkpoints.test_adapters import adapter
from tests.infer.engine import test_engine
from tests.infer.engine.own_kv_engines import greedy, run
from tests.test_boundary import model_of

LENGTH, TAIL = 32, 3
QKV = [f"self_attn.{one}_proj" for one in "qkv"]
BLOCK = "self_attn.o_proj mlp.gate_proj mlp.up_proj mlp.down_proj".split()
PROMPT = np.random.default_rng(0).integers(61, size=21).tolist()


class Case(NamedTuple):
    group: int = 1
    own: bool = True
    tail: int = 0
    extended: bool = False
    """True for prompt attention layers with neurons, taps and an exact head."""
    swiftkv: bool = True
    upper_only: bool = False
    mesh: str | None = None


CASES = {
    "own, groups, a tail": Case(group=2, tail=TAIL),
    "boundary, extended": Case(own=False, extended=True),
    "boundary, copies of heads": Case(own=False, mesh="1x4"),
    "own, upper only": Case(upper_only=True),
    "own, a tail, groups, rows too": Case(group=2, tail=TAIL, mesh="2x2"),
    "own, a tail, extended": Case(tail=TAIL, extended=True),
    "a teacher": Case(swiftkv=False, own=False),
}


def student(case: Case) -> skv.Model:
    """Of six layers, two of them lower."""
    layers, taps, head, neurons = (2, 1, 1, 5) if case.extended else (0, 0, 0, 0)
    fields = {"qkv_bias": False, "num_layers": 6}
    config, llama, delta = model_of(layers, taps, case.group, head, neurons, **fields)
    kv = "own" if case.own else "boundary"
    config = dataclasses.replace(config, generated_kv=kv, exact_tail=case.tail)
    return skv.Model(llama, delta, config)


def adapters_of(case: Case, base: skv.Model, path: Path) -> dict[str, Path]:
    """One of upper layers alone, trained on the teacher, and one of all matrices."""
    kept = base if case.swiftkv else dataclasses.replace(base, swiftkv=None)
    skv.save_hf(kept, path / "base", format="full")
    lower, upper = range(2), range(2, 6)
    queries = [(layer, "self_attn.q_proj") for layer in upper]
    upper_only = [*queries, *((layer, one) for layer in upper for one in BLOCK)]
    whole = [*upper_only, *((layer, one) for layer in lower for one in (*QKV, *BLOCK))]
    if case.swiftkv:
        whole += [(layer, f"{one}_swiftkv") for layer, one in queries]
        first = [group[0] for group in base.config.kv_groups]
        whole += [(layer, f"{one}_swiftkv") for layer in first for one in QKV[1:]]
    else:
        whole += [(layer, one) for layer in upper for one in QKV[1:]]
    found = {"upper": upper_only} if case.upper_only else {"upper": upper_only, "whole": whole}
    return {
        name: adapter(
            path / name,
            {f"model.layers.{layer}.{one}": 0.3 for layer, one in modules},
            path / "base",
            seed=len(modules),
        )
        for name, modules in found.items()
    }


class Oracle:
    """Log-probabilities by whole forward passes of the merged models."""

    def __init__(self, case: Case, base: skv.Model, path: Path, names):
        self._models = {"": base} | {
            name: skv.load(path / "base", adapter=path / name) for name in names
        }
        swiftkv = case.swiftkv

        @functools.partial(jax.jit, static_argnums=0)
        def forward(config, llama, delta, row, length):
            model = skv.Model(llama, delta if swiftkv else None, config)
            return jax.nn.log_softmax(skv.logits(model, row, prompt_lengths=length)[0], axis=-1)

        self._forward = forward

    def check(self, request: Request, found) -> None:
        row, start = (*request.prompt, *found[0]), len(request.prompt)
        padded = np.zeros((1, LENGTH), np.int32)
        padded[0, : len(row)] = row
        model = self._models[request.adapter]
        weights = model.llama, model.swiftkv
        every = np.asarray(self._forward(model.config, *weights, padded, jnp.array([start])))
        expected = every[range(start - 1, len(row) - 1), row[start:]]
        np.testing.assert_allclose(found[1], expected, atol=1e-4)


@pytest.mark.short("own, groups, a tail", "boundary, extended", "boundary, copies of heads")
@pytest.mark.parametrize("name", CASES)
def test_answers_and_pages(name, tmp_path):
    case = CASES[name]
    base = student(case)
    paths = adapters_of(case, base, tmp_path)
    mesh = None if case.mesh is None else make_mesh(case.mesh)
    options = test_engine.small(
        max_model_len=LENGTH,
        max_num_seqs=4 * dp_size(mesh),
        enable_lora=True,
        max_loras=2,
        max_lora_rank=2,
        lora_upper_only=case.upper_only,
    )
    engine: Engine[ModelRunner]
    engine = Engine.from_model(base, options, swiftkv=case.swiftkv, mesh=mesh)
    for one, path in paths.items():
        engine.adapters.load(one, path)
    oracle = Oracle(case, base, tmp_path, paths)
    requests = [greedy(PROMPT[at:], adapter=one) for at in range(2) for one in ("", *paths)]
    for request, found in zip(requests, run(engine, requests), strict=True):
        oracle.check(request, found)

    def hits(one: str) -> int:
        engine.reset_stats()
        run(engine, [greedy(PROMPT[4:], adapter=one)])
        return engine.prefix_stats.hits

    assert hits("") == 0
    cached = hits("")
    assert cached in (12, 16)
    shares = case.swiftkv and not case.extended  # prompts run upper layers of the others
    assert hits("upper") == (cached if shares else 0)
    if "whole" in paths:
        assert [hits("whole"), hits("whole")] == [0, cached]
    assert engine.stats.compilations == 0
    if mesh is not None:  # as the weights are
        q, o = (getattr(engine.model_runner.weights.adapters[0], name) for name in "qo")
        assert [q.a.sharding.spec, q.b.sharding.spec] == [P(), P(MODEL)]
        assert [o.a.sharding.spec, o.b.sharding.spec] == [P(None, None, MODEL), P()]
