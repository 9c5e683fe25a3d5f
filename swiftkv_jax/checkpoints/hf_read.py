"""Read Hugging Face checkpoints: a Llama, or SwiftKV as its authors publish it. `hf_write` is the
other direction.

Quantised matrices stay in 8 bits where their format is `quantization.Quantized`'s; the others are
decoded (`quantized.matrices`), so that to everything else they are float32 tensors.

Names are strict (`tensor_map`): a tensor that is missing, unexpected, repeated, misshapen or of a
wrong dtype is an error, and one error names all kinds of them.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from .. import demo
from ..errors import CheckpointError
from ..model.config import Config
from ..model.cut import has_same_delta
from ..model.model import LOSS_FIELDS, AuxiliaryFiles, Model
from ..model.quantization import SCALE, VALUES, Format, Scheme, refuse_quantized
from ..model.stacks import split_layers
from ..process.json_files import read_json
from . import foreign, loss_notes, source
from .auxiliary import read_auxiliary_files
from .hf_config import is_wrapped, ties_without_head
from .hf_write import BASE_DIGEST, DELTA, FORMAT, INDEX, SINGLE_FILE, base_model_digest
from .quantized.config import MODELOPT, read_quantization_config
from .quantized.matrices import Tensor, join_tensors, keep_matrices
from .safetensors_io import DTYPES, WIDE, Stored, read_header, same_values
from .source import Source
from .tensor_map import (
    BY_ITSELF,
    Expected,
    MappedLeaf,
    TensorNames,
    check_no_problems,
    differences,
    first_of,
    is_vision,
    leaves,
    tensor_names,
)
from .tensor_reader import TensorReader

# Buffers that old exporters wrote and that nothing reads: the frequencies follow from the config.
_INERT = re.compile(r"(^|\.)rotary_emb\.inv_freq$")
# Scales of a quantised KV cache, as vLLM and compressed-tensors name them.
_CACHE_SCALE = re.compile(r"\.([kv]_scale|kv_scale|[kv]_proj\.output_scale)$")
_CODES: dict[Format, str] = {"fp8": "F8_E4M3", "int8": "I8"}
_HEAD = "lm_head.weight"
_EMBED = "model.embed_tokens.weight"


def load_delta(path: Path, base: Model) -> Model:
    """Put a delta that `save_hf(format="delta")` wrote on the plain Llama it was trained for, in
    the base's dtype.

    Raises `CheckpointError` if it was trained for other weights, `UsageError` if `base` is
    quantised.
    """
    refuse_quantized(base.llama, "a delta")
    config = delta_config(path)
    source.check_overrides(
        path,
        config,
        base.config.cut(
            config.num_key_value_layers,
            config.key_value_group_size,
            prompt_attention_layers=config.prompt_attention_layers,
            prompt_mlp_neurons=config.prompt_mlp_neurons,
            boundary_taps=config.boundary_taps,
        ),
    )
    llama = split_layers(config, base.llama)
    cut = dataclasses.replace(base, config=config, llama=llama, swiftkv=None)
    opened = open_delta(path, source.from_model(cut))
    return source.load(opened, dtype=base.dtype, tokenizer=base.tokenizer)


def delta_config(path: Path) -> Config:
    """The config to open the base of `open_delta` with."""
    return read_auxiliary_files(path)[0]


def open_delta(path: Path, base: Source) -> Source:
    """A delta that `save_hf(format="delta")` wrote, on its base, which has the same cut. Reads the
    base, to compare its digest.

    Raises `CheckpointError` if the delta was trained for other weights.
    """
    stored, metadata = _read_weights(path)
    if metadata.get(FORMAT) != DELTA:
        raise CheckpointError(f"{path}: holds a whole model, not a delta; load it by itself")
    found = metadata.get(BASE_DIGEST)
    actual = base_model_digest(base)
    if found != actual:
        raise CheckpointError(
            f"{path}: was trained for another base model (digest {found}, this one has {actual})"
        )
    table = tuple(leaf for leaf in leaves(base.config) if leaf.is_delta)
    tensors = _match(path, table, stored)
    dtypes = {leaf.name: _stored_dtype(leaf, tensors, None) for leaf in table}
    student = source.with_delta(base, path, dtypes, TensorReader(tensors))
    stored_config = read_json(path / "config.json")
    notes = {field: stored_config.get(field) for field in LOSS_FIELDS}
    files = loss_notes.with_notes(student.auxiliary_files, notes)
    return dataclasses.replace(student, auxiliary_files=files)


def open_hf(path: Path, config: Config | None = None) -> Source:
    """Check a Hugging Face directory's config, names, shapes and dtypes; read no weights yet.
    `config` as in `checkpoints.load`."""
    file_config, auxiliary_files, eos_token_ids = read_auxiliary_files(path)
    fields = auxiliary_files.hf_config.get("quantization_config")
    if fields is None and (path / MODELOPT).is_file():
        raise CheckpointError(
            f"{path / MODELOPT}: weights that ModelOpt has quantised are not supported; get the "
            f"model that they were made from, or one in another format"
        )
    stored, metadata = _read_weights(path)
    names = BY_ITSELF
    whole = read_json(path / "config.json")
    if is_wrapped(whole):
        stored = [tensor for tensor in stored if not is_vision(tensor.name)]
        names = tensor_names([tensor.name for tensor in stored])
        has_head = any(tensor.name == names.in_file(_HEAD) for tensor in stored)
        if ties_without_head(whole) and not has_head:
            file_config = dataclasses.replace(file_config, tie_word_embeddings=True)
    if metadata.get(FORMAT) == DELTA:
        raise CheckpointError(
            f"{path}: holds only the trained tensors, not its base model; join them by convert "
            f"hf2orbax with its `base`"
        )
    quantized = None if fields is None else read_quantization_config(fields)
    format = quantized and quantized.kept
    found: Sequence[Tensor] = stored
    if quantized is not None and format is None:
        found = join_tensors(path, stored, leaves(file_config), quantized, names)
    elif quantized is not None:
        found = keep_matrices(stored, quantized.groups[0][1])

    return source_of(
        path, file_config, auxiliary_files, eos_token_ids, found, format, names, config=config
    )


def source_of(
    path: Path,
    file_config: Config,
    auxiliary_files: AuxiliaryFiles,
    eos_token_ids: tuple[int, ...],
    found: Sequence[Tensor],
    format: Format | None = None,
    names: TensorNames = BY_ITSELF,
    *,
    config: Config | None,
) -> Source:
    """The model whose files hold the tensors `found`, after checking that these are exactly those
    of `file_config`. `config` as in `checkpoints.load`."""
    present = _present(file_config, found, format)
    tensors = _match(path, present, found, format, names)
    _check_tied_head(path, file_config, tensors)
    opened = Source(
        config=file_config,
        leaves=present,
        dtypes={leaf.name: _stored_dtype(leaf, tensors, format) for leaf in present},
        reader=TensorReader(tensors),
        auxiliary_files=auxiliary_files,
        eos_token_ids=eos_token_ids,
        path=path,
        digests=all(tensor.crc32 is not None for tensor in tensors.values()),
        quantization=format,
    )
    if config is None or has_same_delta(config, file_config):
        return dataclasses.replace(opened, config=config or file_config)
    source.check_overrides(path, file_config, config)
    opened.require_teacher("split its layers elsewhere")
    # Tensors are one layer each, so another split needs no other reader.
    present = leaves(config, delta=False, quantization=format)
    dtypes = {leaf.name: _stored_dtype(leaf, tensors, format) for leaf in present}
    return dataclasses.replace(opened, config=config, leaves=present, dtypes=dtypes)


def _present(
    config: Config, stored: Sequence[Tensor], format: Format | None
) -> tuple[MappedLeaf, ...]:
    """The leaves to expect: all of them, or without the teacher's upper q, k, v where the files
    hold none of those."""
    expected = leaves(config, quantization=format)
    found = {tensor.name for tensor in stored}
    teacher = {name for leaf in expected if leaf.is_teacher_qkv for name in leaf.tensors}
    dropped = bool(teacher) and found.isdisjoint(teacher)
    return tuple(leaf for leaf in expected if not (dropped and leaf.is_teacher_qkv))


# Files ------------------------------------------------------------------------


def _read_weights(path: Path) -> tuple[list[Stored], dict[str, str]]:
    """Every tensor of every weight file, unread and unchecked, and the files' metadata together."""
    stored: list[Stored] = []
    metadata: dict[str, str] = {}
    for file in _weight_files(path):
        tensors, fields = read_header(file)
        for tensor in tensors:
            if _CACHE_SCALE.search(tensor.name):
                raise CheckpointError(
                    f"{file}: {tensor.name}: scales of a quantised KV cache are not supported"
                )
        stored += tensors
        metadata |= fields
    return stored, metadata


