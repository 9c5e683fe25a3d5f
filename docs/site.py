"""Copy what the site publishes, for `make site`: the pages in `mkdocs.yml`, their pictures and
style. A link to another file becomes its address in the repository, which shows notebooks too.

    REPO_URL=https://github.com/OWNER/NAME python -m docs.site build/pages

Without REPO_URL, links to other files lead into the working tree.
"""

from __future__ import annotations

import functools
import os
import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURES = (".svg", ".png")


def copy(folder: Path, files: str) -> None:
    """Copy pages and pictures to the paths that they have in the tree. `files` is the address of
    the tree's root for all other files."""
    listed = re.findall(r"\S+\.md$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    pages = [ROOT / name for name in listed]
    others = {ROOT / "docs" / "site.css"}

    def link(page: Path, match: re.Match[str]) -> str:
        path = (page.parent / match[1]).resolve()
        if path.suffix in PICTURES:
            others.add(path)
        elif path not in pages:
            return f"]({files}/{path.relative_to(ROOT)}"
        return match[0]

    def place(path: Path) -> Path:
        copied = folder / path.relative_to(ROOT)
        copied.parent.mkdir(parents=True, exist_ok=True)
        return copied

    for page in pages:
        text = page.read_text("utf-8")
        text = re.sub(r"\]\(([^)\s#:]+)(?=[)#])", functools.partial(link, page), text)
        place(page).write_text(text, "utf-8")
    for path in others:
        shutil.copy(path, place(path))


if __name__ == "__main__":
    repository = os.environ.get("REPO_URL")
    copy(Path(sys.argv[1]), f"{repository}/blob/main" if repository else ROOT.as_uri())
