"""Descriptions of paths that hold no checkpoint of a kind that is read, and the way out: each text
is the rest of an error message that begins with the path."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from ..process.json_files import check_no_pointer

_PICKLES = (".bin", ".pt", ".pth", ".pkl")
ADAPTER = "adapter_config.json"
_URL = re.compile(r"https?://[^/]+/([\w.-]+/[\w.-]+)")


def is_path(model: str) -> bool:
    """Tell by its spelling whether what was typed is a path or a URL, and no name on the Hub."""
    return model.startswith((".", "/")) or "://" in model or model.lower().endswith(".gguf")


def missing(model: str) -> str:
    """Say why what was typed, a path that does not exist, is no model."""
    if (url := _URL.match(model)) is not None:
        return f"a URL is no name on the Hub: give {url[1]}"
    if is_path(model):
        return "no such file or directory"
    return "no such file or directory, and no name on the Hub, which is ORGANISATION/NAME"


def not_a_directory(path: Path) -> str:
    """Say why a file is no model. Raises `CheckpointError` for a Git LFS pointer."""
    with path.open("rb") as opened:
        begin = opened.read(64)
    check_no_pointer(path, begin)
    if path.suffix in (".safetensors", ".json"):
        return f"a checkpoint is a directory: give {path.parent}"
    return "a checkpoint is a directory"


def without_weights(path: Path) -> str | None:
    """Say why a directory has no weights that are read; None if nothing in it tells."""
    names = sorted(file.name for file in path.iterdir())
    if ADAPTER in names:
        return _adapter(path / ADAPTER)
    if found := [name for name in names if name.endswith(".gguf") and "mmproj" in name]:
        return f"{_first(found)}: a projector of images; the model's own GGUF file is needed"
    if reason := pickles(names):
        return reason
    if (path / "snapshots").is_dir():
        return "a folder of the Hub's cache: give the folder of a revision within its snapshots/"
    return None


def pickles(names: Iterable[str]) -> str | None:
    """Say why weights in pickles among the files of these `names` are not read; None if there are
    none."""
    found = [name for name in names if name.endswith(_PICKLES) and name != "training_args.bin"]
    if not found:
        return None
    return (
        f"{_first(found)}: pickle files can run code; convert to safetensors, with "
        f"save_pretrained of transformers, or get the model's safetensors files"
    )


def _adapter(file: Path) -> str:
    try:
        base = json.loads(file.read_text(encoding="utf-8")).get("base_model_name_or_path")
    except (OSError, ValueError, AttributeError):
        base = None
    return (
        f"{ADAPTER}: an adapter, not a model: swiftkv convert orbax2hf {base or 'BASE'} DST "
        f"--adapter {file.parent} merges it into its base"
    )


def _first(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
