"""Read LoRA adapters as PEFT saves them: `adapter_config.json` and `adapter_model.safetensors`.

An adapter adds scaling * B A to the matrix of a module, with A [R, inputs], B [outputs, R] and
scaling alpha / R, or alpha / R^1/2 with `use_rslora`. Every field of the config that would make it
anything else is an error that names the field.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from ..errors import CheckpointError, ConfigError
from ..process.json_files import read_json
from . import foreign
from .families.fields import check_integer, check_kind, check_number, shown
from .safetensors_io import WIDE, Stored, read_block, read_header
from .tensor_map import check_no_problems, is_vision

WEIGHTS = "adapter_model.safetensors"
_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_LAYER = re.compile(r"\.layers\.(\d+)\.")
_IN_WRAPPED = re.compile(r"(model\.language_model|language_model\.model)\.")
_READ = "r lora_alpha use_rslora rank_pattern alpha_pattern layers_to_transform".split()
_UNREAD = (
    "peft_type task_type auto_mapping peft_version base_model_name_or_path revision inference_mode "
    "lora_dropout target_modules exclude_modules layers_pattern ensure_weight_tying "
    "qalora_group_size loftq_config eva_config corda_config lora_ga_config megatron_config "
    "megatron_core runtime_config"
).split()
"""Fields of how an adapter was made, and those that its tensors state again."""
_NEUTRAL = {"bias": ("none",), "init_lora_weights": (True, "gaussian", "eva", "orthogonal")}
"""Values that change nothing, besides empty ones: other ways of initialising take something from
the base's own weights."""
_MERGE = "merge the adapter into its base by merge_and_unload of peft"
_REASONS = {
    "alora_invocation_tokens": "an adapter for the tokens after these alone cannot be merged",
    "layer_replication": "its base has other layers than the model",
}


@dataclasses.dataclass(frozen=True)
class LowRank:
    """A term that an adapter adds to a matrix, unread. Readers see it as a float32 tensor."""

    name: str
    a: Stored  # R inputs
    b: Stored  # outputs R
    scaling: float
    code: ClassVar[str] = "F32"
    crc32: ClassVar[None] = None

    @property
    def file(self) -> Path:
        return self.a.file

    @property
    def shape(self) -> tuple[int, ...]:
        return self.b.shape[0], self.a.shape[1]

    def read_into(self, out: np.ndarray, index: tuple[slice, ...]) -> None:
        """Compute the slice `index` (start and stop, of outputs and inputs) into `out`."""
        rows, columns = index
        whole = slice(0, self.a.shape[0])
        a = read_block(self.a, (whole, columns)).astype(np.float32)
        b = read_block(self.b, (rows, whole)).astype(np.float32)
        out[...] = self.scaling * (b @ a)

    def factors(self) -> tuple[np.ndarray, np.ndarray]:
        """(A, scaling * B) in float32."""
        a, b = (read_block(half, (slice(None), slice(None))) for half in (self.a, self.b))
        return a.astype(np.float32), self.scaling * b.astype(np.float32)


def read_adapter(path: Path) -> dict[str, LowRank]:
    """Module -> what the adapter adds to its matrix. Modules have the names that the text model by
    itself gives them; those of a vision side are left out.

    Raises `CheckpointError` and `ConfigError` for all that a sum of matrices does not express, and
    for damage.
    """
    file = path / foreign.ADAPTER
    fields = read_json(file)
    try:
        _check_fields(fields)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from None
    file = path / WEIGHTS
    if not file.is_file() and (reason := foreign.pickles(each.name for each in path.iterdir())):
        raise CheckpointError(f"{path}: {reason}")
    tensors, _ = read_header(file)
    problems: dict[str, list[str]] = collections.defaultdict(list)
    modules: dict[str, dict[str, Stored]] = collections.defaultdict(dict)
    for tensor in tensors:
        found = _NAME.fullmatch(tensor.name)
        if found is None or len(tensor.shape) != 2 or tensor.code not in WIDE:
            problems["not supported"].append(f"{tensor.name} {tensor.code}{list(tensor.shape)}")
        elif not is_vision(found[1]):
            modules[found[1]][found[2]] = tensor
    matrices = {}
    for module, parts in modules.items():
        if problem := _problem(fields, module, parts):
            problems[problem].append(module)
            continue
        name = _IN_WRAPPED.sub("model.", module, count=1)
        scaling = _scaling(fields, module)
        matrices[name] = LowRank(f"{module}.weight", parts["A"], parts["B"], scaling)
    check_no_problems(file, problems)
    if not matrices:
        raise CheckpointError(f"{file}: has no matrices for a text model")
    return matrices


def _problem(fields: Mapping[str, Any], module: str, parts: Mapping[str, Stored]) -> str | None:
    """The problem with the two tensors of a module; None if there is none."""
    if parts.keys() != {"A", "B"}:
        return f"without lora_{'B' if 'A' in parts else 'A'}"
    layers = fields.get("layers_to_transform")
    layer = _LAYER.search(module)
    if layers not in (None, []) and layer is not None:
        if int(layer[1]) not in (layers if isinstance(layers, list) else [layers]):
            return f"outside of layers_to_transform={shown(layers)}"
    rank = _rank(fields, module)
    if parts["A"].shape[:1] != (rank,) or parts["B"].shape[1:] != (rank,):
        return f"not of rank {rank}, which {foreign.ADAPTER} states"
    for tensor in parts.values():
        whole = tuple(slice(0, size) for size in tensor.shape)
        if not np.isfinite(read_block(tensor, whole).astype(np.float32)).all():
            return "not finite"
    return None


def _rank(fields: Mapping[str, Any], module: str) -> int:
    return _of_pattern(fields.get("rank_pattern"), module, fields["r"])


def _scaling(fields: Mapping[str, Any], module: str) -> float:
    alpha = _of_pattern(fields.get("alpha_pattern"), module, fields["lora_alpha"])
    rank = _rank(fields, module)
    return alpha / (math.sqrt(rank) if fields.get("use_rslora") else rank)


def _of_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """The value of the first expression that matches the module's name, or what follows a dot of
    it, to its end: as PEFT does."""
    for expression, value in (patterns or {}).items():
        if re.match(rf"(.*\.)?({expression})$", module):
            return value
    return default


def _check_fields(fields: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a field that is not supported."""
    if (kind := fields.get("peft_type")) != "LORA":
        raise ConfigError(f"peft_type={shown(kind)} is not supported: LORA is; {_MERGE}")
    for name, value in fields.items():
        if value and name not in (*_READ, *_UNREAD) and value not in _NEUTRAL.get(name, ()):
            reason = _REASONS.get(name, _MERGE)
            raise ConfigError(f"{name}={shown(value)} is not supported: {reason}")
    check_integer("r", fields.get("r"))
    check_number("lora_alpha", fields.get("lora_alpha"))
    check_kind("use_rslora", fields.get("use_rslora"), "flag")
    for name, check in (("rank_pattern", check_integer), ("alpha_pattern", check_number)):
        check_kind(name, fields.get(name), "object")
        for expression, value in (fields.get(name) or {}).items():
            check(f"{name}[{shown(expression)}]", value)
            try:
                re.compile(expression)
            except re.error as error:
                raise ConfigError(f"{name}: {shown(expression)} is no pattern: {error}") from None
