"""The memory plan is what is allocated; what does not fit is refused with the figures."""

import dataclasses
import logging
import os
import re

import jax
import jax.numpy as jnp
import pytest

from swiftkv_jax.errors import OutOfMemoryError, UsageError
from swiftkv_jax.infer.engine.engine import Engine
from swiftkv_jax.infer.engine.options import EngineOptions
from swiftkv_jax.infer.runner import build, choose_shapes, memory, model_runner
from swiftkv_jax.infer.runner.layout import Layout
from swiftkv_jax.infer.runner.memory import MemoryPlan, bytes_per_device
from swiftkv_jax.infer.runner.model_runner import ModelRunner
from swiftkv_jax.infer.runner.serving_form import shard_model
from swiftkv_jax.model.mesh import make_mesh
from tests.infer.engine.test_engine import engine_of, model, options, small


def plan_of(engine: Engine[ModelRunner]) -> MemoryPlan:
    assert engine.model_runner.plan is not None
    return engine.model_runner.plan


def test_the_plan_is_what_is_allocated():
    for format in ("auto", "fp8"):
        engine = engine_of(format, True)
        plan, state = plan_of(engine), engine.model_runner._state
        assert plan.cache == sum(leaf.nbytes for leaf in jax.tree.leaves(state.cache))
        assert plan.rows == sum(
            leaf.nbytes for leaf in jax.tree.leaves((state.batch, state.token_counts))
        )
        assert plan.weights == sum(
            leaf.nbytes for leaf in jax.tree.leaves(engine.model_runner.weights)
        )
        tokens = engine.model_runner.shapes.num_pages * engine.model_runner.shapes.page_size
        assert plan.cache == tokens * engine.model_runner.kv_bytes_per_token
        assert plan.temporaries > 0 and plan.program
        assert plan.total - plan.kept == plan.weights + plan.cache + plan.rows + plan.temporaries
        assert f"the model they were copied from {plan.kept / 2**20:.1f} MiB" in str(plan)


def test_a_cache_of_a_given_size():
    engine = Engine.from_model(model(), small(kv_cache_memory=100_000))
    assert 0.9 * 100_000 < plan_of(engine).cache <= 100_000
    message = (
        "the KV cache has room for 16 tokens, too little for one sequence of "
        "`max_model_len`=80.*`kv_cache_memory`"
    )
    with pytest.raises(UsageError, match=message):
        Engine.from_model(model(), small(kv_cache_memory=5_000))


@pytest.mark.parametrize("pages, answer", [(60, None), (59, 76), (20, 0)])
def test_a_cache_for_prompts_but_not_for_answers(pages, answer, caplog):
    """Of 80 tokens in pages of 4, where four that keep their own take two pages besides."""
    found = dataclasses.replace(
        engine_of("auto", True).model_runner.shapes, num_pages=pages, pages_per_own_page=2
    )
    with caplog.at_level(logging.WARNING):
        choose_shapes.log_shapes(found, plan_of(engine_of("auto", True)))
    text = "" if answer is None else f"only if at most {answer} of them keep their own"
    assert text in caplog.text and bool(text) == bool(caplog.text)


@pytest.mark.parametrize("shape", [None, (2, 2)])
def test_a_model_that_is_not_donated_is_counted(shape, monkeypatch):
    """The layers are there twice on the device, embedding and head once."""
    monkeypatch.setattr(build, "memory_limit", lambda device, share: 600 * 2**20)
    mesh = None if shape is None else make_mesh(shape)
    loaded = model() if mesh is None else shard_model(model(), mesh)
    chosen = dataclasses.replace(small(), decode_rows=EngineOptions.decode_rows)
    runner, donated = (
        build.build_model_runner(copied, chosen, mesh=mesh, donate=donate)
        for copied, donate in ((loaded, False), (jax.tree.map(jnp.copy, loaded), True))
    )
    llama = loaded.llama
    assert loaded.swiftkv is not None
    everything, shared = (
        bytes_per_device(tree)
        for tree in ((llama, loaded.swiftkv), (llama.embed, llama.lm_head, llama.final_norm))
    )
    kept, norm = runner._kept_bytes, bytes_per_device(loaded.swiftkv.norm)
    assert kept == everything - shared - norm > bytes_per_device(runner.weights) / 2
    assert donated._kept_bytes == 0
    page_bytes = runner.layout.page_bytes(runner.shapes.page_size)
    fewer = donated.shapes.num_pages - runner.shapes.num_pages
    assert kept // page_bytes <= fewer <= -(-kept // page_bytes)


