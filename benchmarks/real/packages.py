"""Python source of installed packages: which packages are trained on and which are held out.

The text is that of the versions in `requirements.lock` and is not part of this repository.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
from collections.abc import Iterator
from pathlib import Path

from swiftkv_jax.train.data.sources import STDLIB, DataSource, find_files

PACKAGES = (
    STDLIB,
    *"absl-py anyio beartype etils filelock flax fonttools grain huggingface_hub jax jaxlib "
    "markdown-it-py matplotlib numpy openai orbax-checkpoint pillow pip psutil pydantic Pygments "
    "pytest rich scipy setuptools starlette transformers typer uvicorn".split(),
)
"""Their licences are Apache-2.0, BSD, MIT or PSF-like."""
HELD_OUT = ("click", "fsspec", "Jinja2", "optax", "packaging")
MIN_BYTES = 2_000
MAX_BYTES = 200_000
"""Sizes of a file: smaller ones are mostly imports, larger ones mostly tables."""
MAX_REPEATED = 0.5
"""Largest share of a file's lines that stand in files before it."""
_SKIPPED = frozenset({"_vendor", "_distutils", "__pycache__"})
_MIN_LINE = 20


def source_files(package: str) -> Iterator[tuple[str, str]]:
    """(name, text) of a package's files of an allowed size, by name."""
    if package == STDLIB:
        found = find_files(DataSource(STDLIB))
        named = [(f"{file.parent.name}/{file.name}", file) for file in found]
    else:
        distribution = importlib.metadata.distribution(package)
        named = [
            (str(file), Path(str(distribution.locate_file(file))))
            for file in sorted(distribution.files or [])
            if file.suffix == ".py" and not _SKIPPED.intersection(file.parts)
        ]
    for name, file in named:
        if MIN_BYTES <= file.stat().st_size <= MAX_BYTES:
            try:
                yield name, file.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


def repeats(text: str, seen: set[bytes]) -> bool:
    """True if most lines of a file stand in others; if not, its own are added to `seen`."""
    lines = {
        hashlib.blake2b(line.encode(), digest_size=8).digest()
        for line in map(str.strip, text.splitlines())
        if len(line) >= _MIN_LINE
    }
    if len(lines & seen) > MAX_REPEATED * len(lines):
        return True
    seen |= lines
    return not lines
