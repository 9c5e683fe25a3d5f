"""Phi-3, 3.5, 4 and 4-mini: fused tensors, a window, LongRoPE, and heads that rotate in part."""

from __future__ import annotations

import math
from typing import Any

from ...errors import ConfigError
from ...model.config import Config
from .fields import COMMON, GATE_UP, SILU, Family, Fields
from .gguf import GATE_UP_NAME, Architecture, Metadata
from .layers import longrope_attention, one_kind, read_object
from .llama import write_window


def read_phi3(hf: Fields) -> dict[str, Any]:
    return {"layer_kinds": one_kind(_rename_longrope(hf), partial=True)}


def _rename_longrope(hf: Fields) -> Fields:
    """The fields with `longrope` in the place of the older names that Phi-3's files have for it, su
    and yarn. transformers 5 writes the one beside the other."""
    renamed = dict(hf)
    for field in ("rope_scaling", "rope_parameters"):
        rope = read_object(field, hf.get(field))
        named = [rope[name] for name in ("rope_type", "type") if rope.get(name) is not None]
        older = [name for name in named if name in ("su", "yarn")]
        if not older or any(name not in ("su", "yarn", "longrope") for name in named):
            continue
        if missing := {"short_factor", "long_factor"} - rope.keys():
            raise ConfigError(
                f"{field}: rope_type={older[0]!r} is longrope for this model_type, and needs "
                f"{', '.join(sorted(missing))}"
            )
        rest = {name: value for name, value in rope.items() if name != "type"}
        renamed[field] = rest | {"rope_type": "longrope"}
    return renamed


def write_phi3(config: Config) -> dict[str, Any]:
    (rope,) = config.ropes
    scaling = rope.scaling
    longest = config.max_position_embeddings
    fields = write_window(config) | {"original_max_position_embeddings": longest}
    if scaling is None or scaling.rope_type != "longrope":
        return fields
    original = scaling.original_max_position_embeddings
    fields["original_max_position_embeddings"] = original
    default = longrope_attention(longest, original)
    if math.isclose(scaling.attention_factor, default, rel_tol=1e-9):
        # transformers 4 reads these three fields and refuses others beside them.
        fields["rope_scaling"] = {
            "type": "longrope",
            "short_factor": list(scaling.short_factor),
            "long_factor": list(scaling.long_factor),
        }
    return fields


FAMILIES = {
    "phi3": Family(
        "Phi3",
        read_phi3,
        write_phi3,
        fields={
            "sliding_window": "integer",
            "original_max_position_embeddings": "size",
            "partial_rotary_factor": "number",
        },
        neutral=SILU
        | {
            "attention_bias": (False, None),
            "full_attn_mod": (1, None),
            "interpolate_factor": (1, None),
        },
        defaults=COMMON
        | {
            "max_position_embeddings": 4096,
            "original_max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
        },
        fused={"self_attn.qkv_proj.weight": ("q", "k", "v")} | GATE_UP,
    )
}


def _gguf_phi3(found: Metadata) -> dict[str, Any]:
    longest = found.integer("context_length")
    original = found.integer("rope.scaling.original_context_length", longest)
    return {
        "model_type": "phi3",
        "hidden_act": "silu",
        "sliding_window": found.get("attention.sliding_window") or None,
        "original_max_position_embeddings": original,
    }


ARCHITECTURES = {
    "phi3": Architecture(_gguf_phi3, GATE_UP_NAME | {"self_attn.qkv_proj": "attn_qkv"})
}
