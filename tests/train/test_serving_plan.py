"""What a plan prints about serving."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

from swiftkv_jax.model.params import llama_shapes
from swiftkv_jax.plan.cost import decode_weights
from swiftkv_jax.plan.presets import PRESETS
from swiftkv_jax.plan.tables import serving_table
from swiftkv_jax.train.__main__ import main

BFLOAT16 = jnp.dtype(jnp.bfloat16)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "llama-3.1-405b"])
def test_weights_of_the_teacher_are_its_matrices(name):
    """All but the norms and the embedding, of which a step reads single rows."""
    config = PRESETS[name].cut(PRESETS[name].num_layers)
    llama = dataclasses.replace(llama_shapes(config), embed=None)
    matrices = [
        leaf for leaf in jax.tree.leaves(llama) if leaf.ndim > 2 or config.vocab_size in leaf.shape
    ]
    assert decode_weights(config, swiftkv=False) == sum(leaf.size for leaf in matrices)


@pytest.mark.parametrize(
    ("served", "lines"),
    [
        (
            {},
            ["served (boundary)", "68.17    127.96   53%", "19.30     19.30  100%"]
            + ["16.08     16.08  100%", "128.00    128.00  100%", "128.00    128.00  100%"],
        ),
        (
            {"generated_kv": "own"},
            ["served (own)", "68.17    127.96   53%", "19.57     19.30  101%"]
            + ["16.35     16.08  102%", "128.00    128.00  100%", "128.00    128.00  100%"],
        ),
        (
            {"generated_kv": "own", "exact_tail": 64, "key_value_group_size": 4},
            ["served (own, tail 64)", "67.10    127.96   52%", "19.84     19.30  103%"]
            + ["16.62     16.08  103%", "80.00    128.00   62%", "160.00    128.00  125%"],
        ),
        (  # three maps; two layers' queries, attention with its cache, and outputs twice
            {"prompt_attention_layers": 3, "exact_head": 1},
            ["served (boundary, exact head)", "72.30    127.96   57%", "19.81     19.30  103%"]
            + ["16.39     16.08  102%", "128.00    128.00  100%", "128.00    128.00  100%"],
        ),
    ],
)
def test_table(served, lines):
    config = dataclasses.replace(PRESETS["llama-3.1-8b"], num_key_value_layers=16, **served)
    printed = serving_table(config, BFLOAT16, 8192).splitlines()
    assert len(printed) == len(lines)
    for line, expected in zip(printed, lines, strict=True):
        assert expected in line


@pytest.mark.parametrize("command", [[], ["calibrate"]])
def test_dry_runs_print_it(command, capsys):
    flags = "--dry-run --model llama-3.1-8b --generated-kv own --exact-tail 64".split()
    if command:
        flags += ["--output-dir", "unused"]
    assert main([*command, *flags]) == 0
    assert "served (own, tail 64)" in capsys.readouterr().out


def test_a_speculator_is_planned(capsys):
    """12 bytes a weight for itself and its moments, 8 for its gradient and bfloat16 copy; beside
    fsdp=8 it is the larger part."""
    flags = "--dry-run --model llama-3.1-8b --speculator 3 --mesh fsdp=8 --batch-size 8"
    assert main([*flags.split()]) == 0
    _, _, plan = capsys.readouterr().out.partition("then a speculator of 3 drafts, ")
    assert plan.startswith("1,184,907,264 weights, in 3,000 steps")
    assert re.search(r"speculator, float32, and its moments +13\.24\n", plan)
    assert re.search(r"\ntotal +24\.60\n", plan)
