"""Read speculators as IBM and Snowflake publish them, and write those that are trained here.

Three layouts of `config.json` and tensors have `model_type` mlp_speculator: IBM's
MLPSpeculatorPreTrainedModel, and with `input_hidden_dim` the `sum_rnn` and `sum_lstm` of
Snowflake's ArcticTraining. Where steps share weights, files have each once, or equal copies.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from ..errors import CheckpointError, ConfigError
from ..model.speculator import Norm, Speculator, speculator_shapes
from ..model.speculator_config import GATES, SpeculatorConfig, refused_drafter
from ..process.distributed import is_main_process
from ..process.files import new_directory, write_json
from ..process.json_files import read_json
from .families.fields import agreed, check_integer, check_kind, shown, unknown_field
from .safetensors_io import WIDE, Stored, read_header, read_into, same_values, write_file
from .tensor_map import Expected, check_no_problems, differences

WEIGHTS = "model.safetensors"
_SIZES = ("n_predict", "vocab_size", "emb_dim", "inner_dim", "proj_dim", "input_hidden_dim")
_FLAGS = ("tie_weights", "scale_input", "tie_lstm_embs")
_UNREAD = (
    "_name_or_path architectures auto_map base_model_arch base_model_archs base_model_name_or_path "
    "dtype model_type n_candidates num_lookahead_tokens top_k_tokens_per_head "
    "top_k_tokesns_per_head torch_dtype transformers_version"
).split()
_GATES = ("forget", "input", "output", "cell")
_SECOND = {f"{gate}_proj.1.weight" for gate in _GATES}
"""Matrices that ArcticTraining's LSTM has even if it drafts one token, without using them."""
_PLACE = re.compile(r"(\w+)\.(\d+)\.(.+)")


def read_speculator(path: Path, dtype: Any) -> Speculator:
    """The speculator in a folder, in NumPy. Raises `CheckpointError` and `ConfigError` for a tensor
    that is missing, unknown, of another shape or damaged, and for copies that differ."""
    shapes, names, found = _open(path, dtype)
    copies = [(first, copy) for first, *others in found.values() for copy in others]
    differ = [copy.name for first, copy in copies if not same_values(first, copy)]
    check_no_problems(path, {"copies of tied weights that differ": differ})

    def read(leaf: jax.ShapeDtypeStruct, joined: tuple[str, ...]) -> np.ndarray:
        out = np.empty(leaf.shape, leaf.dtype)
        for name, rows in zip(joined, np.split(out, len(joined)), strict=True):
            read_into(rows, found[name][0], tuple(slice(0, size) for size in rows.shape))
        return out

    return jax.tree.map(read, shapes, names)


def check_tensors(path: Path) -> None:
    """Raise as `read_speculator`, but for what only the values of tensors tell."""
    _open(path, np.float32)


def _open(path: Path, dtype: Any) -> tuple[Speculator, Any, Mapping[str, list[Stored]]]:
    """(`speculator_shapes`, the names of the tensors of each, the copies of each name)."""
    config, layout = _read_config(path)
    shapes = speculator_shapes(config, dtype)
    names = layout.names(shapes)
    found: dict[str, list[Stored]] = collections.defaultdict(list)
    for file in _weight_files(path):
        for tensor in read_header(file)[0]:
            name = layout.first_copy(tensor.name.removeprefix("speculator."), config)
            if config.n_predict > 1 or name not in _SECOND:
                found[name].append(tensor)
    leaves, tree = jax.tree.flatten(shapes)
    expected: dict[str, Expected] = {}
    for leaf, joined in zip(leaves, tree.flatten_up_to(names), strict=True):
        rows = leaf.shape[0] // len(joined)
        expected |= {name: ((rows, *leaf.shape[1:]), WIDE) for name in joined}
    stored = {name: (first.shape, first.code) for name, (first, *_) in found.items()}
    check_no_problems(path, differences(expected, stored))
    return shapes, names, found


def write_speculator(speculator: Speculator, path: Path) -> None:
    """Write a speculator of an LSTM, arrays on the host, as ArcticTraining does, but with tied
    weights once. Nothing appears at `path` until all is written. Raises `UsageError` if it is not
    empty."""
    config = speculator.config
    assert config.method == "sum_lstm" and config.tie_weights
    dim = str(config.inner_dim)
    fields = {
        "architectures": ["ArcticLSTMSpeculatorPreTrainedModel"],
        "model_type": "mlp_speculator",
        "method": config.method,
        "n_predict": config.n_predict,
        "num_lookahead_tokens": config.n_predict,
        "n_candidates": config.n_predict,
        "top_k_tokens_per_head": [1] * config.n_predict,  # vLLM refuses another length
        "vocab_size": config.vocab_size,
        "input_hidden_dim": config.hidden_dim,
        **{name: dim for name in ("inner_dim", "proj_dim", "emb_dim")},
        "tie_weights": True,
        "tie_lstm_embs": True,
        "scale_input": config.scale_input,
        "torch_dtype": speculator.head[0].dtype.name,
    }
    names = _LSTM.names(speculator)
    leaves, tree = jax.tree.flatten(speculator)
    tensors: dict[str, np.ndarray] = {}
    for leaf, joined in zip(leaves, tree.flatten_up_to(names), strict=True):
        tensors |= zip(joined, np.split(np.asarray(leaf), len(joined)), strict=True)
    with new_directory(path) as folder:
        if is_main_process():
            write_json(folder / "config.json", fields)
            described = [(name, leaf.shape, leaf.dtype) for name, leaf in tensors.items()]
            write_file(folder / WEIGHTS, described, tensors.values(), {})