def _weight_files(path: Path) -> list[Path]:
    if (path / INDEX).is_file():
        weight_map = read_json(path / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise CheckpointError(f"{path / INDEX}: no weight_map")
        names = sorted({str(name) for name in weight_map.values()})
        unsafe = [
            repr(name)
            for name in names
            if name != Path(name).name or "\\" in name or name in ("", ".", "..")
        ]
        if unsafe and not demo.shares_a_file(path):
            reason = f"weight files must lie in the same directory: {first_of(unsafe)}"
            if (path / INDEX).read_bytes() == (demo.SWIFTKV / INDEX).read_bytes():
                whole = f"swiftkv convert orbax2hf {demo.SWIFTKV} FOLDER"
                reason += f"; the demo shares its teacher's file: `{whole}` writes a copy with it"
            raise CheckpointError(f"{path / INDEX}: {reason}")
        if absent := [name for name in names if not os.path.isfile(path / name)]:
            raise CheckpointError(
                f"{path}: missing weight files that {INDEX} lists: {first_of(absent)}"
            )
        return [path / name for name in names]
    if (path / SINGLE_FILE).is_file():
        return [path / SINGLE_FILE]
    reason = foreign.without_weights(path) or f"no weights: looked for {INDEX} and {SINGLE_FILE}"
    raise CheckpointError(f"{path}: {reason}")


# Names ------------------------------------------------------------------------


def _match(
    path: Path,
    expected: tuple[MappedLeaf, ...],
    stored: Sequence[Tensor],
    format: Format | None = None,
    names: TensorNames = BY_ITSELF,
) -> dict[str, Tensor]:
    """Name -> tensor, after checking that the files hold exactly what is expected, quantised
    matrices in `format`. One error names every kind of difference, by the files' `names`."""
    ours = {names.in_file(name): (name, leaf) for leaf in expected for name in leaf.tensors}
    wanted: dict[str, Expected] = {
        name: (leaf.stored_shape, (_CODES[format],) if format and leaf.part == VALUES else WIDE)
        for name, (_, leaf) in ours.items()
    }
    found: dict[str, Tensor] = {}
    repeated: dict[str, list[Tensor]] = {}
    for tensor in stored:
        if tensor.name in found:
            repeated.setdefault(tensor.name, [found[tensor.name]]).append(tensor)
        elif tensor.name in wanted or not _INERT.search(tensor.name):
            found[tensor.name] = tensor
    head, embed = map(names.in_file, (_HEAD, _EMBED))
    if head not in wanted and embed in wanted and head in found:  # `_check_tied_head` compares them
        wanted[head] = (found[head].shape, WIDE)
    shapes = {name: (tensor.shape, tensor.code) for name, tensor in found.items()}
    problems = differences(wanted, shapes) | {
        "repeated": [
            f"{name} (in {', '.join(t.file.name for t in ts)})" for name, ts in repeated.items()
        ]
    }
    if sum(problems.values(), []) == [head]:
        raise CheckpointError(
            f"{path}: missing: {head}; if the head is the embedding, set tie_word_embeddings to "
            f"true in config.json"
        )
    check_no_problems(path, problems)
    return {ours[name][0] if name in ours else _HEAD: found[name] for name in found}


def _check_tied_head(path: Path, config: Config, tensors: Mapping[str, Tensor]) -> None:
    head = tensors.get(_HEAD)
    embed = tensors.get(_EMBED)
    if (
        config.tie_word_embeddings
        and isinstance(head, Stored)
        and isinstance(embed, Stored)
        and not same_values(head, embed)
    ):
        raise CheckpointError(
            f"{path}: {head.name} differs from {embed.name}, but config.json says "
            f"tie_word_embeddings; set it to false if the head is to be used"
        )


def _stored_dtype(
    leaf: MappedLeaf, tensors: Mapping[str, Tensor], quantization: Format | None
) -> np.dtype:
    """The narrowest dtype that holds each of a leaf's tensors exactly. An empty stack has the
    embedding's.

    Scales may be stored in fewer bits, but products need them in float32.
    """
    if quantization is not None and leaf.part is not None:
        return np.dtype(np.float32) if leaf.part == SCALE else Scheme(quantization).dtype
    codes = {tensors[name].code for name in leaf.tensors or (_EMBED,)}
    return np.dtype(jnp.result_type(*(DTYPES[code] for code in codes)))
