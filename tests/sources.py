"""The package's source files, each read and parsed once in a process."""

import ast
import functools
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "swiftkv_jax"
FILES = sorted(PACKAGE.rglob("*.py"))


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree(path)))
