"""Prefill through the kernels that would widen a whole cache in 8 bits, and get gathered pages."""

import numpy as np
import pytest

from swiftkv_jax.infer.engine.engine import Engine
from swiftkv_jax.infer.engine.options import EngineOptions
from swiftkv_jax.infer.engine.requests import Request
from swiftkv_jax.infer.engine.sampling_params import SamplingParams
from swiftkv_jax.infer.runner.model_runner import ModelRunner
from tests.infer.runner.test_build import model
from tests.pallas_kernels.interpreted import device_of


def answer(engine: Engine[ModelRunner]) -> list[int]:
    """The answer to a prompt whose last chunk reads more pages than the others."""
    prompt = np.random.default_rng(0).integers(0, 61, 390).tolist()
    request = Request(prompt, SamplingParams(max_tokens=3, ignore_eos=True))
    return [token for _, output in engine.run([request]) for token in output.token_ids]


@pytest.mark.parametrize(
    ("implementation", "dtype", "page_size", "contexts"),
    [
        pytest.param("tpu", "float32", 128, (3, 12), marks=pytest.mark.long),
        pytest.param("hopper", "bfloat16", 64, (4, 24), marks=pytest.mark.long),
    ],
)
def test_an_engine_on_a_kernel(implementation, dtype, page_size, contexts):
    """The kernel, interpreted with race detection, answers as XLA does without a gather."""
    served = model(dtype, 64)
    options = EngineOptions(
        kv_cache_dtype="int8",
        max_num_seqs=1,
        max_model_len=1536,
        page_size=page_size,
        chunks=(128,),
        decode_rows=(1,),
        decode_steps=1,
        one_size=True,
    )
    expected = answer(Engine.from_model(served, options, attention="xla"))
    with device_of(implementation):
        engine = Engine.from_model(served, options)
        assert engine.model_runner.shapes.contexts == contexts
        used, prefill = set(), engine.model_runner._prefill

        def recorded(program, shards):
            used.add(program.context)
            return prefill(program, shards)

        engine.model_runner._prefill = recorded
        assert answer(engine) == expected
    assert used == {*contexts}
