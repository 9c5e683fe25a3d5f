"""Checkpoints of 8-bit matrices in the authors' FP8 format, made by hand."""

import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from tests import tiny

E4M3 = ml_dtypes.float8_e4m3fn
PUBLISHED = Path(__file__).parents[1] / "fixtures" / "quantization"
"""Folder of what programs write to `quantization_config`."""


def published(name: str) -> dict[str, Any]:
    return json.loads((PUBLISHED / f"{name}.json").read_text())


# Of Snowflake/Llama-3.1-SwiftKV-8B-Instruct-FP8.
QUANTIZATION_CONFIG = published("swiftkv-fp8")


def fp8_tensors(hf, scale_dtype=np.float32, seed: int = 0) -> dict[str, np.ndarray]:
    """Every tensor of a tiny checkpoint, Linears but the head as llm-compressor leaves them."""
    tensors = {}
    for name, tensor in tiny.tensors_for(hf, seed).items():
        if not name.endswith("_proj.weight") and "_proj_swiftkv.weight" not in name:
            tensors[name] = tensor
            continue
        scale = (np.abs(tensor).max(axis=1, keepdims=True) / 448).astype(scale_dtype)
        tensors[name] = np.clip(tensor / scale.astype(np.float32), -448, 448).astype(E4M3)
        tensors[f"{name}_scale"] = scale
    return tensors


def dequantized(tensors) -> dict[str, np.ndarray]:
    return {
        name: tensor.astype(np.float32) * tensors[f"{name}_scale"].astype(np.float32)
        if tensor.dtype == E4M3
        else tensor
        for name, tensor in tensors.items()
        if not name.endswith("_scale")
    }


@functools.cache
def hf_fields(**overrides):
    return tiny.hf_config(num_hidden_layers=4, **overrides) | {
        "quantization_config": QUANTIZATION_CONFIG,
        "torch_dtype": "float32",
    }


def write(path: Path, hf, tensors) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(hf))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


def tokens() -> jax.Array:
    return jnp.asarray(tiny.tokens_for(hf_fields(), 2, 9))


def stored(path: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Name -> dtype, shape and bytes, read by hand: safetensors gives NumPy no 8-bit floating-point
    numbers."""
    content = (path / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    header.pop("__metadata__")
    spans = {
        name: [start + offset for offset in entry["data_offsets"]] for name, entry in header.items()
    }
    return {
        name: (entry["dtype"], entry["shape"], content[slice(*spans[name])])
        for name, entry in header.items()
    }
