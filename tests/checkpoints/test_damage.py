"""Directories that are wrong, of Hugging Face and of Orbax: each error is one line that names the
place."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import swiftkv_jax as skv
from swiftkv_jax import CheckpointError, ConfigError, demo
from swiftkv_jax.checkpoints.hf_write import write_hf
from swiftkv_jax.checkpoints.source import from_model
from swiftkv_jax.errors import OutOfMemoryError
from tests.checkpoints.hf_models import TIED, UNTIED, biased_model


@pytest.fixture(scope="module")
def sound(tmp_path_factory) -> Path:
    """Directories that are not damaged, by kind."""
    folder = tmp_path_factory.mktemp("sound")
    shutil.copytree(UNTIED, folder / "hf")
    skv.save_hf(biased_model(), folder / "export")
    write_hf(from_model(biased_model()), folder / "shards", shard_bytes=20_000)
    skv.save(skv.load(TIED), folder / "orbax")
    return folder


def rewrite(change: Callable[[dict], object]) -> Callable[[Path], None]:
    """Change the tensors of the only file."""

    def damage(path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors", {"format": "pt"})

    return damage


def document(name: str, change: Callable[[dict], object]) -> Callable[[Path], None]:
    """Change a JSON file, which need not be there."""

    def damage(path: Path) -> None:
        file = path / name
        fields = json.loads(file.read_text()) if file.exists() else {}
        change(fields)
        file.write_text(json.dumps(fields))

    return damage


def content(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Change the bytes of a file, or of the largest below a folder."""

    def damage(path: Path) -> None:
        files = [file for file in (path / name, *(path / name).rglob("*")) if file.is_file()]
        file = max(files, key=lambda file: file.stat().st_size)
        file.write_bytes(change(file.read_bytes()))

    return damage


def flipped(found: bytes, at: int) -> bytes:
    return found[:at] + bytes([found[at] ^ 4]) + found[at + 1 :]


def flip_down_projection(found: bytes) -> bytes:
    header = int.from_bytes(found[:8], "little")
    start, _ = json.loads(found[8 : 8 + header])[DOWN]["data_offsets"]
    return flipped(found, 8 + header + start + 17)


def config(**fields) -> Callable[[Path], None]:
    return document("config.json", lambda found: found.update(fields))


def index(*names: str) -> Callable[[Path], None]:
    found = {f"t{i}": name for i, name in enumerate(names)}
    return document("model.safetensors.index.json", lambda file: file.update(weight_map=found))


def differ_everywhere(tensors: dict) -> None:
    del tensors["model.layers.2.mlp.up_proj.weight"]
    tensors["model.layers.9.mlp.up_proj.weight"] = np.zeros(3, np.float32)
    tensors["model.norm.weight"] = np.zeros(65, np.float32)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.int8)


def narrow_a_weight(tensors: dict) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)


def repeat_a_tensor(path: Path) -> None:
    first, second = sorted(path.glob("*.safetensors"))[:2]
    name, tensor = next(iter(load_file(first).items()))
    save_file(load_file(second) | {name: tensor}, second, {"format": "pt"})


def differ_in_the_manifest(path: Path) -> None:
    def change(found: dict) -> None:
        leaves = found["leaves"]
        leaves["lower.extra"] = leaves.pop("lower.gate")
        leaves["final_norm"]["shape"] = [65]
        leaves["embed"]["dtype"] = "int8"

    document("manifest.json", change)(path)
    shutil.rmtree(path / "weights/upper.o")


def tokenizer_config(content: str) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        shutil.copy(demo.LLAMA / "tokenizer.json", path)
        (path / "tokenizer_config.json").write_text(content)

    return damage


def copy_the_demo(path: Path) -> None:
    shutil.copy(demo.SWIFTKV / "model.safetensors.index.json", path)


