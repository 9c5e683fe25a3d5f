"""How the package hangs together: who imports whom, what importing costs, where the files are."""

import ast
import functools
import graphlib
import importlib.metadata
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from swiftkv_jax.train.subcommands import SUBCOMMANDS
from tests.conftest import FUNCTION_MODULES
from tests.sources import FILES, PACKAGE, ROOT, nodes, tree

# From the bottom up: a room imports, at module level or not, only rooms of earlier rows. The same
# holds inside two of them.
FLOORS = [
    {"demo", "errors", "pallas_kernels"},
    {"model", "process", "text"},
    {"calibration", "kernel_check"},
    {"plan"},
    {"checkpoints"},
    {"cli"},
    {"convert"},
    {"infer", "train"},
    {"__main__", "api", "eval", "serve"},
    {"nnx"},
]
MODEL_FLOORS = [
    {"boundary_checks", "mesh_shape", "rope_config", "speculator_config"},
    {"mesh", "speculator"},
    {"attention", "config"},
    {"cut", "low_rank", "param_rows", "rope"},
    {"params"},
    {"batch", "initialization", "quantization"},
    {"stacks"},
    {"cache", "experts", "model", "sharding"},
    {"layers"},
    {"packed_attention"},
    {"decoder_layers"},
    {"boundary"},
    {"transformer"},
]
SERVER_FLOORS = [
    {"errors", "lora_modules", "options"},
    {"protocol"},
    {"http", "text", "distributed"},
    {"bodies", "service"},
    {"app"},
    {"api"},
    {"server"},
    {"processes", "arguments"},
    {"command"},
]
CORE = ["model", "pallas_kernels", "infer", "kernel_check"]
HEAVY = {"grain", "orbax", "transformers", "torch", "tensorflow"}


