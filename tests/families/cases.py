"""A tiny model of each family: its `config.json`, spelled as files on the Hub are, which is
`fixtures/families/CASE.json`, and a rule for its weights. Imports nothing of the package, so that
`record.py` can run beside transformers.

qwen2 has the window's fields switched off, as Qwen2.5's files do; granite4 is without Mamba layers
and experts, whose fields nothing reads, nor `intermediate_size`; glm4-yarn leaves to the class how
much of a head rotates.
"""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

LENGTH, PROMPT, NEW = 40, 20, 12
"""Positions of the recorded logits; of the recorded greedy continuation, its prompt and itself."""
VOCABULARY = 96
FIXTURES = Path(__file__).parents[1] / "fixtures" / "families"
CASES: dict[str, dict[str, Any]] = {
    path.stem: json.loads(path.read_text()) for path in sorted(FIXTURES.glob("*.json"))
}


def tensor_for(config: Mapping[str, Any], name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The tensor of this name: random, and large enough that every feature tells.

    The stream of `RandomState` is the same in every NumPy.
    """
    random = np.random.RandomState(zlib.crc32(f"{config['model_type']} {name}".encode()))
    gemma = config["model_type"].startswith("gemma")
    if "norm" in name:
        values = random.uniform(0.6, 1.6, shape)
        if gemma:
            after = "post_attention" in name or "post_feedforward" in name
            values += 1.5 * after - 1
    elif name.endswith("bias"):
        values = 0.5 * random.standard_normal(shape)
    elif "embed_tokens" in name:
        scale = config.get("embedding_multiplier", np.sqrt(shape[1]) if gemma else 1.0)
        values = random.standard_normal(shape) * _EMBEDDING.get(config["model_type"], 0.5) / scale
    elif "lm_head" in name:
        values = random.standard_normal(shape) * 2 / np.sqrt(shape[-1])
    else:
        query_or_key = "q_proj" in name or "k_proj" in name or "qkv_proj" in name
        strong = _OUTPUT.get(config["model_type"], 1.2)
        output = "o_proj" in name or "down_proj" in name or "output_linear" in name
        gain = 1.6 if query_or_key else strong if output else 1.2
        values = gain * random.standard_normal(shape) / np.sqrt(shape[-1])
    return np.ascontiguousarray(values, np.float32)


_EMBEDDING = {
    "granite": 1.0,
    "granitemoehybrid": 1.0,
    "gemma2": 2.0,
    "gemma3_text": 2.0,
    "glm4": 0.4,
    "phi3": 0.3,
    "qwen2": 0.3,
    "qwen3": 0.3,
    "smollm3": 0.3,
}
_OUTPUT = {"granite": 8.0, "granitemoehybrid": 8.0}


def tokens() -> np.ndarray:
    """i32[2, LENGTH]"""
    return np.random.RandomState(7).randint(3, VOCABULARY, (2, LENGTH)).astype(np.int32)
