"""GGUF files, a tensor at a time: metadata, the table of tensors, and values decoded while they are
read.

Format: version 2 and 3 of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, little-endian.
The blocks of quantised tensors are decoded by the package gguf. Its reader is not used: it makes
several objects for each token of the vocabulary, 700 MB and 10 seconds for one of 262,144.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
import re
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np

from ...errors import CheckpointError
from ...process.json_files import check_no_pointer
from ..interleaved import Interleaved, split_pairs

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_ALIGNMENT = "general.alignment"
_KINDS = ("general.architecture", "general.type")
_NUMBERS = dict(enumerate("u1 i1 <u2 <i2 <u4 <i4 <f4 ?".split())) | {
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
"""Type of a metadata value -> dtype."""
_STRING = 8
_ARRAY = 9
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
_WIDE = {"F16": "F16", "BF16": "BF16"}
_CHUNK_ELEMENTS = 4 * 2**20


@dataclasses.dataclass(frozen=True)
class StoredBlocks:
    """A tensor of a GGUF file as it is stored, unread."""

    name: str
    file: Path
    shape: tuple[int, ...]
    """Rows first, as NumPy has them; the file lists them the other way round."""
    type_name: str
    """ggml's name of the type: F32, Q4_K."""
    row_bytes: int
    """Bytes of one row of the last axis."""
    start: int
    """Byte of the file at which its values begin."""

    @property
    def is_coded(self) -> bool:
        """Say whether its values are in blocks, which are decoded in any dtype."""
        return self.type_name not in ("F32", *_WIDE)

    def rows(self, first: int, stop: int) -> np.ndarray:
        """f32[stop - first, columns]: these rows, counted over all axes but the last. Reads without
        mapping: pages of a mapped file count as this process's memory."""
        from gguf.constants import GGMLQuantizationType
        from gguf.quants import dequantize

        count = (stop - first) * self.row_bytes
        try:
            values = np.fromfile(
                self.file, np.uint8, count, offset=self.start + first * self.row_bytes
            )
        except OSError as error:
            raise CheckpointError(f"{self.file}: cannot read {self.name} ({error})") from None
        if len(values) != count:
            raise CheckpointError(
                f"{self.file}: ends within {self.name}; copy or download it again"
            )
        blocks = values.reshape(stop - first, self.row_bytes)
        with np.errstate(all="ignore"):  # a scale that is no number makes weights that are none
            return dequantize(blocks, GGMLQuantizationType[self.type_name])

    def whole(self) -> np.ndarray:
        """The values in float32."""
        return self.rows(0, math.prod(self.shape[:-1])).reshape(self.shape)


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """A tensor of a GGUF file as a Hugging Face checkpoint would have it, unread. Readers see one
    in float32, or in the file's 16 bits."""

    name: str
    """Its name in Hugging Face checkpoints."""
    stored: StoredBlocks
    expert: int | None = None
    """The matrix of a stack [experts, outputs, inputs]."""
    interleaved: Interleaved | None = None
    """The order of its rows, where llama.cpp has changed it."""
    added: float = 0.0
    """Number that llama.cpp has added to its values."""
    crc32: ClassVar[None] = None

    @property
    def file(self) -> Path:
        return self.stored.file

    @property
    def shape(self) -> tuple[int, ...]:
        if self.expert is None:
            return self.stored.shape
        return self.stored.shape[1:]

    @property
    def code(self) -> str:
        """The dtype that holds its values exactly, as safetensors calls it."""
        return "F32" if self.added else _WIDE.get(self.stored.type_name, "F32")

    def read_into(self, out: np.ndarray, index: tuple[slice, ...]) -> None:
        """Decode the slice `index` (start and stop, one per axis) into `out`, cast to its dtype, a
        few million elements at a time. Raises `CheckpointError` if the file cannot be read."""
        if len(self.shape) == 1:
            out[...] = self._rows(0, 1, index[0])[0]
        else:
            rows, columns = index
            skipped = (self.expert or 0) * self.shape[0]
            step = max(1, _CHUNK_ELEMENTS // self.shape[1])
            for first in range(rows.start, rows.stop, step):
                stop = min(first + step, rows.stop)
                values = self._rows(skipped + first, skipped + stop, columns)
                with np.errstate(over="ignore"):
                    out[first - rows.start : stop - rows.start] = values
        if self.interleaved is not None:
            split_pairs(out, self.interleaved)

    def _rows(self, first: int, stop: int, columns: slice) -> np.ndarray:
        values = self.stored.rows(first, stop)[:, columns]
        if self.added:
            values = values - np.float32(self.added)
        return values


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """Content of a GGUF file, or of several that hold one model in parts."""

    path: Path
    metadata: Mapping[str, Any]
    """Key -> number, string, boolean, list of strings, or array of numbers; of the first part."""
    tensors: Mapping[str, StoredBlocks]


def read_gguf(path: Path) -> GgufFile:
    """Read the metadata and the table of tensors, of every part if the file is one of several.

    Raises `CheckpointError` for files that are missing, damaged, not complete, or of a kind that is
    not supported, and if the package gguf is missing.
    """
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise CheckpointError(
            f"{path}: reading GGUF needs the package gguf: pip install 'swiftkv-jax[gguf]'"
        ) from None
    parts = shards(path)
    if missing := [part.name for part in parts if not part.is_file()]:
        raise CheckpointError(
            f"{path}: one of {len(parts)} parts; missing: {', '.join(missing[:3])}"
        )
    metadata: dict[str, Any] = {}
    tensors: dict[str, StoredBlocks] = {}
    for number, part in enumerate(parts):
        found, table = _Header(part).read()
        metadata = metadata or found
        stated = found.get("split.count", 1), found.get("split.no", 0)
        if stated != (len(parts), number):
            raise CheckpointError(
                f"{part}: says that it is part {stated[1] + 1} of {stated[0]}, its name that it is "
                f"{number + 1} of {len(parts)}; name the parts NAME-00001-of-0000N.gguf"
            )
        for tensor in table:
            if tensor.name in tensors:
                raise CheckpointError(f"{part}: repeated: {tensor.name}")
            tensors[tensor.name] = tensor
    return GgufFile(path, metadata, tensors)


def is_gguf(path: Path) -> bool:
    """True if a file is one, by its name or by how it begins."""
    if path.suffix == ".gguf":
        return True
    with path.open("rb") as opened:
        return opened.read(len(_MAGIC)) == _MAGIC


def shards(path: Path) -> list[Path]:
    """The files of the model that `path` is a part of, by its name: itself alone, or all parts."""
    if (found := _SHARD.fullmatch(path.name)) is None:
        return [path]
    name, _, count = found.groups()
    return [path.with_name(f"{name}-{i:05}-of-{count}.gguf") for i in range(1, int(count) + 1)]


def is_later_part(path: Path) -> bool:
    """Tell by its name whether a file is a part of a model, and not the first."""
    return (found := _SHARD.fullmatch(path.name)) is not None and int(found[2]) > 1


def is_model_name(name: str) -> bool:
    """True if a GGUF file of this name may hold a model, and not the projector of images or the
    importances of weights that lie beside models."""
    return "mmproj" not in name and "imatrix" not in name


class _Header:
    """Reader of the part of a file that stands before the values."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.at = 0

    def read(self) -> tuple[dict[str, Any], list[StoredBlocks]]:
        """The metadata, and the tensors in the order of the file."""
        try:
            with self.file.open("rb") as opened:
                begin = opened.read(64)
                check_no_pointer(self.file, begin)
                if not begin.startswith(_MAGIC):
                    self._fail(f"begins with {begin[:4]!r}, not {_MAGIC!r}")
                with mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as self.bytes:
                    return self._read()
        except CheckpointError:  # one of these is a ValueError
            raise
        except OSError as error:
            raise CheckpointError(f"{self.file}: cannot be read ({error.strerror})") from None
        except (struct.error, ValueError, OverflowError, MemoryError) as error:
            self._fail(str(error))

    def _read(self) -> tuple[dict[str, Any], list[StoredBlocks]]:
        self.at = len(_MAGIC)
        version = self._unpack("<I")
        if version & 0xFFFF == 0:
            raise CheckpointError(
                f"{self.file}: big-endian GGUF is not supported; gguf-convert-endian of the "
                f"package gguf makes it little-endian"
            )
        if version not in _VERSIONS:
            raise CheckpointError(
                f"{self.file}: version {version} of GGUF is not supported; supported: 2 and 3"
            )
        num_tensors = self._unpack("<Q")
        num_keys = self._unpack("<Q")
        metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string("the name of a key")
            if key in metadata:
                raise CheckpointError(f"{self.file}: repeated: {key}")
            metadata[key] = self._value(key, self._unpack("<I"))
        infos = [self._info() for _ in range(num_tensors)]
        alignment = metadata.get(_ALIGNMENT, 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            raise CheckpointError(f"{self.file}: {_ALIGNMENT}={alignment!r} must be a power of two")
        begin = -(-self.at // alignment) * alignment
        return metadata, [self._tensor(begin, *info) for info in infos]

    def _info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string("the name of a tensor")
        axes = self._unpack("<I")
        if axes > 4:
            self._fail(f"{name} has {axes} axes")
        sizes = [self._unpack("<Q") for _ in range(axes)]
        return name, tuple(reversed(sizes)), self._unpack("<I"), self._unpack("<Q")

    def _tensor(
        self, begin: int, name: str, shape: tuple[int, ...], number: int, offset: int
    ) -> StoredBlocks:
        type_name, block, num_bytes = self._type(name, number)
        if not shape or math.prod(shape) == 0 or shape[-1] % block:
            self._fail(f"{name}: shape {list(shape)} in {type_name}, whose blocks are of {block}")
        row_bytes = shape[-1] // block * num_bytes
        tensor = StoredBlocks(name, self.file, shape, type_name, row_bytes, begin + offset)
        if tensor.start + math.prod(shape[:-1]) * row_bytes > len(self.bytes):
            self._fail(f"it ends within {name}")
        return tensor

    def _type(self, name: str, number: int) -> tuple[str, int, int]:
        """Name of a type, elements of a block, and its bytes."""
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
        from gguf.quants import dequantize

        if number not in GGML_QUANT_SIZES:
            raise CheckpointError(
                f"{self.file}: {name} has type {number}, which the installed version of the "
                f"package gguf does not know; install a newer one"
            )
        type_ = GGMLQuantizationType(number)
        block, num_bytes = GGML_QUANT_SIZES[type_]
        try:
            dequantize(np.zeros((1, num_bytes), np.uint8), type_)
        except NotImplementedError:
            raise CheckpointError(
                f"{self.file}: {name} is stored as {type_.name}, which the package gguf does not "
                f"decode; get the model in another quantisation"
            ) from None
        return type_.name, block, num_bytes

    def _value(self, key: str, kind: int) -> Any:
        if kind == _STRING:
            return self._string(key)
        if kind in _NUMBERS:
            return self._numbers(_NUMBERS[kind], 1)[0].item()
        if kind != _ARRAY:
            self._fail(f"metadata of type {kind}")
        kind = self._unpack("<I")
        count = self._unpack("<Q")
        if kind == _STRING:
            return [self._string(key) for _ in range(count)]
        if kind not in _NUMBERS:
            self._fail(f"an array of type {kind}")
        return self._numbers(_NUMBERS[kind], count)

    def _numbers(self, dtype: str, count: int) -> np.ndarray:
        return np.frombuffer(self._take(count * np.dtype(dtype).itemsize), dtype)

    def _string(self, what: str) -> str:
        """A text, which is the value of the key `what`. In one that only describes the model, bytes
        that are no text are replaced."""
        content = self._take(self._unpack("<Q"))
        descriptive = what.startswith("general.") and what not in _KINDS
        try:
            return content.decode(errors="replace" if descriptive else "strict")
        except UnicodeDecodeError:
            raise CheckpointError(
                f"{self.file}: {what} is not UTF-8: {content[:40]!r}; convert the model again, or "
                f"get another file of it"
            ) from None

    def _unpack(self, format: str) -> int:
        (value,) = struct.unpack_from(format, self.bytes, self.at)
        self.at += struct.calcsize(format)
        return value

    def _take(self, count: int) -> bytes:
        if count > len(self.bytes) - self.at:
            self._fail(f"it ends within its header, at byte {self.at}")
        self.at += count
        return self.bytes[self.at - count : self.at]

    def _fail(self, reason: str) -> NoReturn:
        raise CheckpointError(
            f"{self.file}: not a complete GGUF file ({reason}); copy or download it again"
        ) from None


def one_of(files: Sequence[Path], folder: Path) -> Path:
    """The model of a folder without other weights. Raises `CheckpointError` if it has several."""
    first = sorted(files)[0]
    if others := set(files) - set(shards(first)):
        names = ", ".join(sorted(file.name for file in others | {first})[:4])
        raise CheckpointError(f"{folder}: {len(files)} GGUF files; name one of them: {names}")
    return first
