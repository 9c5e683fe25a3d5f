"""Matrices that are several tensors of a file: which tensors each has, checked against the
`quantization_config`, and their values, read in parts."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import ClassVar

import ml_dtypes
import numpy as np

from ...errors import CheckpointError
from ..gguf.file import GgufTensor
from ..peft import LowRank
from ..safetensors_io import WIDE, Stored, read_block
from ..tensor_map import Expected, MappedLeaf, TensorNames, check_no_problems, differences
from . import decode
from .formats import QuantizationConfig, WeightFormat

_CHUNK_ELEMENTS = 4 * 2**20
_ZEROS_OF_8 = 0x88888888  # a word of eight zeros of 4 bits
_ACTIVATION_SCALES = ("input_scale", "activation_scale", "input_zero_point")


@dataclasses.dataclass(frozen=True)
class EncodedMatrix:
    """A matrix of several tensors, unread. Readers see it as a float32 tensor `X.weight`."""

    name: str
    shape: tuple[int, ...]
    """(outputs, inputs)."""
    format: WeightFormat
    tensors: Mapping[str, Stored]
    """Last part of a tensor's name -> tensor, all of them."""
    code: ClassVar[str] = "F32"
    crc32: ClassVar[None] = None

    @property
    def file(self) -> Path:
        return next(iter(self.tensors.values())).file

    def read_into(self, out: np.ndarray, index: tuple[slice, ...]) -> None:
        """Decode the slice `index` (start and stop, of outputs and inputs) into `out`, cast to its
        dtype, a few million elements at a time.

        Raises `CheckpointError` if a file cannot be read or a scale is not finite.
        """
        rows, columns = index
        row_step, column_step = self.format.alignment
        first_column = columns.start // column_step * column_step
        stop_row = min(_ceil(rows.stop, row_step) * row_step, self.shape[0])
        stop_column = min(_ceil(columns.stop, column_step) * column_step, self.shape[1])
        step = max(1, _CHUNK_ELEMENTS // (stop_column - first_column) // row_step) * row_step
        for first in range(rows.start // row_step * row_step, stop_row, step):
            stop = min(first + step, stop_row)
            values = self._decode(slice(first, stop), slice(first_column, stop_column))
            begin = max(first, rows.start)
            end = min(stop, rows.stop)
            with np.errstate(over="ignore"):
                out[begin - rows.start : end - rows.start] = values[
                    begin - first : end - first,
                    columns.start - first_column : columns.stop - first_column,
                ]

    def _decode(self, rows: slice, columns: slice) -> np.ndarray:
        """Values of outputs and inputs that are aligned to the format, float32."""
        parts = _parts(self.format, self.tensors)
        format = self.format
        arrays = {name: self._read(name, part, rows, columns) for name, part in parts.items()}
        group_size = format.block[1]
        if format.layout == "scaled":
            return decode.decode_scaled(*arrays.values(), block=format.block)
        if format.layout == "packed":
            return decode.decode_packed(
                **arrays,
                bits=format.bits,
                group_size=group_size,
                num_inputs=columns.stop - columns.start,
            )
        if format.layout == "mxfp4":
            return decode.decode_mxfp4(
                **arrays, group_size=group_size, num_inputs=columns.stop - columns.start
            )
        if format.layout == "awq":
            return decode.decode_awq(**arrays, group_size=group_size)
        return decode.decode_gptq(
            **arrays, bits=format.bits, group_size=group_size, stored_zero=format.stored_zero
        )

    def _read(self, name: str, part: _Part, rows: slice, columns: slice) -> np.ndarray:
        tensor = self.tensors[name]
        if part.is_scalar:
            values = _whole(tensor).reshape(1, 1)
        else:
            values = read_block(tensor, part.index(rows, columns))
        if part.dtype is not None:
            values = values.view(part.dtype)
        if "scale" in name and not np.isfinite(values.astype(np.float32)).all():
            raise CheckpointError(
                f"{tensor.file}: {tensor.name} has scales that are not finite; copy or download it "
                f"again"
            )
        return values


@dataclasses.dataclass(frozen=True)
class SpreadScale:
    """The only scale of a matrix, unread, which readers see as one of each output."""

    name: str
    shape: tuple[int, ...]
    stored: Stored
    crc32: ClassVar[None] = None

    @property
    def file(self) -> Path:
        return self.stored.file

    @property
    def code(self) -> str:
        return self.stored.code

    def read_into(self, out: np.ndarray, index: tuple[slice, ...]) -> None:
        out[...] = _whole(self.stored).astype(np.float32).reshape(1, 1)


type Tensor = Stored | EncodedMatrix | SpreadScale | GgufTensor | LowRank
"""The tensor with the values of one name."""


def join_tensors(
    path: Path,
    stored: Iterable[Stored],
    expected: Iterable[MappedLeaf],
    config: QuantizationConfig,
    spelling: TensorNames,
) -> list[Tensor]:
    """`stored` with the tensors of each quantised matrix of `expected` as one.

    Raises `CheckpointError` for matrices whose tensors are not those that `config` says.
    """
    names = {spelling.in_file(name): (name, leaf) for leaf in expected for name in leaf.tensors}
    modules: dict[str, dict[str, Stored]] = collections.defaultdict(dict)
    others: list[Tensor] = []
    problems: dict[str, list[str]] = collections.defaultdict(list)
    for tensor in stored:
        module, _, last = tensor.name.rpartition(".")
        _, leaf = names.get(f"{module}.weight", ("", None))
        if leaf is None or leaf.param.in_axes is None or tensor.name in names and last == "bias":
            others.append(tensor)
        elif last in modules[module]:
            problems["repeated"].append(tensor.name)
        else:
            modules[module][last] = tensor
    for module, tensors in modules.items():
        name, leaf = names[f"{module}.weight"]
        format = config.format_of(*spelling.in_lists(name.removesuffix(".weight")))
        is_wide = "weight" in tensors and tensors["weight"].code in WIDE
        is_wide = is_wide and tensors.keys() <= {"weight", "bias"}
        if format is None and is_wide:
            others += tensors.values()
        elif format is None:
            problems["quantised, though quantization_config leaves them out"].append(module)
        elif is_wide:
            problems[f"not quantised, though quantization_config says {format}"].append(module)
        else:
            shape = leaf.stored_shape
            for kind, where in _problems(format, shape, tensors).items():
                problems[kind] += (f"{module}.{text}" for text in where)
            others.append(EncodedMatrix(f"{module}.weight", shape, format, tensors))
    check_no_problems(path, problems)
    for matrix in others:
        if isinstance(matrix, EncodedMatrix):
            _check_values(matrix)
    return others


def keep_matrices(stored: Iterable[Stored], format: WeightFormat) -> list[Tensor]:
    """`stored` of matrices that stay in 8 bits, with a scale for each output where a matrix has
    one, and without the scales of activations: these are quantised anew, token by token."""
    kept: list[Tensor] = []
    outputs = {t.name: t.shape[0] for t in stored if t.name.endswith(".weight") and t.shape}
    for tensor in stored:
        module, _, last = tensor.name.rpartition(".")
        count = outputs.get(f"{module}.weight")
        is_scale = last in ("weight_scale", "weight_scale_inv") and set(tensor.shape) <= {1}
        if count and is_scale and format.block == (0, 0):
            kept.append(SpreadScale(f"{module}.weight_scale", (count, 1), tensor))
        elif not (count and format.activation_scales and last in _ACTIVATION_SCALES):
            kept.append(tensor)
    return kept


# Tensors of a format ----------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Part:
    """One tensor of a matrix."""

    joined: tuple[int, int]
    """(outputs, inputs) that an element is for; 0 is all of them."""
    codes: tuple[str, ...] = WIDE
    transposed: bool = False
    """True if inputs come first."""
    dtype: np.dtype | None = None
    """Dtype of its elements, if the file's dtype says only how many bits they have."""

    @property
    def is_scalar(self) -> bool:
        """One number, of any number of axes."""
        return self.joined == (0, 0)

    def index(self, rows: slice, columns: slice) -> tuple[slice, ...]:
        """The elements for these outputs and inputs."""
        found = [
            slice(part.start // size, _ceil(part.stop, size)) if size else slice(0, 1)
            for part, size in zip((rows, columns), self.joined, strict=True)
        ]
        return tuple(reversed(found) if self.transposed else found)

    def shape(self, matrix: tuple[int, ...]) -> tuple[int, ...]:
        rows, columns = self.index(slice(0, matrix[0]), slice(0, matrix[1]))
        return rows.stop, columns.stop


def _parts(format: WeightFormat, found: Iterable[str]) -> dict[str, _Part]:
    """Last part of a tensor's name -> what it is, of those that are decoded, in the order of the
    function's arguments. `found` decides between two names of one tensor."""
    if format.layout == "scaled":
        codes = ("F8_E4M3",) if format.number == "float" else ("I8",)
        scale = "weight_scale_inv" if "weight_scale_inv" in found else "weight_scale"
        return {"weight": _Part((1, 1), codes), scale: _Part(format.block, (*WIDE, "F8_E8M0"))}
    if format.layout == "mxfp4":
        exponents = np.dtype(ml_dtypes.float8_e8m0fnu)
        return {
            "weight_packed": _Part((1, 2), ("U8",)),
            "weight_scale": _Part(format.block, ("U8",), dtype=exponents),
        }
    words, packing, (_, group) = ("I32",), format.packing, format.block
    if format.layout == "packed":
        parts = {
            "weight_packed": _Part((1, packing), words),
            "weight_scale": _Part(format.block),
        }
        zero = {"weight_zero_point": _Part((packing, group), words)}
        return parts if format.symmetric else parts | zero
    weight = (1, packing) if format.layout == "gptq" else (packing, 1)
    return {
        "qweight": _Part(weight, words, transposed=True),
        "qzeros": _Part((packing, group), words, transposed=True),
        "scales": _Part(format.block, transposed=True),
    }


def _problems(
    format: WeightFormat, shape: tuple[int, ...], tensors: Mapping[str, Stored]
) -> dict[str, list[str]]:
    """Kind -> last parts of the names of tensors that are not as the format has them."""
    expected: dict[str, Expected] = {
        name: (part.shape(shape), part.codes) for name, part in _parts(format, tensors).items()
    }
    if format.layout == "scaled":
        scale = next(name for name in expected if name != "weight")
        # A single scale may have any number of axes.
        if format.block == (0, 0) and scale in tensors and set(tensors[scale].shape) <= {1}:
            expected[scale] = (tensors[scale].shape, expected[scale][1])
    if format.layout == "packed":
        expected["weight_shape"] = ((2,), ("I32", "I64"))
    if format.layout == "gptq":
        # Exporters write a bias of zeros for matrices without one; `_check_values` checks both.
        may_be = {"g_idx": (shape[1:], ("I32",)), "bias": (shape[:1], WIDE)}
        needed = {"g_idx"} if format.act_order else set()
        expected |= {name: may_be[name] for name in may_be if name in needed or name in tensors}
    unread = _ACTIVATION_SCALES if format.activation_scales else ()
    found = {name: (t.shape, t.code) for name, t in tensors.items() if name not in unread}
    return differences(expected, found)


def _check_values(matrix: EncodedMatrix) -> None:
    """Raise `CheckpointError` for a small tensor that says that the matrix is not as the format has
    it."""
    for name, tensor in matrix.tensors.items():
        where = f"{tensor.file}: {tensor.name}"
        if name == "weight_shape" and tuple(_whole(tensor)) != matrix.shape:
            found = _whole(tensor).tolist()
            raise CheckpointError(f"{where} is {found}, expected {list(matrix.shape)}")
        if name == "bias" and _whole(tensor).any():
            raise CheckpointError(f"{where} is not zero, but config.json says there is no bias")
        if name == "qzeros" and matrix.format.layout == "awq" and matrix.format.symmetric:
            if (_whole(tensor).view(np.uint32) != _ZEROS_OF_8).any():
                raise CheckpointError(
                    f"{where} has other zeros than 8, but quantization_config.zero_point is false; "
                    f"if the zeros are right, set it to true"
                )
        if name != "g_idx":
            continue
        inputs = np.arange(matrix.shape[1])
        groups = inputs // (matrix.format.block[1] or matrix.shape[1])
        if not np.array_equal(_whole(tensor), groups):
            raise CheckpointError(
                f"{where} is not in order: matrices quantised in the order of activations "
                f"(act-order, quantization_config.desc_act) are not supported"
            )


def _whole(tensor: Stored) -> np.ndarray:
    return read_block(tensor, tuple(slice(0, size) for size in tensor.shape))


def _ceil(count: int, size: int) -> int:
    return -(-count // size)