def test_what_does_not_fit_is_not_taken(monkeypatch):
    """The cache is sized by the device's memory and an estimate, then by the compiler's figures."""
    monkeypatch.setattr(
        choose_shapes, "_temporaries", lambda config, tokens: 0
    )  # a guess that is too low
    monkeypatch.setattr(build, "memory_limit", lambda device, share: int(share * 12_000_000))
    engine = Engine.from_model(model(), small())
    assert 0.8 * 10_800_000 < plan_of(engine).total <= 10_800_000
    with pytest.raises(
        OutOfMemoryError, match=r"= 10\.\d MiB of 10.3 MiB: lower `kv_cache_memory`"
    ):
        copied = jax.tree.map(jnp.copy, model())
        Engine.from_model(copied, small(kv_cache_memory=10_650_000), donate=True)
    monkeypatch.setattr(build, "memory_limit", lambda device, share: 100_000)
    with pytest.raises(UsageError, match="the KV cache has room for"):
        Engine.from_model(model(), small())


def test_a_plan_larger_than_the_machine(monkeypatch):
    """A CPU does not report its memory; the machine does."""

    monkeypatch.setattr(model_runner, "host_memory", lambda: 150_000)
    with pytest.raises(
        UsageError,
        match="the KV cache has room for 0 tokens, too little for one sequence of "
        "`max_model_len`=80",
    ):
        Engine.from_model(model(), small())


def test_a_cache_larger_than_the_machine():
    with pytest.raises(OutOfMemoryError, match="`kv_cache_memory`=40960.00 GiB"):
        Engine.from_model(model(), small(kv_cache_memory=40 * 2**40))


@pytest.mark.parametrize("error", [MemoryError(), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED")])
def test_memory_that_is_not_free_is_reported(error, monkeypatch):
    """The plan fits, but other processes hold the memory."""

    def fail(*_):
        raise error

    monkeypatch.setattr(Layout, "init_state", fail)
    with pytest.raises(OutOfMemoryError, match="no memory is free for the KV cache .memory per"):
        Engine.from_model(model(), small())


def test_options_are_checked():
    for fields, message in (
        ({"max_model_len": 1}, "`max_model_len`=1: must be at least 2"),
        ({"max_model_len": 129}, "`max_model_len`=129 must be from 2 to the model's 128"),
        ({"max_num_seqs": 0}, "`max_num_seqs`=0"),
        ({"kv_cache_dtype": "fp4"}, "'fp4' is not one of"),
        ({"kv_cache_dtype": "bfloat16"}, "needs weights of that dtype"),
        ({"memory_utilization": 1.5}, "`memory_utilization`=1.5"),
        ({"memory_utilization": "0.9"}, "`memory_utilization`='0.9' must be a number"),
        ({"scoring": "no"}, "`scoring`='no' must be a bool"),
        ({"decode_rows": (2,)}, "the last of `decode_rows`=(2,) must be the 4 sequences"),
        ({"decode_rows": (0, 4)}, "`decode_rows`=(0, 4) must be ascending whole numbers"),
        ({"chunks": (16, 4)}, "`chunks`=(16, 4) must be ascending"),
        ({"chunks": (1.5,)}, "`chunks`=(1.5,) must be ascending whole numbers from 1 up"),
        ({"chunks": 256}, "`chunks`=256 must be ascending whole numbers from 1 up"),
    ):
        with pytest.raises(UsageError, match=re.escape(message)):
            Engine.from_model(model(), options(**fields))


def test_a_container_has_the_memory_it_is_given(tmp_path, monkeypatch):
    limit, unlimited = tmp_path / "limit", tmp_path / "unlimited"
    limit.write_text("123456789\n")
    unlimited.write_text("max\n")
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for files, expected in ([limit], 123456789), ([unlimited, tmp_path / "none"], whole):
        monkeypatch.setattr(memory, "CGROUP_LIMITS", files)
        assert memory.host_memory() == expected
