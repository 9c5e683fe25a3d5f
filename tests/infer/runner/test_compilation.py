"""All programs compiled at once, and the counter of compilations."""

import jax

from swiftkv_jax.infer.runner.compilation import CompileCounter, compile_all


def test_all_are_compiled_and_counted():
    before, done = CompileCounter.read(), []
    lowered = {
        ("double", n): (lambda n=n: jax.jit(lambda x: x * 2 + n).lower(1.0)) for n in range(3)
    }
    compiled = compile_all(lowered, lambda: done.append(1))
    assert len(done) == 3 and CompileCounter.read() == before + 3
    assert [float(compiled["double", n](5.0)) for n in range(3)] == [10, 11, 12]
    assert CompileCounter.read() == before + 3
