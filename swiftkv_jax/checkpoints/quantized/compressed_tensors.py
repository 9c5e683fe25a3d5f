"""The quantisation of Hugging Face checkpoints by compressed-tensors, of which what llm-compressor
calls `FP8_DYNAMIC` is also written.

Each Linear but the head then has `X.weight`, float8_e4m3fn [out, in], and `X.weight_scale`
[out, 1]; their product is the weight. Activations are quantised per token while the model runs, so
nothing is stored of them. The fields are those of
https://github.com/vllm-project/compressed-tensors (`quantization/quant_args.py`,
`quantization/quant_config.py`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from ...errors import ConfigError
from ...model.quantization import Format
from ..families.fields import shown
from .formats import (
    Fields,
    Layout,
    QuantizationConfig,
    WeightFormat,
    check_fields,
    read_group_size,
    read_names,
)

ROUTERS = r"re:.*\.mlp\.gate$"
"""Excludes the routers of experts, which are never quantised."""
# Names and patterns of modules that only images go through, and of nothing besides.
_VISION = re.compile(r"\^?(\.\*)?(model\\?\.)?(vision_tower|multi_modal_projector)[\w.*\\$]*")
HEADS = {"lm_head", "language_model.lm_head", "re:.*lm_head", "re:.*lm_head.*"}

# Bookkeeping: how the scales were found, by whom, and how much smaller the file became.
_IRRELEVANT = frozenset({"observer", "observer_kwargs", "version", "global_compression_ratio"})

_PACKED = "pack-quantized"
_MXFP4 = "mxfp4-pack-quantized"
_FLOAT = ("float", 8, True)
_INT = ("int", 8, True)
# Format -> the (type, bits, symmetric) that it may have.
_STORED = {
    "float-quantized": (_FLOAT,),
    "int-quantized": (_INT,),
    "naive-quantized": (_FLOAT, _INT),
    _PACKED: tuple(("int", bits, even) for bits in (4, 8) for even in (True, False)),
    _MXFP4: (("float", 4, True),),
}
# Field -> the values that are supported; None is for absent ones too.
_TOP = {
    "format": (*_STORED, "mixed-precision"),
    "quantization_status": ("compressed",),
    "kv_cache_scheme": (None,),
    "moe_sparsity_config": (None,),
    "transform_config": (None, {}),
}
_TOP_OTHERS = frozenset({"quant_method", "config_groups", "ignore", "sparsity_config", "provider"})
_GROUP = {
    "output_activations": (None,),
    "format": (*_STORED, None),
}
_GROUP_OTHERS = frozenset({"targets", "weights", "input_activations"})
_WEIGHTS = {
    "num_bits": (4, 8),
    "type": ("float", "int"),
    "strategy": ("channel", "tensor", "group", "block"),
    "symmetric": (True, False),
    "dynamic": (False, None),
    # "weight" and "static" are orders of rounding: groups are of neighbours all the same.
    "actorder": (None, False, "weight", "static"),
    "scale_dtype": (None, "torch.float32", "torch.bfloat16", "torch.float16"),
    "zp_dtype": (None, "torch.int8"),
}
_WEIGHTS_OTHERS = frozenset({"group_size", "block_structure"})
_ACTIVATIONS = {
    "num_bits": (8,),
    "type": ("float", "int"),
    "strategy": ("token", "tensor", "group"),
    "symmetric": (True, False),
    "dynamic": (True, False),
    "block_structure": (None,),
    "actorder": (None, False),
    "scale_dtype": (None,),
    "zp_dtype": (None, "torch.int8"),
}
# For MXFP4 only; the same for weights and activations.
_BYTES = {"scale_dtype": (None, "torch.uint8"), "zp_dtype": (None, "torch.uint8")}
_MXFP4_GROUP_SIZE = 32
_ACTIVATIONS_OTHERS = frozenset({"group_size"})


def read_compressed_tensors(fields: Fields) -> QuantizationConfig:
    """Read a `quantization_config` of this method. Raises `ConfigError` naming the first field that
    is not supported."""
    where = "quantization_config"
    check_fields(where, fields, _TOP, _TOP_OTHERS | _IRRELEVANT)
    sparsity = fields.get("sparsity_config") or {"format": "dense"}
    if not isinstance(sparsity, Mapping) or sparsity.get("format") != "dense":
        raise ConfigError(
            f"{where}.sparsity_config={shown(sparsity)} is not supported; supported: dense"
        )
    groups = fields.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise ConfigError(f"{where}.config_groups={shown(groups)} must be an object with groups")
    read = tuple(
        _group(f"{where}.config_groups.{name}", group, fields["format"])
        for name, group in groups.items()
    )
    wide = read_names(f"{where}.ignore", fields.get("ignore"))
    # By name or by pattern. If a model also takes images, only its text model is read.
    others = {
        name
        for name in wide
        if re.search(r"mlp\\?\.gate\$?$", name) or _VISION.fullmatch(name.removeprefix("re:"))
    }
    alone = len(read) == 1 and len(heads := set(wide) - others) == 1 and heads <= HEADS
    kept = _kept(*read[0], next(iter(groups.values()))) if alone else None
    return QuantizationConfig("compressed-tensors", read, wide, kept)


def _group(where: str, group: Any, stored: str) -> tuple[tuple[str, ...], WeightFormat]:
    """(targets, format of their weights). `stored` is the format of groups without their own."""
    check_fields(where, group, _GROUP, _GROUP_OTHERS)
    stored = group.get("format") or stored
    if stored not in _STORED:
        raise ConfigError(f"{where}.format={shown(stored)} must be {', '.join(_STORED)}")
    of_weights = _WEIGHTS
    of_activations = _ACTIVATIONS
    if stored == _MXFP4:
        of_weights = _WEIGHTS | _BYTES | {"strategy": ("group",)}
        of_activations = _ACTIVATIONS | _BYTES | {"num_bits": (4, 8)}
    weights = check_fields(
        f"{where}.weights", group.get("weights"), of_weights, _WEIGHTS_OTHERS | _IRRELEVANT
    )
    activations = group.get("input_activations")
    if activations is not None:
        others = _ACTIVATIONS_OTHERS | _IRRELEVANT
        check_fields(f"{where}.input_activations", activations, of_activations, others)
    static = activations is not None and not activations["dynamic"]
    number = weights["type"], weights["num_bits"], weights["symmetric"]
    if number not in _STORED[stored]:
        raise ConfigError(
            f"{where}.weights: type={number[0]!r}, num_bits={number[1]}, symmetric={number[2]} is "
            f"not supported in format={stored!r}"
        )
    layouts: dict[str, Layout] = {_PACKED: "packed", _MXFP4: "mxfp4"}
    format = WeightFormat(
        layouts.get(stored, "scaled"),
        int(weights["num_bits"]),
        _block(f"{where}.weights", weights, stored),
        weights["type"],
        weights["symmetric"],
        activation_scales=static,
    )
    targets = read_names(f"{where}.targets", group.get("targets"))
    if not targets:
        raise ConfigError(f"{where}.targets={shown(group.get('targets'))} must name modules")
    return targets, format


def _block(where: str, weights: Fields, stored: str) -> tuple[int, int]:
    """`WeightFormat.block`."""
    strategy = weights["strategy"]
    size = weights.get("group_size")
    structure = weights.get("block_structure")
    if strategy != "block" and structure is not None:
        raise ConfigError(f"{where}.block_structure={shown(structure)} is not for {strategy!r}")
    if strategy != "group" and size not in (None, -1):
        raise ConfigError(f"{where}.group_size={shown(size)} is not for strategy={strategy!r}")
    if stored == _MXFP4 and size != _MXFP4_GROUP_SIZE:
        raise ConfigError(
            f"{where}.group_size={shown(size)} is not supported in format={stored!r}; supported: "
            f"{_MXFP4_GROUP_SIZE}"
        )
    if strategy == "group":
        return 1, read_group_size(f"{where}.group_size", size)
    if strategy == "channel":
        return 1, 0
    if stored == _PACKED:
        raise ConfigError(
            f"{where}.strategy={strategy!r} is not supported for pack-quantized weights"
        )
    if strategy == "tensor":
        return 0, 0
    if not (
        isinstance(structure, list)
        and len(structure) == 2
        and all(type(size) is int and size > 0 for size in structure)
    ):
        raise ConfigError(f"{where}.block_structure={shown(structure)} must be two numbers")
    return structure[0], structure[1]


def _kept(targets: tuple[str, ...], format: WeightFormat, group: Fields) -> Format | None:
    """The format of ours that the only group has, of all matrices but the head.

    fp8 is for activations of 8 bits, each token by a scale of its own whatever the file has for
    them; products with int8 widen the weights, whatever the activations were to be.
    """
    activations = group.get("input_activations") or {}
    if (targets, format.layout) != (("Linear",), "scaled"):
        return None
    if format.number == "int":
        return "int8" if format.block == (1, 0) and not format.activation_scales else None
    rounded = tuple(activations.get(name) for name in ("type", "symmetric"))
    whole = format.block in ((1, 0), (0, 0)) and activations.get("strategy") in ("token", "tensor")
    return "fp8" if whole and rounded == ("float", True) else None


def quantization_config(*, experts: bool) -> dict[str, Any]:
    """The `quantization_config` of what is written, of a model with or without experts."""
    number = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": number | {"strategy": "channel", "dynamic": False, "observer": "minmax"},
        "input_activations": number | {"strategy": "token", "dynamic": True, "observer": None},
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", ROUTERS] if experts else ["lm_head"],
        "kv_cache_scheme": None,
    }
