"""Quantised checkpoints in the formats of other programs, made by hand: integers are drawn, put
into words one at a time, and multiplied out apart from the package's own decoders."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_dtypes
import numpy as np

from tests import tiny

E4M3 = ml_dtypes.float8_e4m3fn
Tensors = dict[str, np.ndarray]
PLAIN = {"model_type": "llama", "swiftkv": False, "num_key_value_layers": 0}


def words(integers: np.ndarray, bits: int, order: Sequence[int] = range(8)) -> np.ndarray:
    """int32 [rows, ceil(columns bits / 32)]: integer `order[i]` of each 32 bits of a row stands at
    bit `i * bits`; zeros follow the last."""
    per_word = 32 // bits
    rows, columns = integers.shape
    out = np.zeros((rows, -(-columns // per_word)), np.uint32)
    for row in range(rows):
        for word in range(out.shape[1]):
            value = 0
            for i in range(per_word):
                column = word * per_word + order[i]
                if column < columns:
                    value |= int(integers[row, column]) << (i * bits)
            out[row, word] = value
    return out.view(np.int32)


def columns(integers: np.ndarray, bits: int) -> np.ndarray:
    """The same, packed along the rows."""
    return np.ascontiguousarray(words(integers.T, bits).T)


@dataclasses.dataclass(frozen=True)
class Drawn:
    """Random integers of one matrix, and what they mean."""

    u: np.ndarray  # [O, I], without a sign
    zeros: np.ndarray  # [O, groups], without a sign
    scales: np.ndarray  # f16 [O, groups]
    group: int

    @property
    def values(self) -> np.ndarray:
        """(u - z) s, a column at a time."""
        out = np.empty(self.u.shape, np.float32)
        for column in range(out.shape[1]):
            g = column // self.group
            steps = self.u[:, column].astype(np.float32) - self.zeros[:, g].astype(np.float32)
            out[:, column] = steps * self.scales[:, g].astype(np.float32)
        return out


def draw(rng, outputs: int, inputs: int, bits: int, group: int, zero: int | None = None) -> Drawn:
    """`group` 0 is all inputs; `zero` None draws zeros, of at least 1."""
    group = group or inputs
    groups = -(-inputs // group)
    u = rng.integers(0, 2**bits, (outputs, inputs))
    drawn = rng.integers(1, 2**bits, (outputs, groups))
    zeros = drawn if zero is None else np.full_like(drawn, zero)
    scales = rng.uniform(0.5, 1.5, (outputs, groups)) / (2 ** (bits - 1) * np.sqrt(inputs))
    scales *= rng.choice([-1, 1], scales.shape)  # auto-round writes half of them negative
    return Drawn(u, zeros, scales.astype(np.float16), group)


# Encoders: (rng, outputs, inputs) -> (tensors of the matrix, its values) -------


def packed(bits: int, group: int, symmetric: bool):
    def encode(rng, outputs: int, inputs: int) -> tuple[Tensors, np.ndarray]:
        drawn = draw(rng, outputs, inputs, bits, group, 2 ** (bits - 1) if symmetric else None)
        tensors = {
            "weight_packed": words(drawn.u, bits),
            "weight_scale": drawn.scales.astype(ml_dtypes.bfloat16),
            "weight_shape": np.array([outputs, inputs], np.int64),
        }
        if not symmetric:
            tensors["weight_zero_point"] = columns(drawn.zeros, bits)
        exact = dataclasses.replace(drawn, scales=tensors["weight_scale"])
        return tensors, exact.values

    return encode


def gptq(bits: int, group: int, version: int, zero: int | None = None, extra: bool = True):
    def encode(rng, outputs: int, inputs: int) -> tuple[Tensors, np.ndarray]:
        drawn = draw(rng, outputs, inputs, bits, group, zero)
        stored = drawn.zeros - 1 if version == 1 else drawn.zeros
        tensors = {
            "qweight": columns(drawn.u.T, bits),
            "qzeros": words(stored.T, bits),
            "scales": np.ascontiguousarray(drawn.scales.T),
        }
        if extra:
            tensors["g_idx"] = np.array([i // drawn.group for i in range(inputs)], np.int32)
            tensors["bias"] = np.zeros(outputs, np.float16)
        return tensors, drawn.values

    return encode


def awq(group: int, zero: int | None = None):
    def encode(rng, outputs: int, inputs: int) -> tuple[Tensors, np.ndarray]:
        drawn, order = draw(rng, outputs, inputs, 4, group, zero), (0, 2, 4, 6, 1, 3, 5, 7)
        tensors = {
            "qweight": words(drawn.u.T, 4, order),
            "qzeros": words(drawn.zeros.T, 4, order),
            "scales": np.ascontiguousarray(drawn.scales.T),
        }
        return tensors, drawn.values

    return encode


def scaled(
    block: tuple[int, int],
    dtype=E4M3,
    suffix="weight_scale",
    shape=None,
    extra=(),
    scale_dtype: Any = np.float32,
):
    """Scales of blocks of (outputs, inputs), 0 is all; `shape` of a single one."""

    def encode(rng, outputs: int, inputs: int) -> tuple[Tensors, np.ndarray]:
        down, across = block[0] or outputs, block[1] or inputs
        largest = 448 if dtype == E4M3 else 127
        weight = rng.uniform(-largest, largest, (outputs, inputs)).astype(dtype)
        counts = -(-outputs // down), -(-inputs // across)
        scale = rng.uniform(0.5, 2, counts) / (largest * np.sqrt(inputs))
        scale = scale.astype(scale_dtype)
        values = np.empty((outputs, inputs), np.float32)
        for row in range(outputs):
            for column in range(inputs):
                s = scale[row // down, column // across]
                values[row, column] = np.float32(weight[row, column]) * np.float32(s)
        tensors = {"weight": weight, suffix: scale if shape is None else scale.reshape(shape)}
        return tensors | {name: np.ones(1, np.float32) for name in extra}, values

    return encode


def e2m1(code: int) -> float:
    """The value of 4 bits: a sign, two of exponent with bias 1, one of mantissa."""
    sign, exponent, mantissa = code >> 3, code >> 1 & 3, code & 1
    magnitude = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -magnitude if sign else magnitude


def mxfp4(rng, outputs: int, inputs: int) -> tuple[Tensors, np.ndarray]:
    codes = rng.integers(0, 16, (outputs, inputs))
    powers = rng.integers(118, 124, (outputs, -(-inputs // 32)), np.uint8)
    packed, values = np.zeros((outputs, inputs // 2), np.uint8), np.empty(codes.shape, np.float32)
    for row in range(outputs):
        for column in range(inputs):
            code = int(codes[row, column])
            packed[row, column // 2] |= code << (4 * (column % 2))
            values[row, column] = e2m1(code) * 2.0 ** (int(powers[row, column // 32]) - 127)
    return {"weight_packed": packed, "weight_scale": powers}, values


# Directories -------------------------------------------------------------------


def compressed_tensors(format: str, weights: dict[str, Any], activations: dict[str, Any] | None):
    """A `quantization_config` as llm-compressor writes it."""
    common = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": None,
        "observer": "minmax",
        "observer_kwargs": {},
        "symmetric": True,
    }
    inputs = None if activations is None else common | {"num_bits": 8} | activations
    group = {
        "format": format,
        "input_activations": inputs,
        "output_activations": None,
        "targets": ["Linear"],
        "weights": common | weights,
    }
    return {
        "config_groups": {"group_0": group},
        "format": format,
        "global_compression_ratio": None,
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "sparsity_config": {},
        "transform_config": {},
        "version": "0.11.0",
    }


def fp8(block: list[int] | None, scheme: str, **others) -> dict[str, Any]:
    return {
        "activation_scheme": scheme,
        "fmt": "e4m3",
        "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"],
        "quant_method": "fp8",
        "weight_block_size": block,
    } | others


def gptq_config(bits: int = 4, group: int = 16, **others) -> dict[str, Any]:
    return {
        "bits": bits,
        "checkpoint_format": "gptq",
        "damp_percent": 0.1,
        "desc_act": False,
        "group_size": group,
        "lm_head": False,
        "quant_method": "gptq",
        "sym": True,
        "true_sequential": True,
    } | others


AWQ = {
    "backend": "autoawq",
    "bits": 4,
    "do_fuse": False,
    "exllama_config": None,
    "fuse_max_seq_len": None,
    "group_size": 16,
    "modules_to_fuse": None,
    "modules_to_not_convert": None,
    "quant_method": "awq",
    "version": "gemm",
    "zero_point": True,
}
W4 = {"num_bits": 4, "strategy": "group", "group_size": 16, "type": "int"}
W8 = {"num_bits": 8, "strategy": "channel", "type": "int"}
F8 = {"num_bits": 8, "type": "float"}
MX4 = {
    "num_bits": 4,
    "type": "float",
    "strategy": "group",
    "group_size": 32,
    "scale_dtype": "torch.uint8",
    "zp_dtype": None,
}
TOKENS = {"dynamic": True, "strategy": "token", "observer": None}
FBGEMM = {
    "activation_scale_ub": 1200.0,
    "modules_to_not_convert": [
        *(f"model.layers.1.self_attn.{name}_proj" for name in "qkvo"),
        "model.layers.0",
        "lm_head",
    ],
    "quant_method": "fbgemm_fp8",
}

FORMATS: dict[str, tuple[dict[str, Any], Callable]] = {
    "fp8 blocks": (fp8([32, 32], "dynamic"), scaled((32, 32), suffix="weight_scale_inv")),
    "fp8 powers of two": (
        fp8([32, 32], "dynamic", scale_fmt="ue8m0"),
        scaled((32, 32), suffix="weight_scale_inv", scale_dtype=ml_dtypes.float8_e8m0fnu),
    ),
    "fp8 static": (
        fp8(None, "static"),
        scaled((0, 0), suffix="weight_scale_inv", shape=(), extra=["activation_scale"]),
    ),
    "fp8 autofp8": (
        {
            "quant_method": "fp8",
            "activation_scheme": "static",
            "ignored_layers": ["re:.*lm_head", "model.layers.1.mlp.up_proj"],
        },
        scaled((0, 0), shape=(1,), extra=["input_scale"]),
    ),
    "fbgemm_fp8": (FBGEMM, scaled((1, 0))),
    "fbgemm_fp8 of all": (FBGEMM | {"modules_to_not_convert": ["lm_head"]}, scaled((1, 0))),
    "FP8": (
        compressed_tensors(
            "float-quantized",
            F8 | {"strategy": "tensor"},
            {"dynamic": False, "strategy": "tensor", "type": "float"},
        ),
        scaled((0, 0), shape=(1,), extra=["input_scale"]),
    ),
    "FP8_BLOCK": (
        compressed_tensors(
            "float-quantized",
            F8 | {"strategy": "block", "block_structure": [32, 16]},
            {"dynamic": True, "strategy": "group", "group_size": 16, "type": "float"},
        ),
        scaled((32, 16)),
    ),
    "W4A16": (compressed_tensors("pack-quantized", W4, None), packed(4, 16, True)),
    "W4A16 asymmetric": (
        compressed_tensors("pack-quantized", W4 | {"symmetric": False}, None),
        packed(4, 16, False),
    ),
    "W8A16": (compressed_tensors("pack-quantized", W8, None), packed(8, 0, True)),
    "W8A8 of some": (
        compressed_tensors("int-quantized", W8, TOKENS | {"type": "int"})
        | {"ignore": ["lm_head", "re:.*layers.0.self_attn"]},
        scaled((1, 0), np.int8),
    ),
    "MXFP4": (
        compressed_tensors("mxfp4-pack-quantized", MX4, MX4 | {"dynamic": True, "observer": None}),
        mxfp4,
    ),
    # As compressed-tensors wrote it before it had `scale_dtype`.
    "MXFP4A16": (
        compressed_tensors("mxfp4-pack-quantized", MX4 | {"scale_dtype": None}, None)
        | {"ignore": ["re:.*self_attn.*", "re:.*lm_head.*"]},
        mxfp4,
    ),
    "gptq": (gptq_config(), gptq(4, 16, 1, zero=8)),
    "gptq 8 bits": (gptq_config(8, -1), gptq(8, 0, 1)),
    "gptq_v2": (
        gptq_config(checkpoint_format="gptq_v2", dynamic={"-:.*\\.0\\.mlp": {}}),
        gptq(4, 16, 2, extra=False),
    ),
    "awq": (AWQ | {"modules_to_not_convert": ["o_proj"]}, awq(16)),
    "awq symmetric": (AWQ | {"zero_point": False, "group_size": -1}, awq(0, zero=8)),
}
KEPT = {"fp8 static", "FP8", "fbgemm_fp8 of all"}
"""Formats of which matrices stay in 8 bits."""
FP8_DYNAMIC = (  # stays in 8 bits
    compressed_tensors("float-quantized", F8 | {"strategy": "channel"}, TOKENS | {"type": "float"}),
    scaled((1, 0)),
)
WIDE = {  # what a list of names leaves as it is
    "fp8 autofp8": ("layers.1.mlp.up_proj",),
    "fbgemm_fp8": ("layers.0.", "self_attn"),
    "W8A8 of some": ("layers.0.self_attn",),
    "MXFP4A16": ("self_attn",),
    "gptq_v2": ("layers.0.mlp",),
    "awq": ("o_proj",),
}


def directory(name: str, **overrides) -> tuple[dict[str, Any], Tensors, Tensors]:
    """(fields of config.json, tensors, the same with every matrix wide) of a tiny Llama."""
    config, encode = FORMATS[name]
    hf = tiny.hf_config(**({"num_hidden_layers": 2} | PLAIN | overrides))
    tensors, wide = encode_all(tiny.tensors_for(hf), encode, WIDE.get(name, ()))
    return hf | {"quantization_config": config, "torch_dtype": "float16"}, tensors, wide


def encode_all(
    plain: Mapping[str, np.ndarray], encode: Callable, left: tuple[str, ...] = ()
) -> tuple[Tensors, Tensors]:
    """The tensors of a checkpoint with its Linears drawn anew, but for names with a part in `left`,
    and what they mean."""
    rng = np.random.default_rng(7)
    tensors, wide = {}, {}
    for name, tensor in plain.items():
        module = name.removesuffix(".weight")
        if "_proj" not in name or name.endswith("bias") or any(part in name for part in left):
            tensors[name] = wide[name] = tensor
            continue
        parts, wide[name] = encode(rng, *tensor.shape)
        tensors |= {f"{module}.{part}": array for part, array in parts.items()}
    return tensors, wide
