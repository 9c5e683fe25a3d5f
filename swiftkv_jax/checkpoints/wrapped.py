"""Text models inside models that take images too: Gemma 3 from 4B on, Mistral Small 3.1 and 3.2.

Only the text model is read, as if it were a checkpoint by itself. Its fields stand under
`text_config`, a few of them beside it; its tensors have a prefix, which is one before transformers
4.52 and in what later versions write for compatibility, and another in their modules and in what
some tools write.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from .families import FAMILIES, IRRELEVANT
from .hf_values import agreed, shown, unknown_field


@dataclasses.dataclass(frozen=True)
class Wrapped:
    """One `model_type` of Hugging Face that has a text model inside."""

    text: str
    """The family of the text model, the `model_type` of `text_config`."""
    sizes: Mapping[str, int]
    """Values of the fields that a text model by itself must state and `text_config` may leave out:
    defaults of the text model's class."""


WRAPPED: dict[str, Wrapped] = {
    "gemma3": Wrapped(
        "gemma3_text",
        {
            "vocab_size": 262208,
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
        },
    ),
    "mistral3": Wrapped(
        "mistral",
        {
            "vocab_size": 32000,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        },
    ),
}

# Beside `text_config`: what only images use.
_VISION_FIELDS = frozenset(
    """
    vision_config mm_tokens_per_image boi_token_index eoi_token_index image_token_index
    boi_token_id eoi_token_id image_token_id projector_hidden_act vision_feature_layer
    multimodal_projector_bias spatial_merge_size
    """.split()
)
# Beside `text_config`: what goes before the same field there.
_OVER = ("eos_token_id", "bos_token_id", "pad_token_id", "transformers_version")
_TIE = "tie_word_embeddings"
_QUANTIZATION = "quantization_config"


def is_wrapped(hf: Mapping[str, Any]) -> bool:
    """Whether a `config.json` has its text model's fields under `text_config`."""
    return isinstance(hf.get("model_type"), str) and hf["model_type"] in WRAPPED


def text_fields(hf: Mapping[str, Any]) -> dict[str, Any]:
    """The `config.json` that the text model would have by itself, of one that `is_wrapped`.

    Raises `ConfigError` for fields beside `text_config` that could change the text model.
    """
    wrapped = WRAPPED[hf["model_type"]]
    text = hf.get("text_config")
    known = IRRELEVANT | _VISION_FIELDS | {"text_config", _TIE, _QUANTIZATION}
    if unknown := [name for name in hf if name not in known]:
        raise unknown_field(unknown[0], hf[unknown[0]], where=" beside text_config")
    if not isinstance(text, Mapping):
        raise ConfigError(f"text_config={shown(text)} must be an object")
    if text.get("model_type", wrapped.text) != wrapped.text:
        raise ConfigError(
            f"text_config: model_type={shown(text['model_type'])} is not supported; supported: "
            f"{wrapped.text!r}"
        )
    fields = {name: value for name, value in text.items() if name not in ("dtype", "torch_dtype")}
    fields |= {"model_type": wrapped.text, _TIE: _tied(hf, text)}
    fields |= {name: size for name, size in wrapped.sizes.items() if text.get(name) is None}
    fields |= {name: hf[name] for name in _OVER if hf.get(name) is not None}
    names = ("dtype", "torch_dtype")
    dtypes = [part[name] for part in (hf, text) for name in names if part.get(name) is not None]
    if dtypes:
        fields["torch_dtype"] = dtypes[0]
    places = {_QUANTIZATION: hf, f"text_config: {_QUANTIZATION}": text}
    quantization = agreed({name: part.get(_QUANTIZATION) for name, part in places.items()})
    return fields | ({} if quantization is None else {_QUANTIZATION: quantization})


def ties_without_head(hf: Mapping[str, Any]) -> bool:
    """Return whether the head of one that `is_wrapped` is the embedding if the files have no head,
    whatever `text_config` says: transformers 5 goes by the field beside it."""
    return hf.get(_TIE) is True


def _tied(hf: Mapping[str, Any], text: Mapping[str, Any]) -> Any:
    """Return whether the head is the embedding, where the files have one. transformers 4 goes by
    the field of `text_config`; 5 by the one beside it, which is true by default, but not where the
    files have a head of their own. Mistral's have one, and only one of the fields, if any, says
    so."""
    stated = [part[_TIE] for part in (text, hf) if part.get(_TIE) is not None]
    if wrong := [value for value in stated if not isinstance(value, bool)]:
        raise ConfigError(f"{_TIE}={shown(wrong[0])} must be true or false")
    default = FAMILIES[WRAPPED[hf["model_type"]].text].defaults[_TIE]
    return all(stated) if stated else default


# Tensors ----------------------------------------------------------------------

_MODEL = "model."
_HEAD = "lm_head"
_VISION = re.compile(r"(model\.)?(vision_tower|multi_modal_projector)\.")


@dataclasses.dataclass(frozen=True)
class TensorNames:
    """How the files name the text model's tensors."""

    model: str = _MODEL
    """Prefix that the files have in the place of `model.`."""
    head: str = _HEAD
    """Name that the files have in the place of `lm_head`."""
    listed: tuple[TensorNames, ...] = ()
    """How a `quantization_config` may name its modules besides."""

    def in_file(self, name: str) -> str:
        """The file's name of the tensor or module that the text model by itself calls `name`."""
        for ours, theirs in ((_MODEL, self.model), (_HEAD, self.head)):
            if name.startswith(ours):
                return theirs + name.removeprefix(ours)
        return name

    def in_lists(self, name: str) -> tuple[str, ...]:
        """The names by which lists of modules may mean `name`, the text model's own."""
        return tuple(names.in_file(name) for names in (self, *self.listed))


BY_ITSELF = TensorNames()
_IN_FILES = TensorNames("language_model.model.", "language_model.lm_head")
_IN_MODULES = TensorNames("model.language_model.", "lm_head")


def tensor_names(found: list[str]) -> TensorNames:
    """How the files of a model that `is_wrapped` name its tensors, of which they have `found`."""
    one = _IN_FILES
    other = _IN_MODULES
    counts = [sum(name.startswith(names.model) for name in found) for names in (one, other)]
    if counts[1] > counts[0]:
        one, other = other, one
    return dataclasses.replace(one, listed=(other,))


def is_vision(tensor: str) -> bool:
    """Whether a tensor of a model that `is_wrapped` is not of its text model."""
    return _VISION.match(tensor) is not None
