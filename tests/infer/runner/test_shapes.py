"""The shapes that an engine compiles, by its options and its device."""

import dataclasses
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from swiftkv_jax.checkpoints.hf_config import config_from_hf
from swiftkv_jax.errors import UsageError
from swiftkv_jax.infer.engine.options import (
    MAX_SPECULATIVE_TOKENS,
    EngineOptions,
    SpeculativeConfig,
)
from swiftkv_jax.infer.engine.shapes import Shapes
from swiftkv_jax.infer.runner.choose_shapes import choose_shapes, offline_num_seqs, with_contexts
from swiftkv_jax.infer.runner.layout import Layout
from swiftkv_jax.infer.runner.lowering import lower_all
from swiftkv_jax.infer.runner.serving_form import served_config, weight_shapes
from swiftkv_jax.model.attention import Attention
from swiftkv_jax.plan.hardware import hardware_of
from swiftkv_jax.plan.presets import LLAMA_8B
from tests import tiny

MIB = 2**20


HALVES = 256, 512, 1024, 2048
FITTED = {"max_model_len": 2304, "kv_cache_memory": 176 * 18 * 1024}


def shapes_on(platform: str, options: EngineOptions, **device: Any) -> Shapes:
    config = config_from_hf(tiny.hf_config(max_position_embeddings=8192))
    memory = {"page_bytes": 1024, "weight_bytes": MIB, "memory_limit": None}
    return choose_shapes(config, options, dp_size=1, platform=platform, **memory | device)


@pytest.mark.parametrize(
    ("platform", "kind", "fields", "expected"),
    [
        ("gpu", "NVIDIA H100 80GB HBM3", {}, (256, 512, 1024, 2048)),
        ("gpu", "NVIDIA L4", {}, (256, 512, 1024, 2048)),
        ("tpu", "TPU v6e", {}, (512, 1024, 2048)),
        ("tpu", "TPU v5p", {}, (256, 512, 1024, 2048)),
        ("gpu", "NVIDIA H100 80GB HBM3", {"max_num_batched_tokens": 512}, (256, 512)),
        ("gpu", "NVIDIA H100 80GB HBM3", {"max_num_batched_tokens": 4096}, (*HALVES, 4096)),
        ("gpu", "NVIDIA H100 80GB HBM3", {"max_num_batched_tokens": 8192}, (*HALVES, 4096, 8192)),
        ("gpu", "NVIDIA A100-SXM4-80GB", {}, HALVES),
        ("gpu", "NVIDIA H100 80GB HBM3", {"one_size": True}, (2048,)),
        # Prompts of many short sequences share a chunk.
        ("gpu", "NVIDIA H100 80GB HBM3", {"max_model_len": 256}, (256, 512, 1024, 2048)),
        ("gpu", "NVIDIA H100 80GB HBM3", {"max_model_len": 64, "max_num_seqs": 2}, (128,)),
        ("cpu", None, {}, (64, 512)),
        ("cpu", None, {"max_model_len": 64}, (16, 64)),
    ],
)
def test_sizes_of_a_chunk(platform, kind, fields, expected):
    """Halves of the largest down to the first that takes no longer than reading the weights."""
    hardware = hardware_of(kind or "")
    device = {} if hardware is None else {"ridge_tokens": hardware.ridge_tokens}
    assert shapes_on(platform, EngineOptions(**fields), **device).chunks == expected


def test_smaller_chunks_have_one_number_of_tiles():
    shapes = shapes_on("gpu", EngineOptions())
    assert {tokens: shapes.tiles(tokens) for tokens in shapes.chunks} == {
        256: (2 + 8,),
        512: (4 + 16,),
        1024: (8 + 32,),
        2048: (16 + 4, 16 + 32),
    }
    assert shapes.chunk(300, tiles=20, context_pages=0)[:2] == (512, 20)
    assert shapes.chunk(300, tiles=21, context_pages=0)[:2] == (1024, 40)


@pytest.mark.parametrize(
    ("platform", "fields", "expected"),
    [
        ("gpu", {}, (1, 8, 32, 64)),
        ("gpu", {"max_num_seqs": 256}, (1, 8, 32, 64, 96, 128, 192, 256)),
        ("gpu", {"max_num_seqs": 500}, (1, 8, 32, 64, 96, 128, 192, 256, 384, 500)),
        ("gpu", {"max_num_seqs": 4}, (1, 4)),
        ("gpu", {"one_size": True}, (64,)),
        # The pages that are left hold 176 sequences of 2,304 tokens.
        ("gpu", {"one_size": True, "max_num_seqs": 256, **FITTED}, (192, 256)),
        ("gpu", {"one_size": True, "max_num_seqs": 150, **FITTED}, (150,)),
        ("gpu", {"max_num_seqs": 150, **FITTED}, (1, 8, 32, 64, 96, 128, 150)),
        ("tpu", {}, (1, 8, 64)),
        ("cpu", {"max_num_seqs": 1}, (1,)),
    ],
)
def test_sizes_of_a_decode_call(platform, fields, expected):
    assert shapes_on(platform, EngineOptions(**fields)).decode_rows == expected


