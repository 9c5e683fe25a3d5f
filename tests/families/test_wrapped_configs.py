"""The `config.json` of a model that takes images too: fields of the text model that stand under
`text_config`, beside it, or nowhere."""

from typing import Any

import pytest

from swiftkv_jax import ConfigError
from swiftkv_jax.checkpoints.families import WRAPPED
from swiftkv_jax.checkpoints.hf_config import config_from_hf, config_to_hf, text_fields

from .cases import CASES
from .test_spellings import as_version_4, as_version_5
from .wrapped_models import KINDS, fields

# As projects that load the published files state their fields.
GEMMA_3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model"},
}
GEMMA_3_27B = {
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "query_pre_attn_scalar": 168,
}
MISTRAL_SMALL_3: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"],
    "image_token_index": 10,
    "model_type": "mistral3",
    "multimodal_projector_bias": False,
    "projector_hidden_act": "gelu",
    "spatial_merge_size": 2,
    "text_config": {
        "attention_dropout": 0.0,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 5120,
        "initializer_range": 0.02,
        "intermediate_size": 32768,
        "max_position_embeddings": 131072,
        "model_type": "mistral",
        "num_attention_heads": 32,
        "num_hidden_layers": 40,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-05,
        "rope_theta": 1000000000.0,
        "sliding_window": None,
        "use_cache": True,
        "vocab_size": 131072,
    },
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "vision_config": {"hidden_size": 1024, "model_type": "pixtral"},
    "vision_feature_layer": -1,
}


def test_published_gemma3():
    config = config_from_hf(GEMMA_3_4B)
    assert (config.family, config.vocab_size, config.tie_word_embeddings) == (
        "gemma3_text",
        262208,
        True,
    )
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == (8, 4, 256)
    full, sliding = config.kind(5), config.kind(4)
    assert (full.window, sliding.window) == (None, 1024)
    assert full.rope is not None and full.rope.scaling is not None and sliding.rope is not None
    assert (full.rope.theta, full.rope.scaling.rope_type, full.rope.scaling.factor) == (
        1e6,
        "linear",
        8.0,
    )
    assert (sliding.rope.theta, sliding.rope.scaling) == (1e4, None)
    assert config.query_scale == 1 / 16
    assert config_from_hf(config_to_hf(config)) == config
    larger = config_from_hf(GEMMA_3_4B | {"text_config": GEMMA_3_4B["text_config"] | GEMMA_3_27B})
    assert (larger.num_layers, larger.head_dim, larger.query_scale) == (62, 128, 168**-0.5)


def test_published_mistral_small():
    """By itself it is a model in the shape of Llama."""
    config = config_from_hf(MISTRAL_SMALL_3)
    assert (config.family, config.tie_word_embeddings) == ("llama", False)
    assert (config.num_heads * config.head_dim, config.embed_dim) == (4096, 5120)
    (kind,) = config.kinds
    assert kind.window is None and kind.rope is not None and kind.rope.theta == 1e9


# Recorded from the configuration classes of transformers 5.23, of the fields that a text model by
# itself must state; the others are in `test_class_defaults`.
SIZE_FIELDS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
SIZES = {
    "gemma3": (262208, 2304, 9216, 26, 8),
    "mistral3": (32000, 4096, 14336, 32, 32),
}


@pytest.mark.parametrize("kind", WRAPPED)
def test_absent_fields(kind):
    stated = dict(zip(SIZE_FIELDS, SIZES[kind], strict=True))
    empty = {"model_type": kind, "text_config": {}}
    by_itself = stated | {"model_type": WRAPPED[kind]}
    assert config_from_hf(empty) == config_from_hf(by_itself)
    null = dict.fromkeys(stated)
    assert config_from_hf(empty | {"text_config": null}) == config_from_hf(by_itself)


@pytest.mark.parametrize("kind", KINDS)
def test_both_spellings_are_one_config(kind):
    text = CASES[KINDS[kind][0]]
    other = as_version_4(text) if "rope_parameters" in text else as_version_5(text)
    assert config_from_hf(fields(kind, text_config=other)) == config_from_hf(fields(kind))


@pytest.mark.parametrize(
    ("kind", "beside", "inside", "tied"),
    [
        ("gemma3", None, None, True),
        ("gemma3", False, None, False),
        ("gemma3", False, True, False),
        ("gemma3", True, True, True),
        ("mistral3", None, None, False),
        ("mistral3", None, True, True),
        ("mistral3", True, None, True),
        ("mistral3", True, False, False),  # as transformers 5 writes the published model
    ],
)
def test_tied_embeddings(kind, beside, inside, tied):
    hf = fields(kind)
    text = hf["text_config"] | {"tie_word_embeddings": inside}
    hf |= {"text_config": text, "tie_word_embeddings": beside}
    assert config_from_hf(hf).tie_word_embeddings is tied


def test_fields_beside_the_text_model():
    """Those go before what stands inside."""
    text = CASES["gemma3"] | {"torch_dtype": "float32", "eos_token_id": 7}
    hf = fields("gemma3", text_config=text)
    assert text_fields(hf)["eos_token_id"] == [2, 5]
    assert text_fields(hf)["torch_dtype"] == "bfloat16"
    del hf["eos_token_id"], hf["torch_dtype"]
    assert (text_fields(hf)["eos_token_id"], text_fields(hf)["torch_dtype"]) == (7, "float32")
    hf["dtype"] = "float16"
    assert text_fields(hf)["torch_dtype"] == "float16" and "dtype" not in text_fields(hf)


REFUSED: dict[str, tuple[str, dict[str, Any], dict[str, Any], str]] = {
    "a field of the text model": (
        "gemma3",
        {"hidden_size": 48},
        {},
        "unknown field 'hidden_size' beside text_config",
    ),
    "an unknown field": ("mistral3", {"gates": 2}, {}, "unknown field 'gates' beside text_config"),
    "an unknown field inside": ("mistral3", {}, {"gates": 2}, "unknown field 'gates'"),
    "another text model": (
        "mistral3",
        {},
        {"model_type": "ministral3"},
        "text_config: model_type='ministral3' is not supported; supported: 'mistral'",
    ),
    "a student": ("gemma3", {}, {"model_type": "gemma3_text_swiftkv"}, "text_config: model_type="),
    "no text model": ("gemma3", {"text_config": None}, {}, "text_config=None must be an object"),
    "text for a tie": ("gemma3", {"tie_word_embeddings": "no"}, {}, "must be true or false"),
    "attention both ways": (
        "gemma3",
        {},
        {"use_bidirectional_attention": True},
        "use_bidirectional_attention=True",
    ),
    "two quantisations": (
        "mistral3",
        {"quantization_config": {"quant_method": "fp8"}},
        {"quantization_config": {"quant_method": "awq"}},
        "quantization_config=.* and text_config: quantization_config=.* say the same and differ",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    kind, beside, inside, message = REFUSED[name]
    hf = fields(kind)
    with pytest.raises(ConfigError, match=message) as error:
        config_from_hf(hf | {"text_config": hf["text_config"] | inside} | beside)
    assert "\n" not in str(error.value) and len(str(error.value)) < 500
