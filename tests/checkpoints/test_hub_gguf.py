"""GGUF files of repositories on the Hub, which a server in this process stands in for."""

import shutil
import time
from collections.abc import Iterator

import numpy as np
import pytest
from huggingface_hub import constants

import swiftkv_jax as skv
from swiftkv_jax import CheckpointError
from swiftkv_jax.checkpoints.gguf.file import shards
from swiftkv_jax.checkpoints.hub import local_path, repository_of
from tests import tiny
from tests.checkpoints import gguf_files
from tests.checkpoints.hf_models import UNTIED, message
from tests.checkpoints.hub_server import Hub, add, commit_of, hub_with, set_endpoint


@pytest.fixture
def server(tmp_path, monkeypatch) -> Iterator[Hub]:
    with hub_with(tmp_path, monkeypatch) as running:
        yield running


GGUFS = ["m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m.f16.gguf", "mmproj-f16.gguf", "big/m-bf16.gguf"]


@pytest.mark.parametrize(
    "wanted, file",
    [
        ("Q4_K_M", "m-Q4_K_M.gguf"),
        ("q4_k_s", "m-Q4_K_S.gguf"),
        ("F16", "m.f16.gguf"),
        ("m-Q4_K_M.gguf", "m-Q4_K_M.gguf"),
        ("big/m-bf16.gguf", "big/m-bf16.gguf"),
        ("BF16", "big/m-bf16.gguf"),
    ],
)
def test_a_gguf_file(wanted, file, server, monkeypatch):
    add(server, "org/ggufs", UNTIED, GGUFS)
    path = local_path(f"org/ggufs:{wanted}")
    assert path.read_text() == file, path
    assert repository_of(path) == ("org/ggufs", commit_of("org/ggufs", "main"))
    assert [name for name in server.downloaded() if name.endswith(".gguf")] == [file]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert local_path(f"org/ggufs:{wanted}") == path


@pytest.mark.parametrize("weights", [True, False])
@pytest.mark.parametrize(
    "files", [["only.gguf"], ["m-Q4-00001-of-00002.gguf", "m-Q4-00002-of-00002.gguf"]]
)
def test_the_only_gguf_model_is_taken(files, weights, server, monkeypatch, caplog):
    """Whose metadata is needed where the weights are not. The commit is logged as for others."""
    caplog.set_level("INFO")
    others = ["README.md", "mmproj.gguf", "config.json"]
    add(server, "org/one", None, [*files, *others])
    path = local_path("org/one", weights=weights)
    assert path.name == files[0] and [part.read_text() for part in shards(path)] == files
    commit = commit_of("org/one", "main")
    assert caplog.messages[-1] == f"org/one:{files[0]}: commit {commit} in {path}"
    set_endpoint(monkeypatch, "http://127.0.0.1:1")
    assert local_path("org/one", weights=weights) == path
    assert local_path(f"org/one:{files[0]}") == path


def test_a_cached_gguf_file_is_used_at_once(server, monkeypatch, capfd, caplog):
    """Without a connection, nothing is asked again, and only the commit is told."""
    add(server, "org/ggufs", None, GGUFS)
    path = local_path("org/ggufs:Q4_K_M")
    capfd.readouterr()
    caplog.clear()
    caplog.set_level("INFO")
    set_endpoint(monkeypatch, "http://127.0.0.1:1")
    monkeypatch.setattr(time, "sleep", None)  # which comes between two attempts
    assert local_path("org/ggufs:Q4_K_M") == path
    told = f"org/ggufs:Q4_K_M: commit {commit_of('org/ggufs', 'main')} in {path}"
    assert [text for text in caplog.messages if "HTTP" not in text] == [told]
    assert set(capfd.readouterr().err.splitlines()) <= {told}


def test_gguf_files_that_the_cache_lacks(server, monkeypatch):
    add(server, "org/ggufs", None, GGUFS)
    local_path("org/ggufs:Q4_K_M")
    set_endpoint(monkeypatch, "http://127.0.0.1:1")
    only = "of the repository's GGUF files the cache has only m-Q4_K_M.gguf"
    found = message("org/ggufs:Q6_K", read=local_path)
    assert found == f"the Hub at http://127.0.0.1:1 cannot be reached; {only}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    offline = "offline: unset HF_HUB_OFFLINE to download it"
    assert message("org/ggufs:Q6_K", read=local_path) == f"{offline}; {only}"


PARTS = [f"big/m-Q6_K-0000{i}-of-00003.gguf" for i in (1, 2, 3)]


@pytest.mark.parametrize("wanted, first", [("Q6_K", 0), ("m-q6_k", 0), (PARTS[1], 1)])
def test_all_parts_of_a_gguf_model(wanted, first, server):
    add(server, "org/ggufs", None, [*GGUFS, *PARTS])
    path = local_path(f"org/ggufs:{wanted}")
    assert path.as_posix().endswith(PARTS[first])
    assert [part.read_text() for part in shards(path)] == PARTS
    assert [name for name in server.downloaded() if name.endswith(".gguf")] == PARTS


def test_a_gguf_model_in_parts_loads(server):
    hf = tiny.hf_config(model_type="llama", num_key_value_layers=0, head_dim=16, hidden_size=64)
    stored = tiny.tensors_for(hf | {"num_key_value_layers": hf["num_hidden_layers"]})
    folder = add(server, "org/parts", None)
    tensors = gguf_files.converted(hf, stored, permute=True)
    keys = gguf_files.common(hf) | {"rope.dimension_count": 16}
    gguf_files.write(folder / "m-F32.gguf", "llama", keys, tensors, split_max_tensors=20)
    model = skv.load("org/parts:F32")
    np.testing.assert_array_equal(model.llama.embed, stored["model.embed_tokens.weight"])
    lost = add(server, "org/lost", None)
    shutil.copy(folder / "m-F32-00001-of-00003.gguf", lost)
    with pytest.raises(CheckpointError, match="one of 3 parts; missing: m-F32-00002-of-00003"):
        skv.load("org/lost:F32")


@pytest.mark.parametrize(
    "model, text",
    [
        (
            "org/ggufs:Q8_0",
            "the repository has no such GGUF file; it has big/m-bf16.gguf, m-Q4_K_M.gguf, "
            "m-Q4_K_S.gguf, m-UD-Q4_K_M.gguf, m.f16.gguf",
        ),
        (
            "org/ggufs:Q4_K_M",
            "several GGUF files of the repository have this ending; name one: m-Q4_K_M.gguf, "
            "m-UD-Q4_K_M.gguf",
        ),
        (
            "org/parts:Q6_K",
            f"the repository has no such GGUF file; it has {PARTS[1]}, {PARTS[2]}",
        ),
        (
            "org/st:Q6_K",
            "the repository has no GGUF files; its safetensors are loaded by the name org/st",
        ),
    ],
)
def test_gguf_files_that_are_not_there(model, text, server):
    add(server, "org/ggufs", None, [*GGUFS, "m-UD-Q4_K_M.gguf"])
    add(server, "org/parts", None, PARTS[1:])
    add(server, "org/st", None, ["model.safetensors"])
    assert message(model, read=local_path) == text
