"""`python -m swiftkv_jax.convert`: exact both ways, in bounded memory, with one line for every
error."""

import dataclasses
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

import swiftkv_jax as skv
from swiftkv_jax import Config, Model, add_swiftkv, demo, load, save_hf
from swiftkv_jax.checkpoints import open_any
from swiftkv_jax.convert import main
from swiftkv_jax.model.params import llama_shapes
from tests import tiny
from tests.checkpoints.hf_models import TIED, UNTIED, tensors

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def orbax(tmp_path_factory) -> Path:
    """The tied model, read onto a mesh, with a tokenizer beside it."""
    jax.devices()  # `--mesh` would set their number
    folder = tmp_path_factory.mktemp("convert")
    source = Path(shutil.copytree(TIED, folder / "hf"))
    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(source / "tokenizer.json"))
    fields = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "[UNK]"}
    fields["eos_token"] = "[UNK]"  # not one that a config states
    (source / "tokenizer_config.json").write_text(json.dumps(fields))
    assert main(["hf2orbax", str(source), str(folder / "orbax"), "--mesh", "2x2"]) == 0
    return folder / "orbax"


def test_there_and_back_is_bit_exact(orbax, tmp_path, capsys):
    """The tokenizer travels along."""
    source = orbax.parent / "hf"
    assert main(["orbax2hf", str(orbax), str(tmp_path / "hf")]) == 0
    assert tensors(tmp_path / "hf") == tensors(source)
    for name in ("config.json", "tokenizer_config.json"):
        written, given = (json.loads((at / name).read_text()) for at in (tmp_path / "hf", source))
        assert written == given
    for path in (source, orbax, tmp_path / "hf"):
        model = load(path)
        assert model.tokenizer.encode("b a z") == [1, 0, 2] and model.eos_token_ids == (1, 2)
        assert (path / "tokenizer.json").read_bytes() == (source / "tokenizer.json").read_bytes()
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""
    (tmp_path / "hf" / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="the tokenizer cannot be loaded"):
        load(tmp_path / "hf")


@pytest.mark.long
@pytest.mark.parametrize("fixture, mesh", [(UNTIED, "1x1"), (TIED, "1x4")], ids=["untied", "1x4"])
def test_other_models_and_meshes(tmp_path, fixture, mesh):
    assert main(["hf2orbax", str(fixture), str(tmp_path / "orbax"), "--mesh", mesh]) == 0
    assert main(["orbax2hf", str(tmp_path / "orbax"), str(tmp_path / "hf")]) == 0
    assert tensors(tmp_path / "hf") == tensors(fixture)


@pytest.mark.long
def test_a_mesh_is_emulated_where_there_is_one_device(tmp_path):
    command = [sys.executable, "-m", "swiftkv_jax.convert", "hf2orbax", str(TIED)]
    command += [str(tmp_path / "orbax"), "--mesh", "1x2"]
    environment = {name: value for name, value in os.environ.items() if name != "PJRT_NPROC"}
    environment["JAX_PLATFORMS"] = "cpu"
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "orbax" / "manifest.json").is_file()


def test_the_files_own_dtype_is_kept_unless_told(tmp_path):
    plain = load(UNTIED, dtype="bfloat16")
    save_hf(plain, tmp_path / "bf16")
    assert main(["hf2orbax", str(tmp_path / "bf16"), str(tmp_path / "orbax")]) == 0
    assert main(["orbax2hf", str(tmp_path / "orbax"), str(tmp_path / "same")]) == 0
    assert tensors(tmp_path / "same") == tensors(tmp_path / "bf16")
    for source in ("orbax", "bf16"):
        out = tmp_path / f"wide-{source}"
        assert main(["orbax2hf", str(tmp_path / source), str(out), "--dtype", "float32"]) == 0
        wide = load_file(out / "model.safetensors")
        assert {t.dtype.name for t in wide.values()} == {"float32"}
        assert json.loads((out / "config.json").read_text())["torch_dtype"] == "float32"
        np.testing.assert_array_equal(wide["model.norm.weight"], np.float32(plain.llama.final_norm))


@pytest.mark.parametrize("format, count", [("full", 83), ("expanded", 87), ("delta", 9)])
def test_formats(orbax, tmp_path, format, count):
    assert main(["orbax2hf", str(orbax), str(tmp_path / "hf"), "--format", format]) == 0
    assert len(tensors(tmp_path / "hf")) == count


