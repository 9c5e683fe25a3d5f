"""Models by their names on the Hub, which a server in this process stands in for."""

import argparse
import errno
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants

import swiftkv_jax as skv
from swiftkv_jax import CheckpointError, cli, convert
from swiftkv_jax.checkpoints.hub import local_path, repository_of
from swiftkv_jax.cli.fields import add_flags
from swiftkv_jax.cli.model_options import ModelOptions
from swiftkv_jax.errors import UsageError
from tests.checkpoints.hf_models import TIED, UNTIED, assert_same, message
from tests.checkpoints.hub_server import TOKEN, Hub, add, commit_of, hub_with, set_endpoint

NAME = "org/llama"
OTHERS = (
    "README.md",
    "pytorch_model.bin",
    "original/consolidated.00.pth",
    "original/model.safetensors",
    "consolidated.safetensors",
    "onnx/model.onnx",
    "model-q4_k_m.gguf",
    "tokenizer.py",
)
"""Files that no model here is read from."""


@pytest.fixture
def server(tmp_path, monkeypatch) -> Iterator[Hub]:
    """A hub with the repository `NAME`."""
    with hub_with(tmp_path, monkeypatch) as running:
        add(running, NAME, UNTIED, OTHERS)
        yield running


def error_of(model: str, revision: str | None = None) -> str:
    """The message, after the name and what all have in common."""
    text = message(model, read=lambda name: local_path(name, revision))
    return text.removeprefix("no such file or folder, and ")


def test_what_is_needed_is_downloaded_once(server):
    assert_same(skv.load(NAME), skv.load(UNTIED))
    needed = {".gitattributes", *os.listdir(UNTIED)}
    assert server.downloaded() == sorted(needed)
    server.requests.clear()
    assert_same(skv.load(NAME), skv.load(UNTIED))
    assert server.downloaded() == []


def test_tokenizers_templates_and_shards(server):
    folder = add(server, "org/sharded", UNTIED, ["model-extra.safetensors"])
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    side = ["tokenizer.json", "merges.txt", "chat_template.jinja", "generation_config.json"]
    side += ["additional_chat_templates/tool_use.jinja", "hf_quant_config.json"]
    for name in side:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(name))
    path = local_path("org/sharded")
    needed = {".gitattributes", "config.json", "model.safetensors.index.json", *side}
    assert set(server.downloaded()) == needed | {"model-00001-of-00001.safetensors"}
    assert (path / "additional_chat_templates" / "tool_use.jinja").is_file()
    server.requests.clear()
    local_path(NAME, weights=False)
    assert "model.safetensors" not in server.downloaded()
    assert "config.json" in server.downloaded()


