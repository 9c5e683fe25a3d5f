"""The one quantisation of Hugging Face checkpoints that is read and written: what llm-compressor
calls `FP8_DYNAMIC`.

Each Linear but the head has `X.weight`, float8_e4m3fn [out, in], and `X.weight_scale` [out, 1];
their product is the weight. Activations are quantised per token while the model runs, so nothing is
stored of them. The format is that of https://github.com/vllm-project/compressed-tensors
(`quantization/quant_args.py` has the fields).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError

SCALE_SUFFIX = "_scale"
"""A weight's name and this is its scale's."""

# Bookkeeping: how the scales were found, by whom, and how much smaller the file became.
_IRRELEVANT = frozenset({"observer", "observer_kwargs", "version", "global_compression_ratio"})

# Field -> the values that mean what this package computes; None is for absent ones too.
_BOTH = {
    "num_bits": (8,),
    "type": ("float",),
    "symmetric": (True,),
    "group_size": (None,),
    "block_structure": (None,),
    "actorder": (None,),
}
_BOTH |= {"scale_dtype": (None,), "zp_dtype": (None,)}
_WEIGHTS = {"strategy": ("channel",), "dynamic": (False, None)} | _BOTH
_ACTIVATIONS = {"strategy": ("token",), "dynamic": (True,)} | _BOTH
_GROUP = {
    "targets": (["Linear"],),
    "output_activations": (None,),
    "format": ("float-quantized", None),
}
_TOP = {
    "quant_method": ("compressed-tensors",),
    "format": ("float-quantized",),
    "quantization_status": ("compressed",),
    "ignore": (["lm_head"],),
    "kv_cache_scheme": (None,),
    "sparsity_config": (None, {}),
    "transform_config": (None, {}),
}


def check_quantization_config(fields: Any) -> None:
    """Raise `ConfigError` naming the first field of a `quantization_config` by which it is not
    `FP8_DYNAMIC`."""
    where = "quantization_config"
    groups = _object(where, fields).get("config_groups")
    _check(where, fields, _TOP, {"config_groups"})
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise ConfigError(
            f"{where}.config_groups={groups!r} is not supported; supported: one group"
        )
    ((name, group),) = groups.items()
    where = f"{where}.config_groups.{name}"
    _check(where, group, _GROUP, {"weights", "input_activations"})
    _check(f"{where}.weights", group.get("weights"), _WEIGHTS)
    _check(f"{where}.input_activations", group.get("input_activations"), _ACTIVATIONS)


def quantization_config() -> dict[str, Any]:
    """The `quantization_config` of what is written."""
    weights = {
        "num_bits": 8,
        "type": "float",
        "strategy": "channel",
        "symmetric": True,
        "dynamic": False,
        "observer": "minmax",
    }
    activations = {
        "num_bits": 8,
        "type": "float",
        "strategy": "token",
        "symmetric": True,
        "dynamic": True,
        "observer": None,
    }
    group = {
        "targets": ["Linear"],
        "weights": weights,
        "input_activations": activations,
        "output_activations": None,
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
    }


def _check(
    where: str,
    fields: Any,
    allowed: Mapping[str, tuple[Any, ...]],
    nested: frozenset[str] | set[str] = frozenset(),
) -> None:
    fields = _object(where, fields)
    for name, values in allowed.items():
        if (value := fields.get(name)) not in values:
            raise ConfigError(
                f"{where}.{name}={value!r} is not supported; supported: {values[0]!r}"
            )
    for name, value in fields.items():
        if name not in allowed and name not in nested and name not in _IRRELEVANT:
            raise ConfigError(
                f"{where}: unknown field {name!r} (value {value!r}): it may change the model, so "
                f"it is not ignored"
            )


def _object(where: str, fields: Any) -> Mapping[str, Any]:
    if not isinstance(fields, Mapping):
        raise ConfigError(f"{where}={fields!r} must be an object")
    return fields