def module_name(path: Path) -> str:
    """`swiftkv_jax/train/run/step.py` -> `train.step`; a package is named like its folder."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@functools.cache
def imports(path: Path, *, module_level_only: bool = False) -> set[str]:
    """Dotted names a file imports; those of this package without its name, as in `module_name`."""
    found = set()
    package = (
        module_name(path).split(".")
        if path.name == "__init__.py"
        else module_name(path).split(".")[:-1]
    )
    for node in import_statements(tree(path), module_level_only=module_level_only):
        if isinstance(node, ast.Import):
            found |= {alias.name.removeprefix("swiftkv_jax.") for alias in node.names}
        else:
            base = [part for part in package if part]
            if node.level:
                base = base[: len(base) - (node.level - 1)]
                base += node.module.split(".") if node.module else []
            else:
                base = (node.module or "").removeprefix("swiftkv_jax.").split(".")
            found |= {".".join([*base, alias.name]) for alias in node.names}
    return found


def import_statements(
    node: ast.AST, *, module_level_only: bool
) -> Iterator[ast.Import | ast.ImportFrom]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and module_level_only:
            continue
        elif not isinstance(child, ast.expr):
            yield from import_statements(child, module_level_only=module_level_only)


def of_package(names: set[str], part: str) -> set[str]:
    """Those of `names` that are `part` or inside it."""
    return {name for name in names if name == part or name.startswith(f"{part}.")}


def files_of(part: str) -> list[Path]:
    return [path for path in FILES if of_package({module_name(path)}, part)]


def python(code: str, **environment: str) -> str:
    """Standard output of a fresh interpreter."""
    run = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_modules_whose_calls_are_type_checked_exist():
    """A name of no module would turn the checks of `tests/conftest.py` off without a word."""
    for name in FUNCTION_MODULES:
        path = ROOT / name.replace(".", "/")
        assert path.with_suffix(".py").exists() or path.is_dir(), name


def test_the_parser_of_imports():
    """The tests below hang on it."""
    names = "ATTENTION_OUTPUT PLAIN_SCORES AttentionOperands DecodePlan Implementation ScoreOptions"
    ours = {"pallas_kernels", *(f"pallas_kernels.{name}" for name in names.split())}
    assert of_package(imports(PACKAGE / "model/attention.py"), "pallas_kernels") == ours
    assert "model.config.Config" in imports(PACKAGE / "train/loss/distill.py")
    assert "pallas_kernels.xla" in imports(PACKAGE / "pallas_kernels" / "ops.py")
    assert "checkpoints" in imports(PACKAGE / "api.py")
    assert "checkpoints" not in imports(PACKAGE / "api.py", module_level_only=True)


def test_an_option_of_scores_stands_in_six_files():
    """Everything else hands on all of them as one value."""
    found = {module_name(path) for path in FILES if "score_cap" in path.read_text()}
    kernels = {
        f"pallas_kernels.{name}" for name in ("ops", "reference", "score_options", "selfcheck")
    }
    assert found == {"model.config", "checkpoints.families.gemma", *kernels}


def test_pallas_kernels_stand_alone():
    modules = {module_name(path).split(".")[0] for path in FILES} - {"", "pallas_kernels"}
    for path in files_of("pallas_kernels"):
        for module in modules:
            assert not of_package(imports(path), module), f"{path} imports {module}"


@pytest.mark.parametrize(
    ("package", "floors"),
    [("", FLOORS), ("model.", MODEL_FLOORS), ("serve.", SERVER_FLOORS)],
    ids=["all", "model", "serve"],
)
class TestFloors:
    def test_import_direction(self, package, floors):
        """A module imports only modules of earlier rows, so there is no circle."""
        below = set()
        for floor in floors:
            above = {f"{package}{name}" for row in floors for name in row} - below
            floor = {f"{package}{name}" for name in floor}
            for name in floor:
                for path in files_of(name):
                    others = above - {name}
                    found = {module for module in others if of_package(imports(path), module)}
                    assert not found, f"{path} imports {found}"
            below |= floor

    def test_every_module_is_on_a_floor(self, package, floors):
        names = {module_name(path) for path in FILES} - {""}
        inside = {name for name in names if name.startswith(package)}
        modules = {name.removeprefix(package).split(".")[0] for name in inside}
        assert sorted(modules) == sorted(name for floor in floors for name in floor)


def test_the_page_on_architecture_has_these_floors():
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = page.split("## Who may import whom")[1].split("\n## ")[0]

    def rooms(text: str) -> set[str]:
        named = re.findall(r"`([^`]+)`", text)
        return {name.removesuffix("/").removesuffix(".py") for name in named}

    rows = re.findall(r"^\| [^|]+ \| (`.*) \|$", section, re.MULTILINE)
    assert [rooms(row) for row in reversed(rows)] == FLOORS
    for room, floors in (("model", MODEL_FLOORS), ("serve", SERVER_FLOORS)):
        _, _, order = section.partition(f"Inside `{room}/`, from the bottom up:")
        assert [rooms(row) for row in order.partition(".\n")[0].split(";")] == floors


def test_no_file_imports_itself_through_others():
    """Imports for types only count too: what two files share lies below both."""
    files = {module_name(path): path for path in FILES}

    def file_of(name: str) -> str:
        return name if name in files else name.rpartition(".")[0] or name

    graph = {name: {file_of(found) for found in imports(path)} for name, path in files.items()}
    graphlib.TopologicalSorter(
        {name: below & files.keys() - {name} for name, below in graph.items()}
    ).prepare()


def test_three_modules_of_the_model_call_the_kernels():
    """Everything else runs through them, and so on any mesh; the check compares kernels."""
    for path in FILES:
        names = of_package(imports(path), "pallas_kernels") - {
            "pallas_kernels.Implementation",
            "pallas_kernels.IMPLEMENTATIONS",
            "pallas_kernels.ImplementationError",
        }
        assert (
            not names
            or module_name(path) in ("model.attention", "model.experts", "model.quantization")
            or path in files_of("pallas_kernels") + files_of("kernel_check")
        ), f"{path} imports {names}"


def test_train_and_infer_do_not_import_each_other():
    for part, other in (("train", "infer"), ("infer", "train")):
        assert files_of(part)
        for path in files_of(part):
            assert not of_package(imports(path), other), f"{path} imports {other}"


def test_the_engine_imports_no_jax():
    """Scheduling and bookkeeping are plain Python; the model runner is imported by
    `Engine.from_model`."""
    assert files_of("infer.engine")
    modules = [
        "swiftkv_jax.infer",
        *(f"swiftkv_jax.{module_name(path)}" for path in files_of("infer.engine")),
    ]
    code = f"import importlib, sys\nfor name in {modules}: importlib.import_module(name)\n"
    loaded = python(code + "print(*sorted(sys.modules))").split()
    assert "swiftkv_jax.infer.engine.engine" in loaded
    assert not {"jax", "flax", "swiftkv_jax.infer.runner"} & set(loaded)


COMMANDS = [
    "",
    "infer",
    "infer generate",
    "infer chat",
    "infer score",
    "infer bench",
    "infer bench serve",
    "serve",
    "train",
    *(f"train {name}" for name in SUBCOMMANDS),
    "convert",
    "convert inspect",
    "eval",
    "check-kernels",
]
"""Every command and subcommand."""
PARSE = """
import contextlib, io, sys
from swiftkv_jax.__main__ import main
for command in {commands}:
    wrong = ["--swiftkv", "x"] if command == "eval" else ["--no-such-flag"]
    for words in (["--help"], wrong):
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
            main([*command.split(), *words])
        assert words != ["--help"] or "usage:" in out.getvalue() or "commands" in out.getvalue()
