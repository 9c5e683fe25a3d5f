"""Models that take images too, made of the recorded text models: the fields and tensors of the text
model where such files have them, and a few tensors of the vision side."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from . import models
from .cases import CASES

VISION_CONFIG = {"hidden_size": 32, "num_hidden_layers": 1}
# Model -> (case of its text model, fields beside `text_config`).
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": (
        "gemma3",
        {
            "architectures": ["Gemma3ForConditionalGeneration"],
            "boi_token_index": 92,
            "eoi_token_index": 93,
            "eos_token_id": [2, 5],
            "image_token_index": 94,
            "initializer_range": 0.02,
            "mm_tokens_per_image": 4,
            "model_type": "gemma3",
            "torch_dtype": "bfloat16",
            "transformers_version": "4.50.0.dev0",
            "vision_config": VISION_CONFIG | {"model_type": "siglip_vision_model"},
        },
    ),
    "mistral3": (
        "mistral-window",
        {
            "architectures": ["Mistral3ForConditionalGeneration"],
            "image_token_index": 10,
            "model_type": "mistral3",
            "multimodal_projector_bias": False,
            "projector_hidden_act": "gelu",
            "spatial_merge_size": 2,
            "torch_dtype": "bfloat16",
            "transformers_version": "4.50.0.dev0",
            "vision_config": VISION_CONFIG | {"model_type": "pixtral"},
            "vision_feature_layer": -1,
        },
    ),
}
# As transformers writes them, and as its modules are called: (`model.`, `lm_head.`, the prefix of
# the vision side).
SPELLINGS = {
    "files": ("language_model.model.", "language_model.lm_head.", ""),
    "modules": ("model.language_model.", "lm_head.", "model."),
}
VISION = (
    "vision_tower.encoder.layers.0.self_attn.q_proj.weight",
    "vision_tower.ln_pre.weight",
    "multi_modal_projector.mm_input_projection_weight",
)


def fields(kind: str, **changes) -> dict[str, Any]:
    """The config.json; `changes` are of the fields beside `text_config`."""
    case, beside = KINDS[kind]
    return beside | {"text_config": CASES[case]} | changes


def spelled(name: str, spelling: str) -> str:
    """A tensor's name in the file, of its name in the text model by itself."""
    model, head, _ = SPELLINGS[spelling]
    if name.startswith("lm_head."):
        return head + name.removeprefix("lm_head.")
    return model + name.removeprefix("model.")


def wrap(tensors: Mapping[str, np.ndarray], spelling: str) -> dict[str, np.ndarray]:
    """The text model's tensors by the file's names, and some that no text model has, of a dtype
    that no weights have."""
    vision = {SPELLINGS[spelling][2] + name: np.ones((3, 2), np.uint16) for name in VISION}
    return {spelled(name, spelling): array for name, array in tensors.items()} | vision


def write(kind: str, spelling: str, path: Path, tensors=None, **changes) -> Path:
    """A directory, by default with the tensors of the recorded text model."""
    tensors = models.tensors(KINDS[kind][0]) if tensors is None else tensors
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(fields(kind, **changes)))
    save_file(wrap(tensors, spelling), path / "model.safetensors", {"format": "pt"})
    return path
