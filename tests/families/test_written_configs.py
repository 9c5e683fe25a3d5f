"""A `config.json` that is written says what the config says, or is refused."""

import dataclasses

import pytest

from swiftkv_jax import ConfigError, LayerKind
from swiftkv_jax.checkpoints.hf_config import config_from_hf, config_to_hf

from .test_configs import BASE


@pytest.mark.parametrize("family", ["gemma3_text", "olmo3"])
@pytest.mark.parametrize("window", [63, 64, 512])
def test_a_window_that_hides_nothing_still_chooses_the_rope(family, window):
    """Layers with a window have a rotary embedding of their own, which an export must state."""
    ropes = {"rope_theta": 1e6, "rope_local_base_freq": 1e4} if family != "olmo3" else {}
    if family == "olmo3":
        yarn_of_full = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 5e5}
        yarn_of_full["original_max_position_embeddings"] = 32
        plain = {"rope_type": "default", "rope_theta": 5e5}
        ropes = {"rope_parameters": {"full_attention": yarn_of_full, "sliding_attention": plain}}
    types = ["sliding_attention", "full_attention"] * 2
    config = config_from_hf(
        BASE | {"model_type": family, "sliding_window": window, "layer_types": types} | ropes
    )
    assert len(config.ropes) == 2
    written = config_to_hf(config)
    assert written["layer_types"] == types and written["sliding_window"] == window
    assert config_from_hf(written) == config
    assert {kind.window for kind in config.at_length(64).kinds} == {None} | (
        {63} if window == 63 else set()
    )


def test_what_a_family_cannot_state_is_not_written():
    config = config_from_hf(BASE | {"model_type": "llama"})
    windowed = dataclasses.replace(config, layer_kinds=(LayerKind(window=8),))
    with pytest.raises(ConfigError, match="a llama config.json cannot state layer_kinds="):
        config_to_hf(windowed)
    with pytest.raises(ConfigError, match=r"cannot state logit_cap=30\.0, score_cap|score_cap"):
        config_to_hf(dataclasses.replace(config, score_cap=50.0, logit_cap=30.0))
