"""The shapes that an engine compiles, by its options and its device."""

import dataclasses

import pytest

from swiftkv_jax.checkpoints.hf_config import config_from_hf
from swiftkv_jax.infer.engine.options import EngineOptions
from swiftkv_jax.infer.runner.shapes import choose_shapes
from tests import tiny

MIB = 2**20


@pytest.mark.parametrize(
    ("platform", "weight_bytes", "given", "expected"),
    [
        ("gpu", MIB, None, 32),
        ("tpu", MIB, None, 32),
        ("cpu", 255 * MIB, None, 0),
        ("cpu", 256 * MIB, None, 32),
        ("cpu", MIB, 4, 4),
        ("gpu", MIB, 0, 0),
        ("gpu", MIB, 1000, 64),
    ],
)
def test_few_sequences_decode_one_step_where_the_host_keeps_up(
    platform, weight_bytes, given, expected
):
    options = EngineOptions(max_model_len=64, max_num_seqs=64, single_step_rows=given)
    shapes = choose_shapes(
        config_from_hf(tiny.hf_config()),
        options,
        dp_size=1,
        platform=platform,
        page_bytes=1024,
        weight_bytes=weight_bytes,
        memory_limit=None,
    )
    assert shapes.single_step_rows == expected
    assert bool(shapes.single_step_sizes) == bool(expected)


def gpu_pages(options: EngineOptions, kept_bytes: int = 0) -> int:
    """Pages of 1 MiB on a GPU with 2 GiB."""
    shapes = choose_shapes(
        config_from_hf(tiny.hf_config()),
        options,
        dp_size=1,
        platform="gpu",
        page_bytes=MIB,
        weight_bytes=16 * MIB,
        memory_limit=2048 * MIB,
        kept_bytes=kept_bytes,
    )
    return shapes.num_pages


def test_a_model_that_stays_beside_the_weights_takes_pages():
    options = EngineOptions(max_model_len=64, max_num_seqs=4)
    assert gpu_pages(options) - gpu_pages(options, kept_bytes=15 * MIB) == 15


def test_an_engine_for_one_call_takes_what_its_sequences_fill():
    options = EngineOptions(max_model_len=64, max_num_seqs=4, page_size=16)
    assert gpu_pages(options) > 1000
    assert gpu_pages(dataclasses.replace(options, one_size=True)) == 4 * 4
