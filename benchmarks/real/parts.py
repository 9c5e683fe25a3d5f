"""A large file in parts, for machines that take small files only.

    python -m benchmarks.real.parts split MODEL.gguf FOLDER     parts of at most 30 MiB
    python -m benchmarks.real.parts join FOLDER MODEL.gguf

FOLDER/parts.json has the digests of the file and of its parts. Joining checks them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from pathlib import Path

from swiftkv_jax import cli
from swiftkv_jax.errors import UsageError
from swiftkv_jax.process import files

MANIFEST = "parts.json"
PART_BYTES = 30 * 2**20


def main(argv: list[str] | None = None) -> int:
    parser = cli.ArgumentParser(
        prog="python -m benchmarks.real.parts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flag = parser.add_argument
    flag("action", choices=("split", "join"))
    flag("source", type=Path)
    flag("target", type=Path)
    args = parser.parse_args(argv)
    action = split if args.action == "split" else join
    return cli.run(lambda: action(args.source, args.target) or cli.OK, parser)


def split(file: Path, folder: Path, part_bytes: int = PART_BYTES) -> None:
    """Write the parts of a file into a new folder. Raises `UsageError` if the folder exists or
    there is no such file."""
    if not file.is_file():
        raise UsageError(f"{file}: no such file")
    whole = hashlib.sha256()
    parts = list[dict[str, str]]()
    with files.new_directory(folder) as made, file.open("rb") as content:
        while part := content.read(part_bytes):
            name = f"part-{len(parts):02}"
            (made / name).write_bytes(part)
            whole.update(part)
            parts.append({"name": name, "sha256": hashlib.sha256(part).hexdigest()})
        manifest = {"name": file.name, "sha256": whole.hexdigest(), "parts": parts}
        files.write_json(made / MANIFEST, manifest)


def is_split(folder: Path) -> bool:
    """True if a folder holds a file in parts."""
    return (folder / MANIFEST).is_file()


def name_of(folder: Path) -> str:
    """The name of the file that was split."""
    return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["name"]


def join(folder: Path, file: Path) -> None:
    """Write the file of the parts in a folder. Raises `UsageError` for one that is missing or
    damaged."""
    if not is_split(folder):
        raise UsageError(f"{folder}: has no {MANIFEST}")
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    partial = file.with_name(f"{file.name}.partial")
    whole = hashlib.sha256()
    with partial.open("wb") as target:
        for part in manifest["parts"]:
            path = folder / part["name"]
            content = path.read_bytes() if path.is_file() else b""
            if hashlib.sha256(content).hexdigest() != part["sha256"]:
                raise UsageError(f"{path}: missing or damaged; copy it again")
            whole.update(content)
            target.write(content)
    if whole.hexdigest() != manifest["sha256"]:
        raise UsageError(f"{folder / MANIFEST}: its parts are not the file that was split")
    os.replace(partial, file)


if __name__ == "__main__":
    sys.exit(main())