DOWN = "model.layers.3.mlp.down_proj.weight"
OUTSIDE = "index.json: weight files must lie in the same directory"
INCOMPLETE = "/model.safetensors: not a complete safetensors file"
# Kind of directory, its damage, and what the error says, which begins with the directory.
DAMAGE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "every difference": (
        "hf",
        rewrite(differ_everywhere),
        r"^: missing: model\.layers\.2\.mlp\.up_proj\.weight; unexpected: "
        r"model\.layers\.9\.mlp\.up_proj\.weight; wrong shape: model\.norm\.weight \[65\], "
        r"expected \[64\]; dtype not supported yet: lm_head\.weight I8 \(supported: F32, BF16, "
        r"F16\)$",
    ),
    "fp8": (
        "hf",
        rewrite(narrow_a_weight),
        r"not supported yet: model\.layers\.0\.mlp\.up_proj\.weight F8_E4M3",
    ),
    "a tensor in two shards": (
        "shards",
        repeat_a_tensor,
        r"repeated: \S+ \(in model-00001-of-\d+\.safetensors, model-00002-of-\d+\.safetensors\)$",
    ),
    "a missing shard": (
        "shards",
        lambda path: sorted(path.glob("*.safetensors"))[1].unlink(),
        r"missing weight files .*: model-00002-of-\d+\.safetensors$",
    ),
    "a file above": ("hf", index("../model.safetensors"), OUTSIDE),
    "a copy of the demo": ("hf", copy_the_demo, f"{OUTSIDE}.*; the demo shares .* FOLDER` writes"),
    "a file in a folder": ("hf", index("a/b.safetensors"), OUTSIDE),
    "the folder above": ("hf", index(".."), OUTSIDE),
    "a file on Windows": ("hf", index("a\\b.safetensors"), OUTSIDE),
    "a name of 300": ("hf", index("x" * 300 + ".safetensors"), "missing weight files that model"),
    "a name that none has": ("hf", index("x\0.safetensors"), "missing weight files that model"),
    "thousands of files": (
        "hf",
        index(*(f"f{i}.safetensors" for i in range(3000))),
        r"f0\.safetensors, .* and 2,995 more$",
    ),
    "truncated": (
        "hf",
        content("model.safetensors", lambda found: found[: len(found) // 2]),
        INCOMPLETE,
    ),
    "garbled": ("hf", content("model.safetensors", lambda found: b"\xff" * 4000), INCOMPLETE),
    "empty": ("hf", content("model.safetensors", lambda found: b""), INCOMPLETE),
    "a flipped byte": (
        "export",
        content("model.safetensors", flip_down_projection),
        f"/model.safetensors: {re.escape(DOWN)} is damaged",
    ),
    "no weights": (
        "hf",
        lambda path: (path / "model.safetensors").unlink(),
        "no weights: looked for",
    ),
    "a scaling": (
        "hf",
        config(rope_scaling={"rope_type": "ntk", "factor": 2.0}),
        "/config.json: .*rope_type='ntk' is not supported",
    ),
    "a field": ("hf", config(clip_kv=3.0), "/config.json: .*unknown field 'clip_kv'"),
    "groups": (
        "hf",
        config(key_value_group_size=3),
        "/config.json: .*key_value_group_size=3 must divide the 4 layers",
    ),
    "a text": ("hf", config(vocab_size="many"), "/config.json: .*vocab_size"),
    "a garbled config": (
        "hf",
        content("config.json", lambda found: b"{"),
        "/config.json: not valid JSON",
    ),
    "thousands of missing tensors": (
        "hf",
        config(num_hidden_layers=900),
        "missing: (.*model.layers){5}.* and [0-9,]+ more$",
    ),
    "thousands of misshapen tensors": (
        "hf",
        config(intermediate_size=2**31 - 1),
        r"wrong shape: .*, expected \[.* and \d+ more$",
    ),
    "Orbax: a flipped byte": (
        "orbax",
        content("weights/lower.down", lambda found: flipped(found, len(found) // 2)),
        r"lower\.down (is damaged: its digest|cannot be read)",
    ),
    "Orbax: truncated": (
        "orbax",
        content("weights/upper.up", lambda found: found[:1000]),
        r"upper\.up cannot be read from weights/upper\.up",
    ),
    "Orbax: every difference": (
        "orbax",
        differ_in_the_manifest,
        r"^: missing: lower.gate; unexpected: lower.extra; wrong shape: final_norm "
        r"\[65\], expected \[64\]; dtype not .*: embed int8 .*; no weights for: upper.o$",
    ),
    "Orbax: another version": (
        "orbax",
        document("manifest.json", lambda found: found.update(version=2)),
        "version 2 is not supported; supported: 'swiftkv-jax' version 1",
    ),
    "Orbax: leaves that are none": (
        "orbax",
        document("manifest.json", lambda found: found.update(leaves={"embed": 3})),
        "malformed",
    ),
    "Orbax: a shape that is none": (
        "orbax",
        document("manifest.json", lambda found: found["leaves"]["embed"].update(shape=3)),
        "/manifest.json: malformed: every leaf needs a shape",
    ),
    "an end token below zero": (
        "hf",
        document("generation_config.json", lambda found: found.update(eos_token_id=-1)),
        "eos_token_id=-1 must be a token id",
    ),
    "an end token above all": (
        "hf",
        document("generation_config.json", lambda found: found.update(eos_token_id=[1, 2**40])),
        r"eos_token_id=\[1, 1099511627776\] must be a token id",
    ),
    "a tokenizer's settings": (
        "hf",
        tokenizer_config("{"),
        r": the tokenizer cannot be loaded \(tokenizer_config.json: not valid JSON",
    ),
    "a tokenizer's list": (
        "hf",
        tokenizer_config("[]"),
        r"\(tokenizer_config.json: expected a JSON object, found list\)",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_one_line(sound, tmp_path, name):
    kind, damage, message = DAMAGE[name]
    path = Path(shutil.copytree(sound / kind, tmp_path / "model"))
    damage(path)
    with pytest.raises(CheckpointError) as error:
        skv.load(path)
    text = str(error.value)
    assert text.startswith(str(path)) and "\n" not in text and len(text) < 1000
    assert re.search(message, text.removeprefix(str(path))), text
    assert isinstance(error.value, ConfigError) == ("/config.json" in message)


def test_a_flipped_byte_is_found_by_readers_of_a_part(sound, tmp_path):
    path = Path(shutil.copytree(sound / "export", tmp_path / "model"))
    content("model.safetensors", flip_down_projection)(path)
    with pytest.raises(CheckpointError, match=f"{re.escape(DOWN)} is damaged"):
        skv.load(path, mesh=skv.make_mesh((1, 4)))


def test_host_memory_that_is_not_there(monkeypatch):
    """A leaf for which the host has no room is named, with what it needs."""

    def empty(*args, **kwargs):
        raise MemoryError

    monkeypatch.setattr(np, "empty", empty)
    with pytest.raises(
        OutOfMemoryError, match=r"out of host memory: reading embed needs 0\.\d\d GiB"
    ):
        skv.load(UNTIED)
