"""Formats in which quantised checkpoints store a matrix, as functions of its tensors: each returns
the [outputs, inputs] values in float32.

Every function takes whole tensors, or the part of each that belongs to some outputs and inputs:
such a part is a smaller matrix in the same format, where the outputs and inputs begin at multiples
of what the tensors join (`alignment` of `formats.WeightFormat`).

Packed integers stand in int32 words, `32 // bits` of them in each, the first in the lowest bits.
`u` below is such an integer without a sign.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np

_E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_E2M1 = np.concatenate([_E2M1, -_E2M1])
# The two values in a byte, the one in the low bits first.
_E2M1_PAIRS = np.stack([np.tile(_E2M1, 16), np.repeat(_E2M1, 16)], axis=1)
# Which output of its eight each integer of a word belongs to, from the lowest bits on.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def decode_scaled(
    weight: np.ndarray, weight_scale: np.ndarray, *, block: tuple[int, int]
) -> np.ndarray:
    """weight · weight_scale: 8-bit values [O, I], float8_e4m3fn or int8, with a scale for each
    `block` of (outputs, inputs), of which 0 is all of them.

    Blocks of (128, 128) are `fp8` with `weight_block_size` (DeepSeek-V3, Qwen3-FP8; its
    `weight_scale_inv` is multiplied too: the inverse of the scale that made the values small) and
    `FP8_BLOCK` of compressed-tensors; the last block of an axis may be smaller. (0, 0) is one scale
    for the tensor, (1, 0) one per output: `FP8_DYNAMIC`, `fbgemm_fp8` and `W8A8`. Sources:
    `inference/kernel.py` (`weight_dequant`) of github.com/deepseek-ai/DeepSeek-V3,
    `quantization/lifecycle/forward.py` (`dequantize`) of github.com/vllm-project/compressed-tensors
    and `integrations/fbgemm_fp8.py` of transformers.
    """
    if weight.dtype == ml_dtypes.float8_e4m3fn:  # a table is faster than `astype`
        values = _E4M3[weight.view(np.uint8)]
    else:
        values = weight.astype(np.float32)
    values *= _repeat(weight_scale, block, weight.shape)
    return values


def decode_packed(
    weight_packed: np.ndarray,
    weight_scale: np.ndarray,
    weight_zero_point: np.ndarray | None = None,
    *,
    bits: int,
    group_size: int,
    num_inputs: int,
) -> np.ndarray:
    """(u - z) · weight_scale: `pack-quantized` of compressed-tensors (W4A16, W8A16).

    `weight_packed` is int32 [O, ceil(I bits / 32)], packed along the inputs; `weight_scale`
    [O, groups]; groups are of `group_size` inputs, 0 is one of all. `weight_zero_point` int32
    [ceil(O bits / 32), groups] is packed along the outputs; without it z is 2^(bits - 1). Integers
    and zeros have a sign before they are packed: 2^(bits - 1) is added to both, and cancels.
    Source: `compressors/quantized_compressors/pack_quantized.py` of
    github.com/vllm-project/compressed-tensors.
    """
    integers = _unpack(weight_packed, bits)[:, :num_inputs]
    if weight_zero_point is None:
        zeros = np.full(weight_scale.shape, 2 ** (bits - 1))
    else:
        zeros = _unpack(weight_zero_point.T, bits).T[: len(integers)]
    return _scaled_steps(integers, zeros, weight_scale, group_size)


def decode_mxfp4(
    weight_packed: np.ndarray, weight_scale: np.ndarray, *, group_size: int, num_inputs: int
) -> np.ndarray:
    """value · weight_scale: `mxfp4-pack-quantized` of compressed-tensors (MXFP4, MXFP4A16).

    `weight_packed` is uint8 [O, ceil(I / 2)], two values of 4 bits (e2m1: a sign, then 0, 0.5, 1,
    1.5, 2, 3, 4, 6) in each byte, the first in the low ones; `weight_scale` float8_e8m0fnu
    [O, groups], powers of two, 2^(byte - 127) as files have them; groups are of `group_size`
    inputs. Sources: `compressors/mxfp4/base.py`, `compressors/mx_utils.py` and
    `compressors/nvfp4/helpers.py` of github.com/vllm-project/compressed-tensors.
    """
    values = _E2M1_PAIRS[weight_packed].reshape(len(weight_packed), -1)[:, :num_inputs]
    return values * _repeat(weight_scale, (1, group_size), values.shape)


def decode_gptq(
    qweight: np.ndarray,
    qzeros: np.ndarray,
    scales: np.ndarray,
    *,
    bits: int,
    group_size: int,
    stored_zero: int,
) -> np.ndarray:
    """(u - z) · scales, of GPTQ without act-order.

    `qweight` is int32 [I bits / 32, O], packed along the inputs; `qzeros` int32
    [groups, O bits / 32], packed along the outputs; `scales` [groups, O]; groups are of
    `group_size` inputs, 0 is one of all. The zero z is the integer in `qzeros` plus `stored_zero`:
    1 in `checkpoint_format` gptq, where a zero of 8 is stored as 7, and 0 in gptq_v2. Sources:
    `nn_modules/qlinear/torch.py` and `utils/model.py` (`convert_gptq_v1_to_v2_format`) of
    github.com/ModelCloud/GPTQModel.
    """
    zeros = _unpack(qzeros, bits).T.astype(np.float32) + stored_zero
    return _scaled_steps(_unpack(qweight.T, bits), zeros, scales.T, group_size)


def decode_awq(
    qweight: np.ndarray, qzeros: np.ndarray, scales: np.ndarray, *, group_size: int
) -> np.ndarray:
    """(u - z) · scales, of AWQ's `version` gemm: 4 bits.

    `qweight` is int32 [I, O / 8], `qzeros` int32 [groups, O / 8], both packed along the outputs, of
    which each word has the eight in the order 0, 2, 4, 6, 1, 3, 5, 7; `scales` [groups, O]; groups
    are of `group_size` inputs, 0 is one of all. Source: `awq/modules/linear/gemm.py` and
    `awq/utils/packing_utils.py` of github.com/casper-hansen/AutoAWQ.
    """
    integers, zeros = (
        _unpack(words, 4)
        .reshape(len(words), -1, 8)[:, :, np.argsort(_AWQ_ORDER)]
        .reshape(len(words), -1)
        .T
        for words in (qweight, qzeros)
    )
    return _scaled_steps(integers, zeros, scales.T, group_size)


def _scaled_steps(
    integers: np.ndarray, zeros: np.ndarray, scales: np.ndarray, group_size: int
) -> np.ndarray:
    """(integers - zeros) · scales of [O, I] and twice [O, groups], float32 [O, I]."""
    block = (1, group_size)
    shape = integers.shape
    values = integers.astype(np.float32, order="C")
    values -= _repeat(zeros, block, shape)
    values *= _repeat(scales, block, shape)
    return values


def _unpack(words: np.ndarray, bits: int) -> np.ndarray:
    """The integers in int32 words [A, B], uint8 [A, B * 32 / bits]."""
    unsigned = np.ascontiguousarray(words).view(np.uint32)
    mask = 2**bits - 1
    shifted = [(unsigned >> shift & mask).astype(np.uint8) for shift in range(0, 32, bits)]
    return np.stack(shifted, axis=2).reshape(len(words), -1)


def _repeat(values: np.ndarray, block: tuple[int, int], shape: tuple[int, ...]) -> np.ndarray:
    """`values` of blocks, float32, one for each element of an array of `shape`; those that blocks
    of 0, all of an axis, leave at length 1 are left to broadcasting."""
    values = values.astype(np.float32)
    for axis, count in enumerate(block):
        if count > 1:
            values = np.repeat(values, count, axis)
    return values[: shape[0], : shape[1]]
