"""Compiled programs in a folder: found by what they are made from, and never a wrong or a damaged
one."""

import functools
import os
import secrets
import time
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from swiftkv_jax.infer.runner import kept_programs
from swiftkv_jax.infer.runner.compilation import compile_all
from swiftkv_jax.infer.runner.kept_programs import KeptPrograms

MISS = "/jax/compilation_cache/cache_misses"


@functools.partial(jax.jit, static_argnames="factor", donate_argnames="tree")
def scaled(tree, *, factor: int):
    return {name: leaf * factor for name, leaf in tree.items()}


def lower(function, *operands, **static):
    return function.lower(*operands, **static)


def made_from(factor: int, length: int = 3, *, function=scaled, lower=lower) -> functools.partial:
    tree = {"x": jax.ShapeDtypeStruct((length,), jnp.float32)}
    return functools.partial(lower, function, tree, factor=factor)


def compile_new(kept: KeptPrograms, made: functools.partial, options=None) -> None:
    """Compile a program of which JAX's cache, on or off, says that it did not have it."""

    def compile_it(compiler_options):
        compiled = made().compile(compiler_options)
        jax.monitoring.record_event(MISS)
        return compiled

    kept.compile(made, options, SimpleNamespace(compile=compile_it))  # pyright: ignore


@pytest.fixture
def factor() -> int:
    """A factor that JAX's cache has no program with."""
    return secrets.randbits(20) + 2


@pytest.fixture
def again(tmp_path):
    return lambda: KeptPrograms(tmp_path, jax.devices()[0])


def test_found_by_what_it_is_made_from(again, factor, monkeypatch):
    compile_new(again(), made_from(factor))
    found = again().load(made_from(factor), None)
    assert found({"x": jnp.ones(3)})["x"].tolist() == [factor] * 3
    others = made_from(factor + 1), made_from(factor, 4)
    assert [again().load(other, None) for other in others] == [None, None]
    assert again().load(made_from(factor), {"xla_cpu_enable_fast_math": True}) is None
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    assert again().load(made_from(factor), None) is None
    monkeypatch.undo()
    assert again().load(made_from(factor), None) is not None
    monkeypatch.setattr(kept_programs, "_code", lambda: "of another version")
    assert again().load(made_from(factor), None) is None


def test_what_may_be_wrong_is_not_kept(again, factor, tmp_path):
    made = made_from(factor)
    compiled = made().compile()
    again().compile(made, None, SimpleNamespace(compile=lambda compiler_options: compiled))
    inner = jax.jit(lambda tree, factor: tree, static_argnames="factor")
    compile_new(again(), made_from(factor, function=inner))
    values = functools.partial(lower, scaled, {"x": jnp.ones(2000)}, factor=factor)
    compile_new(again(), values)
    assert list(tmp_path.iterdir()) == [], "out of JAX's cache; a function without a name; values"


def test_the_rest_is_compiled(again, factor, tmp_path):
    def never(*_, **__):
        raise AssertionError("lowered")

    compile_new(again(), made_from(factor))
    lowered: Any = {"kept": made_from(factor, lower=never), "new": made_from(factor + 1)}
    counts = []
    compiled = compile_all(lowered, lambda *count: counts.append(count), kept=again())
    assert counts == [(0, 2), (1, 2), (2, 2)] and list(compiled) == ["kept", "new"]
    found = [program({"x": jnp.ones(3)})["x"][0] for program in compiled.values()]
    assert found == [factor, factor + 1]


def test_what_no_start_has_used_is_removed(again, factor, tmp_path):
    months = time.time() - 2 * kept_programs.UNUSED_DAYS * 24 * 60 * 60
    programs = made_from(factor), made_from(factor + 1)
    for made in programs:
        compile_new(again(), made)
    for path in tmp_path.iterdir():
        os.utime(path, (months, months))
    used, unused = programs
    assert again().load(used, None) is not None
    compile_new(again(), made_from(factor + 2))
    assert len(list(tmp_path.iterdir())) == 2
    assert again().load(used, None) is not None and again().load(unused, None) is None


def test_a_damaged_file_is_compiled_anew(again, factor, tmp_path, caplog):
    made = made_from(factor)
    compile_new(again(), made)
    (file,) = tmp_path.iterdir()
    file.write_bytes(file.read_bytes()[:-9])
    assert again().load(made, None) is None
    compile_new(again(), made)
    assert again().load(made, None) is not None
