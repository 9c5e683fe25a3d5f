"""A process whose engine still has work ends normally."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = """
from swiftkv_jax.infer import Engine, EngineOptions, Request, SamplingParams
from tests import tiny

def start(model):
    sizes = {"max_model_len": 512, "max_num_seqs": 16, "page_size": 64, "decode_steps": 128}
    engine = Engine.from_model(model, EngineOptions(**sizes, one_size=True))
    params = SamplingParams(max_tokens=400, temperature=1.0, top_p=0.9, ignore_eos=True)
    for number in range(16):
        engine.add_request(Request([1, 2, number], params))
    for _ in range(2):
        engine.step()
    return engine

hf = tiny.hf_config(num_hidden_layers=3, num_key_value_layers=1, max_position_embeddings=512)
engine = start(tiny.model_of(hf, tiny.tensors_for(hf)))
"""


@pytest.mark.long
@pytest.mark.parametrize(
    "last", ["assert engine.has_work", pytest.param("del engine", marks=pytest.mark.long)]
)
def test_a_process_may_end_before_its_requests(last):
    environment = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_backend_optimization_level=0"}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM + last],
        cwd=ROOT,
        env=os.environ | environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (run.returncode, run.stderr) == (0, ""), run.stderr
