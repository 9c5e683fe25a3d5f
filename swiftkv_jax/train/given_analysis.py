"""The recommendation in the folder of an analysis. Importing this does not import JAX."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..cut import CUT_FIELDS
from ..errors import UsageError

ANALYSIS = "analysis.json"


def recommended_cut(folder: Path) -> dict[str, Any]:
    """The fields of a cut, by the names of a recipe. Raises `UsageError` if there are none."""
    file = folder / ANALYSIS if folder.is_dir() else folder
    try:
        found = json.loads(file.read_text(encoding="utf-8"))["recommendation"]
        return {name: found[name] for name in CUT_FIELDS}
    except OSError as error:
        raise UsageError(f"`analysis`={folder}: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise UsageError(
            f"`analysis`={folder}: no recommendation in {file.name}; run swiftkv train analyze"
        ) from None