print(*sorted({{name.partition(".")[0] for name in sys.modules}}))
"""


def test_flags_are_parsed_before_anything_heavy_is_imported():
    """Neither the help of a command nor a wrong flag waits for JAX."""
    loaded = set(python(PARSE.format(commands=COMMANDS)).split())
    assert "argparse" in loaded
    assert not {*HEAVY, "jax", "flax", "numpy", "scipy", "optax", "tqdm"} & loaded


def test_loading_a_model_imports_what_it_needs():
    """Neither scipy, nor calibration, nor training."""
    code = "import sys, swiftkv_jax as skv, swiftkv_jax.demo as demo\n"
    loaded = set(python(code + "skv.load(demo.SWIFTKV); print(*sys.modules)").split())
    assert "swiftkv_jax.checkpoints" in loaded
    assert not {"scipy", "swiftkv_jax.calibration", "swiftkv_jax.train", "grain"} & loaded


def test_core_has_no_heavy_imports_at_module_level():
    for name in CORE:
        assert files_of(name)
        for path in files_of(name):
            if path.name == "__main__.py":
                continue
            for heavy in HEAVY:
                assert not of_package(imports(path, module_level_only=True), heavy), (
                    f"{path} imports {heavy}"
                )


def test_core_is_light_and_nothing_touches_a_device():
    """In a fresh interpreter whose JAX platform does not exist: asking for a device at import time
    would raise. First the core, then the rest."""
    modules = [
        f"swiftkv_jax.{module_name(path)}".rstrip(".")
        for path in FILES
        if path.name != "__main__.py"
    ]
    core = [name for name in modules if name.split(".")[1:2] and name.split(".")[1] in CORE]
    code = f"""import importlib, sys
for name in {core}: importlib.import_module(name)
print(*sorted({{name.split(".")[0] for name in sys.modules}}))
for name in {modules}: importlib.import_module(name)
import jax
try: jax.devices()
except RuntimeError: print("no device")"""
    loaded, *rest = python(code, JAX_PLATFORMS="bogus").splitlines()
    assert "jax" in loaded.split()
    assert not HEAVY & set(loaded.split())
    assert rest == ["no device"]


def test_the_version_is_that_of_the_package():
    code = "import swiftkv_jax as skv; print(skv.__version__)"
    assert python(code).strip() == importlib.metadata.version("swiftkv-jax")
    assert not any("__version__ =" in path.read_text() for path in FILES)
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"version {version}." in (ROOT / "README.md").read_text()


def test_files_are_short():
    """400 lines of 100 columns, the columns being ruff's to check."""
    folders = (PACKAGE, ROOT / "tests", ROOT / "benchmarks", ROOT / "examples", ROOT / "docs")
    files = [path for folder in folders for path in folder.rglob("*.py")]
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert len(lengths) > 250
    assert {path: lines for path, lines in lengths.items() if lines > 400} == {}


def test_imports_inside_the_package_are_relative():
    """An absolute import would load a second copy under the top-level links."""
    roots = {"swiftkv_jax", "train", "infer", "pallas_kernels"}
    for path in FILES:
        if path.name == "__main__.py":
            continue
        for node in nodes(path):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            absolute = {name for name in names if name.split(".")[0] in roots}
            assert not absolute, f"{path} imports {absolute} absolutely"


@pytest.mark.skipif(not (ROOT / "infer").exists(), reason="packages carry no links")
def test_top_level_links():
    for name in ("pallas_kernels", "train", "infer"):
        assert os.readlink(ROOT / name) == f"swiftkv_jax/{name}"


def test_conditional_expressions_do_not_grow():
    """Each may be right; too many hide what a type or a default could say."""
    count = sum(isinstance(node, ast.IfExp) for path in FILES for node in nodes(path))
    lines = sum(path.read_text().count("\n") for path in FILES)
    assert 1000 * count / lines <= 12.3
