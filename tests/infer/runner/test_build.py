"""Which programs an engine has, by the implementation of attention that will run."""

import contextlib
import dataclasses
import functools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import swiftkv_jax as skv
from swiftkv_jax.errors import CheckpointError, UsageError
from swiftkv_jax.infer.engine.options import EngineOptions, SpeculativeConfig
from swiftkv_jax.infer.runner.build import build_model_runner
from swiftkv_jax.infer.runner.lowering import PrefillProgram, Program, UpperProgram, lower_all
from swiftkv_jax.model.cache import KVCacheDtype
from swiftkv_jax.model.mesh import make_mesh
from swiftkv_jax.pallas_kernels import Implementation, choice
from tests import test_speculator as heads
from tests import tiny
from tests.pallas_kernels.interpreted import under

POSITIONS = 65536


@functools.cache
def model(dtype: str, head_dim: int) -> skv.Model:
    hf = tiny.hf_config(
        num_hidden_layers=2,
        num_key_value_layers=1,
        head_dim=head_dim,
        max_position_embeddings=POSITIONS,
    )
    return tiny.model_of(hf, tiny.tensors_for(hf), jnp.dtype(dtype))


def programs(
    served: skv.Model,
    format: KVCacheDtype,
    attention: Implementation | None = None,
    mesh_shape: tuple[int, int] | None = None,
) -> list[Program]:
    """The programs of an engine with a cache of this format, not compiled."""
    options = EngineOptions(kv_cache_dtype=format, max_num_seqs=4, scoring=True)
    mesh = None if mesh_shape is None else make_mesh(mesh_shape)
    runner = build_model_runner(served, options, attention=attention, mesh=mesh)
    return list(lower_all(runner.layout, runner.shapes, runner.weights, runner._attention))


def chunked(found: list[Program]) -> list[Any]:
    """Those that run a chunk."""
    return [program for program in found if isinstance(program, PrefillProgram | UpperProgram)]


IN_PLACE = {  # device, dtype of the weights, head dim, attention: the pages are read as they are
    "a CPU": (None, "float32", 8, None),
    "cuDNN": ("A100", "bfloat16", 64, None),
    "XLA on a GPU": ("A100", "float32", 64, None),
    "a head dim that Hopper's kernel refuses": ("H100", "bfloat16", 8, None),
    "XLA by name": ("H100", "bfloat16", 64, "xla"),
}


@pytest.mark.parametrize("format", ["fp8", "int8"])
@pytest.mark.parametrize("name", IN_PLACE)
def test_a_cache_of_8_bits_takes_no_more_programs(name, format, monkeypatch):
    monkeypatch.setattr(choice, "cudnn_version", lambda: 92000)
    device, dtype, head_dim, attention = IN_PLACE[name]
    served = model(dtype, head_dim)
    with under(device) if device else contextlib.nullcontext():
        found, wide = (programs(served, each, attention) for each in (format, "auto"))
    assert found == wide
    assert all(program.context is None for program in chunked(found))


@pytest.mark.parametrize("device", ["H100", "v5e"])
def test_pages_are_gathered_for_a_kernel_that_would_widen_all(device):
    """In three numbers of them for each program of a chunk."""
    served = model("bfloat16", 64)
    with under(device):
        found, wide = (programs(served, format) for format in ("int8", "auto"))
    in_place = chunked(wide)
    gathered = [
        dataclasses.replace(program, context=pages)
        for program in in_place
        for pages in (8, 64, 512)
    ]
    assert len(in_place) > 2 and {program.context for program in in_place} == {None}
    assert Counter(found) == Counter(wide) - Counter(in_place) + Counter(gathered)


def test_pages_are_not_gathered_on_a_mesh_of_cpus():
    served = model("float32", 8)
    assert programs(served, "fp8", mesh_shape=(2, 2)) == programs(served, "auto", mesh_shape=(2, 2))


def test_what_is_refused_leaves_a_model_that_is_donated_whole(tmp_path):
    """Whatever configs and shapes tell, and the files of a speculator, comes before the weights are
    converted."""
    hf = tiny.hf_config(num_attention_heads=8, num_key_value_heads=1, head_dim=4)
    donated = tiny.model_of(hf, tiny.tensors_for(hf))
    head = heads.write(tmp_path / "head", heads.ARCTIC, heads.published(heads.ARCTIC))
    (head / "model.safetensors").rename(head / "pytorch_model.bin")
    tensors = heads.published(heads.ARCTIC)
    tensors["head.2.weight"] = tensors["head.2.weight"] + 1
    differs = heads.write(tmp_path / "differs", heads.ARCTIC, tensors)
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"speculative": SpeculativeConfig(num_speculative_tokens=8)}, UsageError, "at most 7"),
        ({"speculative": SpeculativeConfig(model=str(head))}, CheckpointError, "can run code"),
        ({"speculative": SpeculativeConfig(model=str(differs))}, CheckpointError, "that differ"),
        ({"decode_rows": (2,)}, UsageError, "must be the 1 sequences"),
        ({"kv_cache_memory": 5000}, UsageError, "too little for one sequence"),
        ({"prefix_cache_host": 100}, UsageError, "is too small"),
    ]
    for fields, error, message in cases:
        options = EngineOptions(max_model_len=64, max_num_seqs=1, **fields)
        with pytest.raises(error, match=message):
            build_model_runner(donated, options, donate=True)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves((donated.llama, donated.swiftkv)))


def test_only_int8_weights_take_quantised_activations():
    options = EngineOptions(quantize_activations=True, max_model_len=128)
    with pytest.raises(UsageError, match="is for int8 weights, these are unquantised: load with"):
        build_model_runner(model("float32", 8), options)


@pytest.mark.parametrize(("generated_kv", "warned"), [(None, 0), ("own", 0), ("boundary", 1)])
def test_serving_a_model_for_own_with_boundary_is_warned_of(generated_kv, warned, caplog):
    found = model("float32", 8)
    made_for_own = dataclasses.replace(found.config, generated_kv="own", exact_tail=2)
    options = EngineOptions(max_model_len=64, max_num_seqs=1, generated_kv=generated_kv)
    build_model_runner(dataclasses.replace(found, config=made_for_own), options)
    assert sum("was made for own" in record.message for record in caplog.records) == warned


@pytest.mark.parametrize(
    ("options", "warned"),
    [({}, 0), ({"generated_kv": "own", "exact_tail": 2}, 1)],
    ids=str,
)
def test_serving_a_model_for_boundary_with_own_is_warned_of(options, warned, caplog):
    build_model_runner(
        model("float32", 8), EngineOptions(max_model_len=64, max_num_seqs=1, **options)
    )
    assert sum("was made for boundary" in record.message for record in caplog.records) == warned


def test_a_tail_beyond_the_positions_is_refused():
    options = EngineOptions(max_model_len=64, generated_kv="own", exact_tail=10**6)
    with pytest.raises(UsageError, match=r"`exact_tail`=1000000: this model has \d+ positions"):
        build_model_runner(model("float32", 8), options)