@dataclasses.dataclass(frozen=True)
class _Layout:
    """Names of tensors."""

    embed: str
    proj: tuple[str, ...]
    """Matrices whose rows are joined."""
    norm: str
    cell_norm: str
    inner: str = ""
    """Name of the one module in each sequence of modules."""

    def names(self, speculator: Speculator) -> Any:
        """The names of the tensors that each leaf of a speculator joins, in the leaf's place."""

        def of(leaves: tuple[Any, ...], *modules: str) -> tuple[Any, ...]:
            inner = "" if modules == ("head",) else self.inner
            named = [[f"{one}.{step}{inner}" for one in modules] for step in range(len(leaves))]
            if leaves and isinstance(leaves[0], Norm):
                return tuple(Norm((f"{one}.weight",), (f"{one}.bias",)) for (one,) in named)
            return tuple(tuple(f"{one}.weight" for one in step) for step in named)

        return dataclasses.replace(
            speculator,
            embed=of(speculator.embed, self.embed),
            proj=of(speculator.proj, *self.proj),
            head=of(speculator.head, "head"),
            norm=of(speculator.norm, self.norm),
            cell_norm=of(speculator.cell_norm, self.cell_norm),
        )

    def first_copy(self, name: str, config: SpeculatorConfig) -> str:
        """The name of the tensor that one of this name must be equal to: itself, or where weights
        are tied the first of its copies."""
        found = _PLACE.fullmatch(name)
        if found is None or not config.tie_weights:
            return name
        module, step, rest = found.groups()
        if module in [f"{gate}_emb" for gate in _GATES]:
            module = self.embed
        last = 1 if module in self.proj else 0
        return f"{module}.{min(int(step), last)}.{rest}"


_MLP = _Layout("emb", ("proj",), "ln", "")
_RNN = dataclasses.replace(_MLP, inner=".0")
_LSTM = _Layout("forget_emb", tuple(f"{gate}_proj" for gate in _GATES), "state_ln", "cell_ln")


def read_speculator_config(path: Path) -> SpeculatorConfig:
    """The architecture of the speculator in a folder, whose weights are not read. Raises
    `CheckpointError` and `ConfigError`."""
    return _read_config(path)[0]


def _read_config(path: Path) -> tuple[SpeculatorConfig, _Layout]:
    file = path / "config.json"
    fields = read_json(file)
    try:
        return _parse_config(fields)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None


def _parse_config(fields: Mapping[str, Any]) -> tuple[SpeculatorConfig, _Layout]:
    check_kind("architectures", fields.get("architectures"), "list")
    check_kind("method", fields.get("method"), "text")
    kinds = (fields.get("speculators_model_type"), fields.get("model_type"))
    kinds += tuple(fields.get("architectures") or ())
    for kind in filter(None, kinds):
        if (reason := refused_drafter(str(kind))) is not None:
            raise ConfigError(f"{shown(kind)} {reason}")
    if (kind := fields.get("model_type")) != "mlp_speculator":
        raise ConfigError(f"model_type={shown(kind)} is no speculator: mlp_speculator is")
    for name, value in fields.items():
        if name not in (*_SIZES, *_FLAGS, *_UNREAD, "method"):
            raise unknown_field(name, value)
    for name in _FLAGS:
        check_kind(name, fields.get(name), "flag")
    sizes = {name: _size(fields, name) for name in _SIZES}
    layout, of_hidden, needed = _RNN, "input_hidden_dim", ["inner_dim"]
    if sizes["input_hidden_dim"] is None:  # IBM's
        layout, of_hidden, needed = _MLP, "emb_dim", []
    method = fields.get("method") or "sum_rnn"
    if method not in GATES:
        raise ConfigError(f"method={shown(method)} is not supported: {', '.join(GATES)} are")
    needed = ["n_predict", "vocab_size", "emb_dim", *needed]
    if missing := [name for name in needed if not sizes[name]]:
        raise ConfigError(f"{missing[0]} is missing")
    hidden = sizes[of_hidden]
    inner = sizes["inner_dim"] or hidden
    if layout is _RNN:
        agreed({name: sizes[name] for name in ("inner_dim", "emb_dim", "proj_dim")})
    config = SpeculatorConfig(
        method,
        check_integer("n_predict", sizes["n_predict"]),
        check_integer("vocab_size", sizes["vocab_size"]),
        hidden_dim=check_integer(of_hidden, hidden),
        inner_dim=check_integer("inner_dim", inner),
        tie_weights=bool(fields.get("tie_weights")),
        scale_input=bool(fields.get("scale_input")),
    )
    if method == "sum_lstm":
        for name in ("tie_weights", "tie_lstm_embs"):
            if not fields.get(name):
                raise ConfigError(f"{name}={shown(fields.get(name))}: sum_lstm needs it")
        return config, _LSTM
    return config, layout


def _size(fields: Mapping[str, Any], name: str) -> int | None:
    """A whole number, which Snowflake's files have as a string; None without it."""
    value = fields.get(name)
    if isinstance(value, str):
        if not value.isdecimal():
            raise ConfigError(f"{name}={shown(value)} is not supported: one size is")
        value = int(value)
    check_kind(name, value, "integer")
    return value


def _weight_files(path: Path) -> list[Path]:
    if files := sorted(path.glob("*.safetensors")):
        return files
    if not (pickles := sorted(path.glob("*.bin"))):
        raise CheckpointError(f"{path}: no {WEIGHTS}")
    convert = (
        "import sys, torch, safetensors.torch as s; "
        "t = torch.load(sys.argv[1], weights_only=True); "
        "s.save_file({k: v.clone() for k, v in t.items()}, sys.argv[2])"
    )
    raise CheckpointError(
        f"{pickles[0]}: pickle files can run code; where torch is installed, this converts it: "
        f"python -c '{convert}' {pickles[0]} {pickles[0].with_suffix('.safetensors')}"
    )