@pytest.mark.parametrize("kind", ["Hugging Face", "Orbax"])
def test_inspect(orbax, kind, capsys):
    path, digests, tokenizer, ends = {
        "Hugging Face": (TIED, "no", "no", "1"),
        "Orbax": (orbax, "yes", "yes", "1, 2"),
    }[kind]
    assert main(["inspect", str(path)]) == 0
    out = capsys.readouterr().out.replace("KV bytes per token", "KV_bytes")
    out = out.replace("end tokens", "end_tokens")
    facts = dict(line.split(maxsplit=1) for line in out.splitlines())
    size = sum(len(t[2]) for t in tensors(TIED).values())
    trained = 64 + 4 * 64 * 64 + 2 * 2 * 32 * 64
    expected = {
        "kind": kind,
        "digests": digests,
        "tokenizer": tokenizer,
        "end_tokens": ends,
        "num_key_value_layers": "4",
        "key_value_group_size": "2",
        "dtype": "float32",
        "parameters": f"{size // 4:,} = {size // 4 - trained:,} frozen + {trained:,} trained",
        "bytes": f"{size:,}",
        # 2 * 8 or 6 layers * 2 heads * 16 * 4 bytes
        "KV_bytes": "2,048 teacher, 1,536 student (75.0 %)",
    }
    assert {name: facts[name] for name in expected} == expected


def test_inspect_tells_prompts_from_answers(tmp_path, capsys):
    """Where a token that keeps its own upper keys and values takes more than one of a prompt."""
    model = skv.load(TIED)
    config = dataclasses.replace(model.config, generated_kv="own")
    skv.save_hf(dataclasses.replace(model, config=config), tmp_path / "own")
    assert main(["inspect", str(tmp_path / "own")]) == 0
    out = capsys.readouterr().out
    # 4 layers' own in pages of 6 layers: one more page
    assert "2,048 teacher, 1,536 student (75.0 %), 3,072 of an answer" in out


@pytest.mark.long
def test_a_calibrated_folder_is_expanded(tmp_path):
    """Without a detour through Orbax; the answers stay."""
    hf = tiny.hf_config()
    teacher = dataclasses.replace(tiny.model_of(hf, tiny.tensors_for(hf)), swiftkv=None)
    tokens = np.random.default_rng(0).integers(0, hf["vocab_size"], (64, 20))
    model = skv.calibrate(teacher, tokens, 2, 2).model
    skv.save_hf(model, tmp_path / "model")
    command = ["orbax2hf", str(tmp_path / "model"), str(tmp_path / "out"), "--format", "expanded"]
    assert main(command) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["model_type"], config["key_value_group_size"]) == ("llama_swiftkv", 1)
    np.testing.assert_allclose(
        skv.logits(load(tmp_path / "out"), tokens[:2]), skv.logits(model, tokens[:2]), atol=2e-5
    )


def test_the_demo_becomes_a_folder_that_needs_no_other(tmp_path):
    assert main(["orbax2hf", str(demo.SWIFTKV), str(tmp_path / "whole")]) == 0
    shutil.copytree(tmp_path / "whole", tmp_path / "elsewhere")
    copy, shipped = (open_any(path) for path in (tmp_path / "elsewhere", demo.SWIFTKV))
    assert (copy.config, copy.dtypes) == (shipped.config, shipped.dtypes)
    assert main(["orbax2hf", str(tmp_path / "whole"), str(tmp_path / "again")]) == 4