def test_a_shard_that_the_repository_lacks(server):
    """Reading the folder says so, also once the others are there."""
    folder = add(server, "org/sharded", UNTIED)
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    index = {"weight_map": {"lm_head.weight": "a.safetensors", "x": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for _ in range(2):
        with pytest.raises(CheckpointError, match="b.safetensors"):
            skv.load("org/sharded")


def test_a_folder_comes_first(server):
    shutil.copytree(TIED, NAME)
    assert local_path(NAME) == Path(NAME)
    assert_same(skv.load(NAME), skv.load(TIED))
    with pytest.raises(UsageError, match=f"`revision`=main: {NAME} is not a name on the Hub"):
        skv.load(NAME, revision="main")
    assert server.requests == []


@pytest.mark.parametrize("path", ["llama", "../a", "a/b/c", "a b/c", "/nowhere/llama", "a/.b"])
def test_paths_that_are_no_names(path, server):
    with pytest.raises(CheckpointError, match=f"^{path}: no such file or directory"):
        skv.load(path)
    assert server.requests == []


@pytest.mark.parametrize(
    "path", [f"./{NAME}", f"../{NAME}", "odd/nofile.gguf", "ODD/NOFILE.GGUF", "/nowhere/llama.gguf"]
)
def test_what_is_spelled_like_a_path_is_not_looked_up(path, server, capsys):
    """Also where a command has it, which shows it as it was typed."""
    with pytest.raises(CheckpointError) as error:
        local_path(path)
    assert str(error.value) == f"{path}: no such file or directory"
    assert convert.main(["inspect", path]) == cli.BAD_CHECKPOINT
    assert capsys.readouterr().err == f"error: {path}: no such file or directory\n"
    parser = argparse.ArgumentParser()
    add_flags(parser, ModelOptions)
    options = ModelOptions.from_args(parser.parse_args(["-m", path]))
    with pytest.raises(CheckpointError, match=f"^{re.escape(path)}: no such file or directory$"):
        _ = options.path
    assert server.requests == []


def test_a_path_that_begins_with_a_dot(server):
    shutil.copytree(TIED, NAME)
    assert local_path(f"./{NAME}") == Path(NAME)


@pytest.mark.parametrize("rest", ["", "/resolve/main/model.gguf"])
def test_a_url_is_refused_as_it_was_typed(rest, server):
    url = f"https://huggingface.co/{NAME}{rest}"
    with pytest.raises(CheckpointError) as error:
        skv.load(url)
    assert str(error.value) == f"{url}: a URL is no name on the Hub: give {NAME}"


def test_revisions(server):
    add(server, NAME, TIED, revision="v2")
    assert_same(skv.load(NAME, revision="v2"), skv.load(TIED))
    assert_same(skv.load(NAME, revision=commit_of(NAME, "v2")), skv.load(TIED))
    assert_same(skv.load(NAME), skv.load(UNTIED))
    assert error_of(NAME, "v3") == (
        "on the Hub it has no revision v3: give a branch, a tag or a commit"
    )


def test_without_a_connection_the_cache_serves(server, monkeypatch):
    path = local_path(NAME)
    server.status = 503
    assert local_path(NAME) == path
    set_endpoint(monkeypatch, "http://127.0.0.1:1")
    assert local_path(NAME) == path
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert local_path(NAME) == path
    (path / "model.safetensors").unlink()
    assert "it is not in the cache" in error_of(NAME)


def test_a_part_that_was_interrupted_is_completed(server):
    path = local_path(NAME)
    (path / "model.safetensors").unlink()
    assert_same(skv.load(local_path(NAME)), skv.load(UNTIED))


def test_offline(server, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    cache = constants.HF_HUB_CACHE
    assert error_of("runs/8b") == (
        f"as a name on the Hub it is not in the cache {cache}, or not whole: unset "
        f"HF_HUB_OFFLINE to download it"
    )
    assert "its revision v2 is not in the cache" in error_of(NAME, "v2")
    assert server.requests == []


def test_no_network(server, monkeypatch):
    set_endpoint(monkeypatch, "http://127.0.0.1:1")
    text = error_of("runs/8b")
    assert text.startswith("the Hub at http://127.0.0.1:1 cannot be reached (")
    assert text.endswith(f"refused); it is not in the cache {constants.HF_HUB_CACHE}")


LOG_IN = "log in by `hf auth login`, or set HF_TOKEN"
ACCEPT = f"access to it on the Hub is gated: accept the terms at URL/{NAME}"


@pytest.mark.parametrize(
    "name, kind, token, text",
    [
        ("runs/8b", None, None, f"no such repository at URL, or it is private: {LOG_IN}"),
        (
            "runs/8b",
            None,
            TOKEN,
            "no such repository at URL, or the account of the token may not read it",
        ),
        (NAME, "private", None, f"no such repository at URL, or it is private: {LOG_IN}"),
        (NAME, "gated", None, f"{ACCEPT} and {LOG_IN}"),
        (NAME, "gated", TOKEN, f"{ACCEPT} as the account of your token"),
        (NAME, None, "hf_wrong", f"URL refuses the token (401): {LOG_IN} to one that is valid"),
    ],
)
def test_repositories_that_are_not_for_all(name, kind, token, text, server, monkeypatch):
    if kind is not None:
        setattr(server, kind, {NAME})
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    assert error_of(name) == text.replace("URL", server.url)


@pytest.mark.parametrize(
    "status, text",
    [
        (403, "refuses it (403): the token needs the permission to read org/llama"),
        (429, "answered 429: try again later"),
        (500, "answered 500: try again later"),
    ],
)
def test_other_answers(status, text, server):
    server.status = status
    assert error_of(NAME) == f"{server.url} {text}"


def test_a_full_disk(server, monkeypatch):
    def fail(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(huggingface_hub.file_download, "http_get", fail)
    assert error_of(NAME) == (
        f"no space is left for it in {constants.HF_HUB_CACHE}: free some, or set HF_HOME to a "
        f"folder with more; what has arrived is kept"
    )


@pytest.mark.parametrize("cache", ["FOLDER/file/hub", "/proc/x/hub"])
def test_a_cache_that_cannot_be_written(cache, server, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    cache = cache.replace("FOLDER", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", cache)
    text = f"the cache {cache} cannot be written: set HF_HOME to a folder that can"
    assert error_of(NAME) == text


def test_a_name_that_none_can_have(server):
    assert error_of("org/a--b") == "no repository of the Hub can have this name"


SEVERAL = "GGUF files only: name one, such as org/x:"


@pytest.mark.parametrize(
    "files, text",
    [
        (["config.json", "pytorch_model.bin"], "pytorch_model.bin: pickle files can run code"),
        (["README.md"], "no weights in the repository: looked for model.safetensors.index.json"),
        (["mmproj.gguf", "m-imatrix.gguf"], "no weights in the repository: looked for model.safe"),
        (["adapter_config.json"], "adapter_config.json: an adapter, not a model"),
        (
            ["m-IQ2_M.gguf", "m-Q8_0.gguf", "m-Q4_K_M.gguf", "mmproj.gguf"],
            f"{SEVERAL}Q4_K_M; it has m-IQ2_M.gguf, m-Q4_K_M.gguf, m-Q8_0.gguf",
        ),
        (["m-bf16.gguf", "m.Q8_0.gguf"], f"{SEVERAL}bf16; it has m-bf16.gguf, m.Q8_0.gguf"),
        (["a.gguf", "b.gguf"], f"{SEVERAL}a.gguf; it has a.gguf, b.gguf"),
        (
            ["m-Q6_K.gguf", "m-UD-Q6_K.gguf"],
            f"{SEVERAL}m-Q6_K.gguf; it has m-Q6_K.gguf, m-UD-Q6_K.gguf",
        ),
    ],
)
def test_a_repository_without_weights_that_are_read(files, text, server, capfd):
    """The error is all that is said."""
    add(server, "org/x", None, files)
    assert error_of("org/x").startswith(text)
    assert not [name for name in server.downloaded() if name.endswith((".bin", ".gguf"))]
    assert capfd.readouterr() == ("", "")


def test_names_of_models(server, tmp_path):
    assert ModelOptions(model=NAME).name == NAME
    assert ModelOptions(model="org/ggufs:Q4").name == "org/ggufs:Q4"
    assert ModelOptions(model=local_path(NAME)).name == NAME  # the folder in the cache
    assert ModelOptions(model=UNTIED).name == UNTIED.name
    assert ModelOptions().name == "swiftkv"
    with pytest.raises(UsageError, match="`revision`=v2 goes with `model`"):
        _ = ModelOptions(revision="v2").path
    assert repository_of(tmp_path) is None


def test_inspect(server, capsys):
    add(server, NAME, TIED, revision="v2")
    assert convert.main(["inspect", NAME, "--revision", "v2"]) == cli.OK
    assert "group_size   2" in capsys.readouterr().out
    assert convert.main(["inspect", "runs/8b"]) == cli.BAD_CHECKPOINT
    assert capsys.readouterr().err.startswith(
        f"error: runs/8b: no such file or folder, and no such repository at {server.url}"
    )


def test_the_environment_is_obeyed(server, tmp_path):
    """In a new process, whose variables `huggingface_hub` reads: progress and the commit on
    standard error, nothing of it on standard output."""
    server.private = {NAME}
    env = os.environ | {"HF_ENDPOINT": server.url, "HF_HOME": str(tmp_path / "home")}
    env |= {"HF_TOKEN": TOKEN, "HF_HUB_OFFLINE": "0"}
    command = [sys.executable, "-m", "swiftkv_jax.convert", "inspect", NAME]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    folder = (
        tmp_path / "home" / "hub" / "models--org--llama" / "snapshots" / commit_of(NAME, "main")
    )
    assert f"{NAME}: commit {folder.name} in {folder}" in done.stderr
    assert done.stdout.startswith("kind ")
