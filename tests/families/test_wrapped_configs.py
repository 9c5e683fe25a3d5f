"""The `config.json` of a model that takes images too: fields of the text model that stand under
`text_config`, beside it, or nowhere."""

from typing import Any

import pytest
from transformers import AutoConfig

from swiftkv_jax import ConfigError
from swiftkv_jax.checkpoints.families import FAMILIES, WRAPPED
from swiftkv_jax.checkpoints.hf_config import config_from_hf, text_fields

from .cases import CASES
from .test_spellings import as_version_4, as_version_5
from .wrapped_models import KINDS, fields


@pytest.mark.parametrize("kind", WRAPPED)
def test_absent_sizes_are_those_of_the_class(kind):
    """The other fields are those of the text model by itself."""
    fields = AutoConfig.for_model(kind, text_config={"model_type": WRAPPED[kind]}).to_dict()
    sizes = FAMILIES[WRAPPED[kind]].inside[kind]
    assert sizes == {name: fields["text_config"][name] for name in sizes}
    for absent in {}, dict.fromkeys(sizes):
        config = config_from_hf({"model_type": kind, "text_config": absent})
        assert config == config_from_hf({"model_type": WRAPPED[kind], **sizes})


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
