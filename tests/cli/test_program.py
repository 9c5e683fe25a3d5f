"""`swiftkv`: the commands behind one name, and how quickly it starts."""

import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

import swiftkv_jax
from swiftkv_jax import cli, infer
from swiftkv_jax.__main__ import COMMANDS, main, program

ROOT = Path(__file__).parents[2]


def test_help_lists_the_commands(capsys):
    for flag in ("--help", "-h"):
        assert main([flag]) == cli.OK
        out = capsys.readouterr().out
        assert all(f"{name} " in out and purpose in out for name, (_, purpose) in COMMANDS.items())


def test_the_version(capsys):
    assert main(["--version"]) == cli.OK
    assert capsys.readouterr().out == f"swiftkv-jax {swiftkv_jax.__version__}\n"


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (
            ["serfe"],
            "'serfe' is not a command: "
            "choose from infer, serve, train, convert, eval, check-kernels: did you mean serve?",
        ),
        ([], "a command is missing: choose from infer, serve, train, convert, eval, check-kernels"),
    ],
)
def test_without_a_command_they_are_listed(argv, line, capsys):
    assert main(argv) == cli.USAGE
    assert capsys.readouterr().err == f"error: {line}\n"


def test_a_command_gets_its_arguments(capsys):
    assert main(["infer", "--max-num-seqs", "0"]) == cli.USAGE
    assert "max-num-seqs" in capsys.readouterr().err
    assert main(["serve", "--port", "99999"]) == cli.USAGE
    assert "--port 99999" in capsys.readouterr().err
    with pytest.raises(SystemExit) as exit:
        main(["convert", "inspect"])
    assert exit.value.code == 2


@pytest.mark.parametrize(
    ("name", "command", "called"),
    [
        ("swiftkv", "infer score", "swiftkv infer score"),
        ("x", "infer score", "python -m swiftkv_jax.infer score"),
        ("swiftkv", "serve", "swiftkv serve"),
    ],
)
def test_help_names_the_program_as_it_was_called(name, command, called, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", [f"/usr/bin/{name}"])
    with pytest.raises(SystemExit):
        main([*command.split(), "--help"])
    printed = capsys.readouterr().out
    assert printed.startswith(f"usage: {called}") and f"\n`{called}`: " in printed


def test_the_console_script_is_this(monkeypatch):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (name, value), *others = project["project"]["scripts"].items()
    assert name == "swiftkv" and not others
    assert EntryPoint(name, value, "console_scripts").load() is program
    assert project["tool"]["setuptools"]["package-data"]["swiftkv_jax"] == ["py.typed"]
    assert (ROOT / "swiftkv_jax" / "py.typed").is_file()


def test_a_module_is_the_same_program():
    run = subprocess.run(
        [sys.executable, "-m", "swiftkv_jax", "convert", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0 and run.stdout.startswith("usage: python -m swiftkv_jax convert")


def test_packages_of_commands_import_quickly():
    """What runs before the handler of SIGINT is there: no JAX, nothing that takes long."""
    names = ["swiftkv_jax", "swiftkv_jax.infer", "swiftkv_jax.train", "swiftkv_jax.eval"]
    code = f"import sys, {', '.join(names)}, swiftkv_jax.process.interrupts, swiftkv_jax.cli\n"
    code += "print(*sorted({name.partition('.')[0] for name in sys.modules}))"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not {"jax", "jaxlib", "numpy", "transformers", "flax"} & set(run.stdout.split())


@pytest.mark.parametrize("package", [swiftkv_jax, infer], ids=lambda package: package.__name__)
def test_public_names_are_loaded_when_they_are_used(package):
    assert set(package.__all__) <= set(dir(package))
    assert set(package.__all__) == set(package._MODULES)
    for name in package.__all__:
        assert getattr(package, name).__name__ == name
    with pytest.raises(AttributeError, match="has no attribute 'serfe'"):
        _ = package.serfe
