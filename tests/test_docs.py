"""The documentation says what is true: its code runs, its links and commands exist, its figures
are the measured ones."""

import ast
import contextlib
import importlib.util
import io
import re
import shlex
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

import swiftkv_jax as skv
from benchmarks import measurements
from benchmarks.markdown import anchor
from docs import site
from swiftkv_jax import demo
from swiftkv_jax.__main__ import main
from swiftkv_jax.train.subcommands import SUBCOMMANDS
from tests import tiny

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
INDEX = ROOT / "docs" / "README.md"
PYTHON = ROOT / "docs" / "python.md"
PAGES = [
    README,
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "SECURITY.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
DEPLOYMENT = ROOT / "examples" / "deploy" / "README.md"
OTHERS = [DEPLOYMENT, *sorted((ROOT / "examples" / "notebooks").glob("*.ipynb"))]
"""Pages of the site, and notebooks that it links, beside the documentation."""
EXAMPLES = ("generate", "engine", "score")
REAL_MODEL = "Llama-3.1-8B-Instruct"


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def blocks(path: Path, language: str) -> list[str]:
    """The fenced blocks of a page in one language; "" is none."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", text_of(path), re.DOTALL | re.MULTILINE)
    return [block for marked, block in found if marked == language]


def commands(path: Path) -> list[list[str]]:
    """Lines of unmarked blocks that start a command of this repository, without their comments."""
    found = []
    for block in blocks(path, ""):
        for line in block.replace("\\\n", "").splitlines():
            line = re.sub(r"^PYTHONPATH=\S+ ", "", line)
            if re.match(r"swiftkv |python -m ", line):
                found.append(shlex.split(line, comments=True))
    return found


def run(code: str) -> str:
    """What a program prints. It runs in this process, which has compiled some of its programs."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "<printed code>", "exec"), {"__name__": "__main__"})
    return printed.getvalue()


# What is printed runs ----------------------------------------------------------


@pytest.fixture(scope="module")
def model_folder(tokenizer, tmp_path_factory) -> Path:
    """A model of two layers, whose programs compile in a fraction of the demo model's time."""
    sizes = {"vocab_size": 320, "num_hidden_layers": 2, "num_key_value_layers": 1}
    hf = tiny.hf_config(**sizes, max_position_embeddings=1024)
    path = tmp_path_factory.mktemp("checkpoint") / "model"
    skv.save_hf(tiny.model_of(hf, tiny.tensors_for(hf)), path)
    tokenizer.save_pretrained(path)
    return path


def test_the_python_of_the_readme_runs(tmp_path, monkeypatch):
    """With what the page on Python does with an engine, in one namespace, as printed."""
    monkeypatch.chdir(tmp_path)
    of_engine = next(code for code in blocks(PYTHON, "python") if "Engine.from_model" in code)
    code = "\n".join([*blocks(README, "python"), of_engine])
    assert "skv.generate" in code and "engine.run" in code
    output = run(code.replace(f'"{REAL_MODEL}"', repr(str(demo.LLAMA))))
    assert "length" in output or "stop" in output


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_of_the_pages_is_python(page):
    for code in blocks(page, "python"):
        ast.parse(code)


@pytest.mark.long
def test_the_python_of_the_page_on_serving_runs(model_folder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    load = f"import swiftkv_jax as skv\nmodel = skv.load({str(model_folder)!r})\n"
    code = load + "\n".join(blocks(ROOT / "docs" / "serving.md", "python"))
    assert run(code).count("length") >= 2


def test_the_python_of_the_page_on_checkpoints_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (code,) = blocks(ROOT / "docs" / "checkpoints.md", "python")
    code = code.replace(f'"{REAL_MODEL}"', repr(str(demo.LLAMA)))
    code = code.replace("num_key_value_layers=16", "num_key_value_layers=4")
    run("import swiftkv_jax as skv\n" + code)
    assert (tmp_path / "hf" / "config.json").exists() and (tmp_path / "orbax").is_dir()


def test_the_first_command_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    line = next(words for words in commands(README) if words[:2] == ["swiftkv", "infer"])
    assert line[2:] == ["-p", "def read_lines(path):"]
    assert main([*line[1:], "--compile-cache", "none"]) == 0
    assert capsys.readouterr().out.strip()


@pytest.mark.long
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_run(name, model_folder, monkeypatch):
    monkeypatch.setattr(sys, "argv", [name, str(model_folder)])
    assert run(text_of(ROOT / "examples" / f"{name}.py")).strip()


# What is named exists ----------------------------------------------------------


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=lambda page: page.name)
def test_relative_links_lead_somewhere(page):
    """Images too, of which the build of the site says nothing."""
    for target in re.findall(r"""(?:\]\(|src=["'])([^)\s"']+)""", text_of(page)):
        if re.match(r"https?:", target):
            continue
        file, _, fragment = target.partition("#")
        path = (page.parent / file).resolve() if file else page
        assert path.exists(), f"{page.name}: {target}"
        if fragment:
            headings = re.findall(r"^#+ (.*)$", text_of(path), re.MULTILINE)
            assert fragment in map(anchor, headings), f"{page.name}: {target}"


def linked_from(page: Path) -> set[Path]:
    """The pages that a page links to."""
    targets = re.findall(r"\]\(([^)\s#]+\.md)(?:#[^)]*)?\)", text_of(page))
    return {(page.parent / target).resolve() for target in targets if "://" not in target}


def test_the_index_links_every_page():
    assert set(PAGES) - {INDEX} <= linked_from(INDEX)


def test_every_page_is_reached_from_the_readme():
    reached, waiting = set(), [README]
    while waiting:
        page = waiting.pop()
        if page in PAGES and page not in reached:
            reached.add(page)
            waiting += linked_from(page)
    assert reached == set(PAGES)


def test_the_navigation_of_the_site_has_every_page_once():
    pages = re.findall(r"^ +- [^:]+: (\S+\.md)$", text_of(ROOT / "mkdocs.yml"), re.MULTILINE)
    found = sorted((ROOT / page).resolve() for page in pages)
    assert found == sorted([*PAGES, DEPLOYMENT])


def test_the_site_has_what_its_pages_link(tmp_path):
    """What it does not publish is linked in the repository."""
    site.copy(tmp_path, "https://example.org/tree")
    files = set()
    for page in tmp_path.rglob("*.md"):
        for target in re.findall(r"""(?:\]\(|src=["'])([^)\s"'#]+)""", page.read_text("utf-8")):
            if "://" not in target:
                assert (page.parent / target).is_file(), f"{page.name}: {target}"
            elif target.startswith("https://example.org/tree/"):
                files.add(target.removeprefix("https://example.org/tree/"))
    assert files >= {"CITATION.cff", "examples/notebooks/serve_and_chat.ipynb"}
    assert all((ROOT / file).is_file() and not (tmp_path / file).exists() for file in files)


def test_every_page_begins_with_its_contents():
    for page in sorted((ROOT / "docs").glob("*.md")):
        links = text_of(page).split("\n\n")[1]
        headings = re.findall(r"^## (.*)$", text_of(page), re.MULTILINE)
        assert re.findall(r"\(#([^)]+)\)", links) == [*map(anchor, headings)], page.name


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_modules_that_are_named_exist(page):
    """`python -m a.{b,c}` in blocks and in sentences."""
    for name in re.findall(r"python -m ([\w.{},]+\w|[\w.]+\{[\w.,]+\})", text_of(page)):
        head, brace, rest = name.partition("{")
        names = [head + tail for tail in rest.rstrip("}").split(",")] if brace else [head]
        for name in names:
            assert importlib.util.find_spec(name), f"{page.name}: python -m {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_that_are_named_exist(page):
    """Every flag of a command in a block is one that the command's --help prints."""
    for words in commands(page):
        command = command_of(words)
        flags = {word for word in words[len(command) :] if re.match(r"--?[a-z]", word)}
        if not flags:
            continue
        help = help_of(tuple(command))
        missing = {flag for flag in flags if not re.search(rf"(?<![\w-]){flag}(?![\w-])", help)}
        assert not missing, f"{page.name}: {shlex.join(words)}: {missing}"


def command_of(words: list[str]) -> list[str]:
    """The first words: those that name the command."""
    start = 3 if words[0] == "python" else 2
    found = words[:start]
    subcommands = {"chat", "serve", "score", "bench", "hf2orbax", "orbax2hf", "inspect"}
    subcommands |= SUBCOMMANDS.keys()
    while len(words) > len(found) and words[len(found)] in subcommands:
        found.append(words[len(found)])
    if found == ["swiftkv", "infer"]:
        found.append("generate")
    return found


@cache
def help_of(command: tuple[str, ...]) -> str:
    """What `--help` prints."""
    if command[0] == "python":
        module, arguments = command[2], command[3:]
    else:
        module, arguments = "swiftkv_jax", command[1:]
    spec = importlib.util.find_spec(module)
    if spec is not None and spec.submodule_search_locations:  # a package
        module += ".__main__"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.raises(SystemExit):
        importlib.import_module(module).main([*arguments, "--help"])
    return printed.getvalue()


def strings(path: Path) -> list[str]:
    """The strings of a module, with … for what is filled in when it runs."""
    found = []
    for node in ast.walk(ast.parse(text_of(path))):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
            found.append("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(re.sub("%[sd]", "…", node.value))
    return found


def test_messages_that_are_quoted_are_said():
    page = text_of(ROOT / "docs" / "errors.md")
    _, _, table = page.partition("| message |")
    messages = re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)[1:]
    assert len(messages) >= 8
    said = [text for path in (ROOT / "swiftkv_jax").rglob("*.py") for text in strings(path)]
    missing = [quoted for quoted in messages if not any(quoted in text for text in said)]
    assert not missing, missing


def test_make_targets_that_are_named_exist():
    targets = set(re.findall(r"^([\w.$()/-]+):", text_of(ROOT / "Makefile"), re.MULTILINE))
    for page in PAGES:
        named = re.findall(r"(?:^|`)make ([a-z][\w-]*)", text_of(page), re.MULTILINE)
        assert set(named) <= targets, page.name


def test_the_tree_of_packages_is_complete():
    """Every package and every module of the top level is named, and what is named exists."""
    (tree,) = blocks(ROOT / "docs" / "architecture.md", "")
    folders, named = [], set()
    for line in tree.splitlines():
        depth, name = (len(line) - len(line.lstrip())) // 2, line.split()[0]
        folders[depth:] = [name]
        named.add("".join(folders[:depth]) + name)
    package = ROOT / "swiftkv_jax"
    found = {str(path.relative_to(ROOT)) for path in package.glob("*.py")}
    found |= {f"{path.parent.relative_to(ROOT)}/" for path in package.rglob("__init__.py")}
    gone = {path for path in named if not (ROOT / path).exists()}
    assert not found - named and not gone, f"missing {sorted(found - named)}, gone {sorted(gone)}"


def test_what_the_page_on_architecture_says_where_to_look_for_is_there():
    """`file.py`: `name`, a class, a function, or a field of a class."""
    section = text_of(ROOT / "docs/architecture.md").split("## Where to look")[1].split("\n## ")[0]
    named = re.findall(r"`([\w/]+\.py)`:((?: `[\w.]+`[^|`]*)+)", section)
    assert len(named) > 15
    for file, names in named:
        code = text_of(ROOT / "swiftkv_jax" / file)
        for name in re.findall(r"`(?:\w+\.)?(\w+)`", names):
            assert re.search(rf"(?:def |class |self\.|^){name}\b", code, re.MULTILINE), (file, name)


def test_every_module_begins_with_its_purpose():
    """The page on architecture sends readers to these docstrings."""
    for path in (ROOT / "swiftkv_jax").rglob("*.py"):
        assert not text_of(path) or ast.get_docstring(ast.parse(text_of(path))), path


# Figures -----------------------------------------------------------------------


def test_the_page_of_measurements_is_up_to_date(capsys):
    assert measurements.main(["--check"]) == 0, capsys.readouterr().err


def test_a_page_out_of_date_is_noticed(tmp_path, monkeypatch, capsys):
    right = text_of(measurements.PAGE)
    page = tmp_path / "measurements.md"
    page.write_text(right.replace("swiftkv, floor |", "swiftkv, floor | 1.00 s |"))
    monkeypatch.setattr(measurements, "PAGE", page)
    assert measurements.main(["--check"]) == 1
    assert "measurements.md is out of date" in capsys.readouterr().err
    assert measurements.main([]) == 0 and page.read_text() == right
    page.write_text(right.replace("## Students of real models", "## Students"))
    with pytest.raises(ValueError, match="lacks the section '## Students of real models'"):
        measurements.main(["--check"])


def test_the_page_of_measurements_is_short():
    """Words are what holds a letter or a digit."""
    words = [word for word in text_of(measurements.PAGE).split() if re.search(r"\w", word)]
    assert len(words) <= 4_000


@cache
def pictures() -> dict[str, tuple[Callable[[Path], None], str]]:
    """Name -> what draws it, and the ending of its file."""
    program = ROOT / "docs" / "img" / "make_pictures.py"
    spec = importlib.util.spec_from_file_location("make_pictures", program)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.PICTURES


@pytest.mark.parametrize("name", ["swiftkv", "stacks", "pages", "engine-step", "prefill"])
def test_drawings_are_those_of_the_program(name, tmp_path):
    draw, ending = pictures()[name]
    draw(tmp_path / "drawn")
    committed = ROOT / "docs" / "img" / f"{name}.{ending}"
    assert (tmp_path / "drawn").read_text() == committed.read_text()


@pytest.mark.parametrize("name", ["analysis", "analysis-t2", "run"])
def test_plots_can_be_drawn_again(name, tmp_path):
    pytest.importorskip("matplotlib")
    draw, ending = pictures()[name]
    draw(tmp_path / f"drawn.{ending}")
    assert (tmp_path / f"drawn.{ending}").stat().st_size > 10_000


# Length ------------------------------------------------------------------------


def test_the_readme_is_short():
    assert len(text_of(README).splitlines()) <= 110
    assert len(text_of(README).encode()) <= 9_000


def test_the_example_of_a_family_is_the_code():
    """The blocks of "Adding a family", as they stand in the sources."""
    text = (ROOT / "docs" / "models.md").read_text().split("## Adding a family")[1]
    source = (ROOT / "swiftkv_jax" / "checkpoints" / "families" / "llama.py").read_text()
    code = "\n".join(line.strip() for line in source.splitlines())
    blocks = re.findall(r"^```\w+\n(.*?)^```", text.split("\n## ")[0], re.DOTALL | re.MULTILINE)
    assert len(blocks) == 3
    for block in blocks:
        assert "\n".join(line.strip() for line in block.splitlines()) in code
