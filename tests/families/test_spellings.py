"""Each case's config.json in the spelling of the other major version of transformers: the same
`Config`, and so the same model."""

from typing import Any

import pytest

from swiftkv_jax.checkpoints.hf_config import config_from_hf

from .cases import CASES

ROPE_FIELDS = ("rope_theta", "rope_scaling", "rope_local_base_freq")


def as_version_5(hf: dict[str, Any]) -> dict[str, Any]:
    """`rope_parameters` for `rope_theta` and `rope_scaling`, `dtype` for `torch_dtype`."""
    fields = {name: value for name, value in hf.items() if name not in ROPE_FIELDS}
    scaling = dict(hf.get("rope_scaling") or {})
    rope_type = scaling.pop("type", None) or scaling.pop("rope_type", None) or "default"
    rope = {"rope_type": rope_type, "rope_theta": hf["rope_theta"]} | scaling
    if "partial_rotary_factor" in hf:  # it stands in both places
        rope["partial_rotary_factor"] = hf["partial_rotary_factor"]
    return fields | {"rope_parameters": rope, "dtype": "float32"}


def as_version_4(hf: dict[str, Any]) -> dict[str, Any]:
    """`rope_theta` and `rope_scaling`, of the full layers where those differ from the others."""
    fields = {name: value for name, value in hf.items() if name not in ("rope_parameters", "dtype")}
    rope = hf["rope_parameters"]
    if "full_attention" in rope:
        fields["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    scaling = {name: value for name, value in rope.items() if name != "rope_theta"}
    if hf["model_type"] == "olmo3":  # which has one theta for all
        assert fields.pop("rope_local_base_freq") == rope["rope_theta"]
    plain = scaling == {"rope_type": "default"}
    return fields | {
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if plain else scaling,
        "torch_dtype": "float32",
    }


@pytest.mark.parametrize("case", CASES)
def test_both_spellings_are_one_config(case):
    hf = CASES[case]
    other = as_version_4(hf) if "rope_parameters" in hf else as_version_5(hf)
    assert ("rope_parameters" in other) is not ("rope_parameters" in hf)
    assert config_from_hf(other) == config_from_hf(hf)
