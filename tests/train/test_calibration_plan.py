"""The plan of `train calibrate`: memory, operations, tokens."""

import dataclasses
import re
import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swiftkv_jax.calibration.delta import fit_delta
from swiftkv_jax.calibration.moments import add_batch, zero_moments
from swiftkv_jax.model.attention import Attention
from swiftkv_jax.model.batch import unpacked_batch
from swiftkv_jax.model.initialization import init_llama
from swiftkv_jax.model.params import PromptMLP
from swiftkv_jax.plan import tables
from swiftkv_jax.plan.memory import calibration_host_memory
from swiftkv_jax.plan.presets import PRESETS
from swiftkv_jax.train.__main__ import main
from tests.test_cost import CONFIG


@pytest.mark.parametrize("command", [["calibrate"], []])
def test_a_plan_for_an_unknown_shape_lists_the_known_ones(command, capsys):
    assert main([*command, "--model", "llama-3.1-9b", "--dry-run"]) == 4
    error = capsys.readouterr().err
    assert "llama-3.1-9b: no such file" in error and all(name in error for name in PRESETS)


@pytest.mark.parametrize(
    "model, mesh, tokens, device, host",
    [
        ("llama-3.1-8b", "1x1", 1_048_576, (16, 20), (0.7, 0.8)),
        ("llama-3.1-70b", "fsdp=4,model=2", 2_097_152, (18, 22), (2.4, 2.6)),
        ("llama-3.1-405b", "fsdp=2,model=8", 4_194_304, (50, 70), (7, 8)),
    ],
)
def test_plan_of_the_presets(model, mesh, tokens, device, host, capsys):
    flags = ["--model", model, "--mesh", mesh, "--batch-size", "4", "--dry-run"]
    assert main(["calibrate", *flags]) == 0
    text = capsys.readouterr().out
    assert f"on {tokens:,} tokens" in text
    per_device, of_host = (float(x) for x in re.findall(r"^total +(\d+\.\d\d)$", text, re.M))
    assert device[0] < per_device < device[1]
    assert host[0] < of_host < host[1]
    assert "scale of queries" not in text


def test_plan_of_prompt_attention_layers_and_a_tap(capsys):
    """The regression is twice as wide; a map of each layer is in the devices' memory."""
    flags = ["--model", "llama-3.1-8b", "--batch-size", "1", "--dry-run"]
    flags += ["--prompt-attention-layers", "2", "--boundary-taps", "1"]
    flags += ["--prompt-mlp-neurons", "1024"]
    assert main(["calibrate", *flags]) == 0
    text = capsys.readouterr().out
    closer = "the attention of 2 more layers and 1,024 neurons of each MLP, a tap"
    assert f"with {closer}, generated_kv boundary on 1,048,576 tokens" in text
    assert "one factorisation of 8,192 x 8,192 numbers per upper layer" in text
    assert re.search(r"^maps +0\.11$", text, re.M)  # 2 x 4096 x (4096 + 3 x 1024) x 2 bytes
    moments = re.search(r"^second moments, float32 +(\d+\.\d+)$", text, re.M)
    assert moments is not None
    expected = 4 * 14 * 8192 * (8192 + 2048) / 2**30
    assert float(moments[1]) == pytest.approx(expected, abs=0.01)


def test_plan_of_shared_caches_beside_own_entries(capsys):
    """Which can be calibrated, though not trained: a batch of the second pass is a whole one."""
    flags = ["--model", "llama-3.1-8b", "--key-value-group-size", "4", "--generated-kv", "own"]
    assert main(["calibrate", *flags, "--batch-size", "1", "--dry-run"]) == 0
    _, second = capsys.readouterr().out.split("then a pass over 16,384 of these tokens")
    assert re.search(r"^scores of both +2\.1 ", second, re.M)
    assert main(["calibrate", *flags, "--batch-size", "4", "--dry-run"]) == 0
    assert "then a pass over 32,768 of these tokens" in capsys.readouterr().out


WIDTH = 384


@pytest.mark.short("2-2-0")
@pytest.mark.parametrize(
    ("group", "layers", "taps"),
    [
        (1, 0, 0),
        *(pytest.param(group, 0, 0, marks=pytest.mark.long) for group in (2, 4)),
        (8, 0, 0),
        (1, 0, 1),
        (2, 2, 0),
    ],
)
def test_host_memory_is_what_is_planned(group, layers, taps):
    """With layers so wide that arrays are all there is."""
    config = dataclasses.replace(
        CONFIG,
        vocab_size=64,
        embed_dim=WIDTH,
        mlp_dim=64,
        num_layers=9,
        num_key_value_layers=1,
        key_value_group_size=group,
        prompt_attention_layers=layers,
        boundary_taps=taps,
    )
    llama = init_llama(config, jax.random.key(0))
    mlps = PromptMLP(jnp.zeros((layers, WIDTH, WIDTH))) if layers else None
    moments = zero_moments(config, None)
    tokens = jnp.array(np.random.default_rng(0).integers(0, 64, (4, 32)))
    moments = add_batch(config, Attention(), moments, llama, unpacked_batch(tokens), mlps)
    fit_delta(config, llama, moments, None, mlps=mlps)  # compiles
    tracemalloc.start()
    fit_delta(config, llama, moments, None, mlps=mlps)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    planned = sum(calibration_host_memory(config, jnp.dtype(jnp.float32)).values())
    print(f"peak {peak:,}, planned {planned:,.0f}, ratio {peak / planned:.3f}")
    assert peak == pytest.approx(planned, rel=0.06)


@pytest.mark.parametrize(
    ("scale", "units"), [(1.0, ("MiB", "MFLOP")), (1024.0, ("GiB", "GFLOP"))], ids=str
)
def test_small_models_are_planned_in_small_units(scale, units):
    found = (
        tables.table_of_bytes("memory", {"weights": 3 * 2.0**20 * scale}),
        tables.table_of_flops({"teacher": 3e6 * scale}),
    )
    for table, unit in zip(found, units, strict=True):
        title, *rows = table.splitlines()
        assert title.endswith(unit) and all(re.search(r" 3\.[01]", row) for row in rows)