@pytest.mark.parametrize(
    "args, code, message",
    [
        (["hf2orbax", "NONE", "OUT"], 4, "NONE: no such file or directory"),
        (["orbax2hf", "HF", "OUT"], 4, "HF: a Hugging Face directory in this format already"),
        (
            ["orbax2hf", "HF", "OUT", "--dtype", "float32"],
            4,
            "HF: a Hugging Face directory in this",
        ),
        (["inspect", "EMPTY"], 4, "EMPTY: not a checkpoint"),
        (["hf2orbax", "HF", "HF"], 2, "HF: exists already"),
        (["hf2orbax", "HF", "OUT", "--mesh", "9x9"], 2, "--mesh 9x9 needs 81 devices"),
        (["hf2orbax", "HF", "OUT", "--mesh", "two"], 2, "expected DATAxMODEL"),
        (["hf2orbax", "BAD", "OUT"], 4, "BAD/model.safetensors: not a complete safetensors file"),
    ],
)
def test_errors_are_one_line_and_leave_nothing(tmp_path, capsys, args, code, message):
    shutil.copytree(TIED, tmp_path / "HF")
    shutil.copytree(TIED, tmp_path / "BAD")
    (tmp_path / "EMPTY").mkdir()
    with open(tmp_path / "BAD/model.safetensors", "r+b") as file:
        file.truncate(100_000)
    paths = [str(tmp_path / arg) if arg.isupper() else arg for arg in args]
    assert main(paths) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert (
        captured.err.startswith("error: ")
        and captured.err.count("\n") == 1
        and message in captured.err
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["BAD", "EMPTY", "HF"]


def test_usage_errors_of_the_command_line(capsys):
    for args in (
        [],
        ["hf2orbax", "a"],
        ["hf2orbax", "a", "b", "--dtype", "int8"],
        ["orbax2hf", "a", "b", "--format", "x"],
    ):
        with pytest.raises(SystemExit) as error:
            main(args)
        assert error.value.code == 2


def test_as_a_command(tmp_path):
    command = [sys.executable, "-W", "error", "-m", "swiftkv_jax.convert"]
    done = subprocess.run(
        [*command, "inspect", str(tmp_path / "none")], cwd=ROOT, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (
        4,
        "",
        f"error: {tmp_path / 'none'}: no such file or directory\n",
    )


@pytest.fixture
def small_files():
    """No file may grow beyond 20 kB, which fails as a full disk does."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    signal.signal(signal.SIGXFSZ, handler)


@pytest.mark.parametrize("command", ["hf2orbax", "orbax2hf"])
def test_a_full_disk_is_one_line_and_leaves_nothing(orbax, tmp_path, command, small_files, capfd):
    source = TIED if command == "hf2orbax" else orbax
    assert main([command, str(source), str(tmp_path / "out")]) == 1
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err == f"error: cannot write {tmp_path / 'out'}: file too large\n"
    assert list(tmp_path.iterdir()) == []


# Memory -----------------------------------------------------------------------

MEASURE = textwrap.dedent("""
    import json, re, sys, tempfile, time
    from pathlib import Path
    import jax, jax.numpy as jnp
    from orbax.checkpoint import v1 as ocp
    from swiftkv_jax import convert
    from swiftkv_jax.checkpoints.digest import digest

    def peak():  # not ru_maxrss: a child process inherits that of its parent
        status = Path("/proc/self/status").read_text()
        return 1024 * int(re.search(r"VmHWM:\\s*(\\d+) kB", status)[1])

    x = jnp.ones((256, 256))
    digest(x)
    with tempfile.TemporaryDirectory() as directory:
        ocp.save(directory + "/x", {"leaf": x})
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
        ocp.load(directory + "/x", {"leaf": shape})
    base, start = peak(), time.perf_counter()
    code = convert.main(sys.argv[1:])
    seconds = time.perf_counter() - start
    print(json.dumps({"code": code, "base": base, "peak": peak(), "seconds": seconds}))
""")


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_bounded_by_a_few_leaves(tmp_path):
    """400 MiB of float32 in leaves of at most 32 MiB: conversion may hold three of them, and 64 MiB
    of fixed costs."""
    config = Config(
        vocab_size=4096,
        embed_dim=1024,
        mlp_dim=2048,
        num_layers=8,
        num_heads=8,
        num_kv_heads=8,
        head_dim=128,
    )
    draw = np.random.default_rng(0).standard_normal  # quicker than JAX, compiled as for tests
    llama = jax.tree.map(lambda shape: jnp.asarray(draw(shape.shape, "f")), llama_shapes(config))
    model = add_swiftkv(Model(llama, None, config=config), 4)
    sizes = [leaf.nbytes for leaf in jax.tree.leaves(model)]
    assert sum(sizes) > 400 * 2**20 and max(sizes) == 32 * 2**20
    save_hf(model, tmp_path / "hf")
    del model
    steps = {"hf2orbax": ("hf", "orbax"), "orbax2hf": ("orbax", "back")}
    for command, (source, target) in steps.items():
        args = [sys.executable, "-c", MEASURE, command, str(tmp_path / source)]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [*args, str(tmp_path / target)], env=environment, capture_output=True, text=True
        )
        measured = json.loads(done.stdout)
        extra = measured["peak"] - measured["base"]
        print(
            f"{command}: {extra / 2**20:.0f} MiB above the base of "
            f"{measured['base'] / 2**20:.0f}, {measured['seconds']:.1f} s"
        )
        assert measured["code"] == 0 and measured["base"] < sum(sizes)
        assert max(sizes) < extra <= 3 * max(sizes) + 64 * 2**20
    assert (tmp_path / "hf/model.safetensors").read_bytes() == (
        tmp_path / "back/model.safetensors"
    ).read_bytes()
