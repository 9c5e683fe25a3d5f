"""safetensors files, a tensor at a time: strict reading, streaming writing, a checksum for each
tensor.

The format has no checksum of its own. Files written here keep a CRC-32 of each tensor's bytes in
the header's metadata (`crc32`: a JSON object of name -> hexadecimal), where other readers ignore
it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from ..errors import CheckpointError
from ..process.json_files import check_no_pointer

DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
    "I64": np.dtype(np.int64),
}
WIDE = ("F32", "BF16", "F16")
"""Codes of the dtypes of weights that are not quantised."""
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_CHUNK_BYTES = 16 * 2**20


@dataclasses.dataclass(frozen=True)
class Stored:
    """A tensor in a file, unread."""

    name: str
    file: Path
    shape: tuple[int, ...]
    code: str
    """The format's name of the dtype: a key of `DTYPES`, or one that is not supported."""
    start: int
    """Byte of the file at which its values begin."""
    crc32: int | None
    """CRC-32 of the tensor's bytes; None if the file records none."""

    @property
    def dtype(self) -> np.dtype:
        """Raises `CheckpointError` for one that is not supported."""
        if self.code not in DTYPES:
            raise CheckpointError(f"{self.file}: {self.name}: dtype {self.code} is not supported")
        return DTYPES[self.code]


def read_header(file: Path) -> tuple[list[Stored], dict[str, str]]:
    """The tensors and the metadata of a file. Raises `CheckpointError` if it is missing, truncated
    or garbled."""
    try:
        with safe_open(file, framework="np") as handle:  # checks all of the header
            starts = _starts(file)
            metadata = handle.metadata() or {}
            checksums = {
                name: int(value, 16)
                for name, value in json.loads(metadata.get("crc32", "{}")).items()
            }
            slices = {name: handle.get_slice(name) for name in handle.keys()}
            stored = [
                Stored(
                    name,
                    file,
                    tuple(part.get_shape()),
                    str(part.get_dtype()),
                    starts[name],
                    checksums.get(name),
                )
                for name, part in slices.items()
            ]
    except FileNotFoundError:
        raise CheckpointError(f"{file}: no such file") from None
    except (SafetensorError, OSError, ValueError, AttributeError, TypeError) as error:
        if file.is_file():
            with file.open("rb") as opened:
                check_no_pointer(file, opened.read(64))
        raise CheckpointError(
            f"{file}: not a complete safetensors file ({error}); copy or download it again"
        ) from None
    return stored, metadata


def read_into(out: np.ndarray, tensor: Stored, index: tuple[slice, ...]) -> None:
    """Copy the slice `index` (start and stop, one per axis) of a tensor into `out`, cast to its
    dtype, in chunks.

    Raises `CheckpointError` if the file cannot be read, or if the slice is the whole tensor and its
    checksum is wrong.
    """
    first = index[0].start
    stop = index[0].stop
    whole = all(
        part.stop - part.start == size for part, size in zip(index, tensor.shape, strict=True)
    )
    checksum = 0
    for rows in _row_chunks(tensor, first, stop):
        block = read_block(tensor, (rows, *index[1:]))
        if whole and tensor.crc32 is not None:
            checksum = crc32(block, checksum)
        with np.errstate(over="ignore", invalid="ignore"):
            out[rows.start - first : rows.stop - first] = block
    if whole:
        _check(tensor, checksum)


def verify(tensor: Stored) -> None:
    """Raise `CheckpointError` if the file records a checksum for this tensor and its bytes do not
    have it."""
    if tensor.crc32 is None:
        return
    checksum = 0
    for chunk in _chunks(tensor):
        checksum = crc32(read_block(tensor, chunk), checksum)
    _check(tensor, checksum)


def same_values(a: Stored, b: Stored) -> bool:
    """True if two tensors have equal shapes and values, compared in chunks."""
    if a.shape != b.shape:
        return False
    return all(np.array_equal(_wide(a, chunk), _wide(b, chunk)) for chunk in _chunks(a))