@pytest.mark.parametrize(
    ("platform", "requests", "expected"),
    [("gpu", 1000, 256), ("gpu", 100, 100), ("gpu", 1, 64), ("tpu", 1000, 256), ("cpu", 1000, 64)],
)
def test_sequences_where_all_answers_are_awaited_together(platform, requests, expected):
    assert offline_num_seqs(platform, requests) == expected


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
    shapes = shapes_on(platform, options, weight_bytes=weight_bytes)
    assert shapes.single_step_rows == expected
    assert bool(shapes.single_step_sizes) == bool(expected)


def speculating(options: SpeculativeConfig, num_heads: int, num_kv_heads: int) -> Shapes:
    """The shapes of a model with so many heads, of 8 rows at most."""
    chosen = EngineOptions(max_model_len=64, max_num_seqs=8, speculative=options)
    config = config_from_hf(tiny.hf_config())
    config = dataclasses.replace(config, num_heads=num_heads, num_kv_heads=num_kv_heads)
    memory = {"page_bytes": 1024, "weight_bytes": MIB, "memory_limit": None}
    return choose_shapes(config, chosen, dp_size=1, platform="gpu", **memory)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "drafts"),
    [(32, 8, 15), (40, 8, 11), (28, 4, 8), (64, 8, 7), (14, 2, 8), (32, 1, 1)],
)
def test_drafts_are_by_default_as_many_as_the_kernels_take(num_heads, num_kv_heads, drafts):
    shapes = speculating(SpeculativeConfig(), num_heads, num_kv_heads)
    assert shapes.most_drafts == drafts and shapes.widths[0] == drafts + 1
    if drafts < MAX_SPECULATIVE_TOKENS:
        more = SpeculativeConfig(num_speculative_tokens=drafts + 1)
        with pytest.raises(
            UsageError, match=f"must be at most {drafts} with {num_heads // num_kv_heads}"
        ):
            speculating(more, num_heads, num_kv_heads)
    with pytest.raises(UsageError, match="does not go with 64 query heads for each key/value"):
        speculating(SpeculativeConfig(), 64, 1)


def test_without_suffix_decoding_the_device_looks_nothing_up():
    """No match is as long as the shortest that drafts follow."""
    off = SpeculativeConfig(model="some", enable_suffix_decoding=False)
    fewest, most = speculating(off, 32, 8).lookup
    assert most < fewest
    assert speculating(SpeculativeConfig(prompt_lookup_max=5), 32, 8).lookup == (2, 5)


def num_programs(*, swiftkv: bool = True, eight_bits: bool = False, **fields: Any) -> int:
    """Programs of an engine for Llama-3.1-8B on an H100."""
    config = served_config(LLAMA_8B, swiftkv)
    memory = {"page_bytes": 16 * MIB, "weight_bytes": 2**34, "memory_limit": 75 * 2**30}
    hardware = hardware_of("NVIDIA H100 80GB HBM3")
    assert hardware is not None
    shapes = choose_shapes(
        config,
        EngineOptions(**fields),
        dp_size=1,
        platform="gpu",
        ridge_tokens=hardware.ridge_tokens,
        **memory,
    )
    if eight_bits:
        shapes = with_contexts(shapes)
    weights = weight_shapes(LLAMA_8B, swiftkv, jnp.bfloat16)
    layout = Layout(config, jnp.dtype(jnp.bfloat16), None)
    return len(lower_all(layout, shapes, weights, Attention(None, "xla")))


def test_the_page_on_serving_counts_the_programs():
    page = (Path(__file__).parents[3] / "docs" / "serving.md").read_text(encoding="utf-8")
    page = " ".join(page.split())
    server = {"single_step_rows": None, "structured_outputs": True}
    student = num_programs()
    assert f"A student's engine has {student} programs by default on an H100" in page
    assert num_programs(swiftkv=False) == student - 1
    assert f"With an 8-bit cache there are {num_programs(eight_bits=True)} on Hopper" in page
    counts = num_programs(**server), num_programs(**server, scoring=True)
    assert "{} with a bfloat16 cache, {} with `--enable-scoring`".format(*counts) in page
    wide = SpeculativeConfig()
    counts = num_programs(speculative=wide), num_programs(**server, speculative=wide)
    assert "without that for a first token: {} in all, {} in a server".format(*counts) in page


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
