"""What `examples/deploy/compose.yaml` starts."""

import re
import shlex

import yaml

from tests.serve.process import ROOT

FOLDER = ROOT / "examples" / "deploy"
OF_PLACE = {"--host", "--port", "--worker-urls", "--model"}
"""Flags that are of a place: names of machines and files."""


def services() -> dict[str, dict]:
    return yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))["services"]


def server_flags() -> list[str]:
    """Of `swiftkv infer serve`, without those of a place."""
    words = services()["first"]["command"].split()
    assert words[:3] == ["swiftkv", "infer", "serve"]
    return without_place(words[3:])


def router_flags() -> list[str]:
    """Of sglang-router, without those of a place."""
    (script,) = shlex.split(services()["router"]["command"])[2:]
    _, found, rest = script.partition("-m sglang_router.launch_router")
    assert found
    return without_place(rest.split())


def router_package() -> str:
    """With its version."""
    (found,) = re.findall(r"pip install [^']*'([^']+)'", services()["router"]["command"])
    return found


def without_place(words: list[str]) -> list[str]:
    kept, takes = [], True
    for word in words:
        if word.startswith("--"):
            takes = word not in OF_PLACE
        if takes:
            kept.append(word)
    return kept
