"""Attention through XLA on NVIDIA GPUs that have no kernels of their own, compiled for an A100, L4,
H100 and B200 that are not here: kernels of a step, temporaries, traffic. And cuDNN's calls as they
are lowered: its library, which is not here, makes their kernels on the device."""

import functools
import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest

from swiftkv_jax.pallas_kernels import cudnn, decode_attention, prefill_attention
from tests.compile.compiled import compile_for

MIB = 2**20
GPUS = {"a100:1": "sm_80", "l4:1": "sm_89", "h100:1": "sm_90", "b200:1": "sm_100"}
N, K, H, PAGE = 32, 8, 128, 128  # Llama-3.1-8B, the engine's page
TABLE = 131_072 // PAGE  # pages of the longest sequence, with the engine's default options
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional"}


def like(*sizes, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype)


def loops(text: str) -> list[Counter]:
    """Kernels of each computation that runs them one by one, by operation: the entry, and the
    bodies and conditions of loops."""
    computations = re.findall(r"^(?:ENTRY )?%?([\w.-]+) \([^\n]*\{\n(.*?)^\}", text, re.M | re.S)
    fused = set(re.findall(r"(?:calls|to_apply)=%?([\w.-]+)", text))
    return [
        Counter(
            operation
            for operation in re.findall(r"^ +(?:ROOT )?%?[\w.-]+ = .*? ([a-z][\w-]*)\(", body, re.M)
            if operation not in FREE
        )
        for name, body in computations
        if name not in fused
    ]
