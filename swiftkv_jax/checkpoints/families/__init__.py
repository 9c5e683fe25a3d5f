"""The supported families of models, one file for each group of relatives: the fields of their
`config.json`, their tensors' names, and their GGUF files.

The layer is the same for all (`model.layers`, `model.transformer`): a family is the options that
it sets in a `Config`. Fields, class defaults and names are those of transformers 5.23
(`models/<family>/`); of GGUF, those of llama.cpp's converter (`conversion/` in
https://github.com/ggml-org/llama.cpp), and constants that no key states are those that it computes
with (`src/models/`).
"""

from __future__ import annotations

from . import gemma, glm, granite, llama, olmo, phi, qwen
from .fields import Family
from .gguf import Architecture

GROUPS = (llama, qwen, granite, phi, glm, olmo, gemma)

FAMILIES: dict[str, Family] = {
    name: family for group in GROUPS for name, family in group.FAMILIES.items()
}
ARCHITECTURES: dict[str, Architecture] = {
    name: found for group in GROUPS for name, found in group.ARCHITECTURES.items()
}
"""`general.architecture` of GGUF -> how its files are read."""
WRAPPED = {outer: name for name, family in FAMILIES.items() for outer in family.inside}
"""`model_type` of a model that takes images -> the family of its text model."""
