"""All programs compiled at once, with the options of an engine, and the counter of compilations."""

import functools
import logging
import threading
import time
from typing import Any

import jax
import pytest

import swiftkv_jax as skv
from swiftkv_jax.infer import Engine, EngineOptions, Request, SamplingParams
from swiftkv_jax.infer.runner import compilation
from swiftkv_jax.infer.runner.compilation import CompileCounter, compile_all
from tests import tiny


def test_all_are_compiled_and_counted():
    CompileCounter.start()
    before, done = CompileCounter.read(), []
    lowered = {
        ("double", n): (lambda n=n: jax.jit(lambda x: x * 2 + n).lower(1.0)) for n in range(3)
    }
    compiled = compile_all(lowered, lambda *counts: done.append(counts))
    assert done == [(n, 3) for n in range(4)]
    assert CompileCounter.read() == before + 3
    assert [float(compiled["double", n](5.0)) for n in range(3)] == [10, 11, 12]
    assert CompileCounter.read() == before + 3


def test_the_order_is_not_that_of_the_ends():
    """Several processes run all of them once, in this order."""

    class Program:
        def __init__(self, seconds: float):
            self.seconds = seconds

        def compile(self, compiler_options=None):
            time.sleep(self.seconds)
            return self

    programs: Any = {(str(n),): lambda n=n: Program(0.2 * (n == 0)) for n in range(4)}
    assert list(compile_all(programs)) == list(programs)


def test_a_log_says_how_far_it_is(caplog, monkeypatch):
    """Without a terminal, from time to time; the program ends when the line is there."""
    monkeypatch.setattr(compilation, "LOG_INTERVAL", 0.01)
    monkeypatch.setattr(logging.getLogger("swiftkv_jax"), "propagate", True)
    caplog.set_level(logging.INFO, "swiftkv_jax")
    said = threading.Event()
    caplog.handler.addFilter(lambda record: said.set() or True)

    class Program:
        def compile(self, compiler_options=None):
            assert said.wait(60)
            return self

    programs: Any = {("one",): Program}
    assert list(compile_all(programs)) == [("one",)]
    assert "compiling: 0 of 1 programs after 0 s" in caplog.messages
    names = [thread.name for thread in threading.enumerate()]
    assert "compile-log" not in names, "it ends with the last program"


def lowered():
    return {("double",): lambda: jax.jit(lambda x: x * 2).lower(1.0)}


@pytest.mark.parametrize(
    ("options", "refusal"),
    [
        ({"no_such": 1}, "No such compile option: 'no_such'"),
        ({"xla_cpu_enable_fast_math": "perhaps"}, "'perhaps' is not a valid bool value"),
    ],
    ids=str,
)
def test_options_that_the_compiler_refuses(options, refusal):
    """By the compiler, so the option has reached it; in one line that names the option."""
    with pytest.raises(skv.UsageError, match=refusal) as error:
        compile_all(lowered(), options=options)
    assert str(error.value).startswith("`compiler_options`: ") and "\n" not in str(error.value)


def test_an_option_that_is_no_option():
    with pytest.raises(skv.UsageError, match="`compiler_options`: 'xla_a'=None must be"):
        EngineOptions(compiler_options={"xla_a": None})  # pyright: ignore[reportArgumentType]


def test_defaults_of_a_program_yield_to_the_options():
    given = {}

    class Program:
        def __init__(self, name):
            self.name = name

        def compile(self, compiler_options=None):
            given[self.name] = compiler_options

    lowered: Any = {name: functools.partial(Program, name) for name in ("a", "b", "c")}
    defaults = {"a": {"x": 1, "y": 1}, "b": {"y": 2}, "c": {}}
    compile_all(lowered, options={"y": 3}, defaults=defaults.__getitem__)
    assert given == {"a": {"x": 1, "y": 3}, "b": {"y": 3}, "c": {"y": 3}}
    compile_all(lowered, defaults=defaults.__getitem__)
    assert given == defaults | {"c": None}, "an empty mapping is another key of the compile cache"


@pytest.mark.long
def test_all_programs_of_an_engine_have_its_options(monkeypatch):
    """And its tokens are those of an engine without."""
    given, compile_one = [], jax.stages.Lowered.compile

    def spy(lowered, compiler_options=None):
        given.append(compiler_options)
        return compile_one(lowered, compiler_options)

    hf = tiny.hf_config(num_hidden_layers=2, num_key_value_layers=1)
    model = skv.add_swiftkv(tiny.model_of(hf, tiny.tensors_for(hf)), 1, 1)
    monkeypatch.setattr(jax.stages.Lowered, "compile", spy)

    def tokens(**options) -> list[int]:
        given.clear()
        shapes = {"max_model_len": 32, "page_size": 4, "max_num_seqs": 2, "one_size": True}
        engine = Engine.from_model(model, EngineOptions(**shapes, **options))
        params = SamplingParams(max_tokens=8, temperature=0.8, top_p=0.9)
        return [
            token
            for _, output in engine.run([Request([1, 2, 3], params)])
            for token in output.token_ids
        ]

    plain = tokens()
    assert given == [None] * len(given) and len(given) >= 5
    harmless = {"xla_llvm_disable_expensive_passes": True}
    assert tokens(compiler_options=harmless) == plain
    assert given == [harmless] * len(given) and len(given) >= 5