def crc32(block: np.ndarray, start: int = 0) -> int:
    return zlib.crc32(np.ascontiguousarray(block).reshape(-1).view(np.uint8), start)


def write_file(
    file: Path,
    tensors: Sequence[tuple[str, tuple[int, ...], np.dtype]],
    blocks: Iterable[np.ndarray],
    metadata: Mapping[str, str],
) -> dict[str, int]:
    """Write one file, holding one tensor at a time in memory: name -> CRC-32 of what was written.

    `blocks` yields the arrays of `tensors` (name, shape, dtype) in that order; dtypes must be among
    `DTYPES`.
    """
    checksums = {name: 0 for name, _, _ in tensors}
    with open(file, "wb") as out:
        out.write(_header(tensors, metadata, checksums))  # a placeholder of the final length
        for (name, shape, dtype), block in zip(tensors, blocks, strict=True):
            assert block.shape == shape and block.dtype == dtype, (
                f"{name}: {block.dtype}{block.shape}, expected {dtype}{shape}"
            )
            checksums[name] = crc32(block)
            out.write(np.ascontiguousarray(block).reshape(-1).view(np.uint8).data)
        out.seek(0)
        out.write(_header(tensors, metadata, checksums))
    return checksums


def _header(
    tensors: Sequence[tuple[str, tuple[int, ...], np.dtype]],
    metadata: Mapping[str, str],
    checksums: Mapping[str, int],
) -> bytes:
    """Eight bytes of length, then JSON padded so that the data starts on a multiple of eight."""
    recorded = json.dumps({name: f"{value:08x}" for name, value in checksums.items()})
    header: dict[str, object] = {"__metadata__": {"format": "pt", **metadata, "crc32": recorded}}
    start = 0
    for name, shape, dtype in tensors:
        stop = start + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": _CODES[dtype], "shape": list(shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def read_block(tensor: Stored, index: tuple[slice, ...]) -> np.ndarray:
    """A slice in the file's dtype. Opens the file anew: pages of a mapped file count as this
    process's memory.

    Not with `safe_open`, which has no 8-bit floating-point numbers for NumPy.
    """
    dtype = tensor.dtype
    num_bytes = math.prod(tensor.shape) * dtype.itemsize
    try:
        mapped = np.memmap(tensor.file, np.uint8, mode="r", offset=tensor.start, shape=(num_bytes,))
        return np.array(mapped.view(dtype).reshape(tensor.shape)[index], subok=False)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{tensor.file}: cannot read {tensor.name} ({error})") from None


def _starts(file: Path) -> dict[str, int]:
    """Name -> first byte of each tensor of a file whose header is known to be sound."""
    with open(file, "rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    return {
        name: 8 + size + entry["data_offsets"][0]
        for name, entry in header.items()
        if name != "__metadata__"
    }


def _row_chunks(tensor: Stored, first: int, stop: int) -> Iterator[slice]:
    """Slices of the leading axis that cover first..stop, each of at most 16 MiB unless one row is
    larger."""
    row_bytes = math.prod(tensor.shape[1:]) * tensor.dtype.itemsize
    rows = max(1, _CHUNK_BYTES // max(1, row_bytes))
    return (slice(start, min(start + rows, stop)) for start in range(first, stop, rows))


def _chunks(tensor: Stored) -> Iterator[tuple[slice, ...]]:
    """Indices of parts that make up a tensor, also one without axes."""
    if not tensor.shape:
        return iter([()])
    return ((rows,) for rows in _row_chunks(tensor, 0, tensor.shape[0]))


def _wide(tensor: Stored, chunk: tuple[slice, ...]) -> np.ndarray:
    return read_block(tensor, chunk).astype(np.float32)


def _check(tensor: Stored, checksum: int) -> None:
    if tensor.crc32 is not None and checksum != tensor.crc32:
        raise CheckpointError(
            f"{tensor.file}: {tensor.name} is damaged (checksum {checksum:08x}, recorded "
            f"{tensor.crc32:08x}); copy the file again"
        )
