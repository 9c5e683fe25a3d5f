"""`.github/release.py`: what PyPI and a release show has addresses of the repository."""

import importlib.util
import re
import shutil
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
WRITTEN = ("README.md", "CHANGELOG.md", "pyproject.toml")
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
REPOSITORY = "https://github.com/someone/fork"
PAGES = f"{REPOSITORY}/blob/v{VERSION}"


@pytest.fixture
def prepare(tmp_path):
    """`prepare` for a folder like the repository, whose changes are dated."""
    for path in ROOT.iterdir():
        if path.name in WRITTEN:
            shutil.copy(path, tmp_path)
        else:
            (tmp_path / path.name).symlink_to(path)
    changes = tmp_path / "CHANGELOG.md"
    changes.write_text(re.sub(rf"(## {VERSION}) \(.*\)", r"\1 (2027-01-31)", changes.read_text()))
    spec = importlib.util.spec_from_file_location("release", ROOT / ".github" / "release.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda: module.prepare(tmp_path, REPOSITORY, f"v{VERSION}")


def test_every_link_has_an_address(prepare, tmp_path):
    prepare()
    before, readme = ((root / "README.md").read_text() for root in (ROOT, tmp_path))
    notes = (tmp_path / "notes.md").read_text()
    for target in re.findall(r"\]\(([^)\s]+)\)", readme + notes):
        assert re.match(r"#|https://", target), target
    assert f"![Prefill of Llama-3.1-8B on one H100]({REPOSITORY}/raw/v{VERSION}/docs/img/" in readme
    assert f"]({PAGES}/docs/server.md#adapters)" in readme and "](#what-it-costs" in readme
    address = rf"{REPOSITORY}/(raw|blob)/v{VERSION}/"
    assert "From a clone" not in readme and "'.[" not in readme
    said = re.sub(address, "", readme).replace("'swiftkv-jax[", "'.[")
    before = before.replace("From a clone, on Linux", "On Linux")
    assert said == before.replace("All set up a pinned", "These need a clone, and set up a pinned")
    words = re.sub(address, "", notes).split()
    assert words and "##" not in words and "\n  " not in notes
    assert " ".join(words) in " ".join((ROOT / "CHANGELOG.md").read_text().split())


def test_the_project_has_addresses(prepare, tmp_path):
    prepare()
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    assert project.pop("urls") == {
        "Homepage": REPOSITORY,
        "Source": REPOSITORY,
        "Issues": f"{REPOSITORY}/issues",
        "Documentation": "https://someone.github.io/fork/",
        "Changelog": f"{PAGES}/CHANGELOG.md",
        "Paper": "https://arxiv.org/abs/2410.03960",
    }


def test_what_is_published_is_prepared_first():
    workflow = (ROOT / ".github" / "workflows" / "release.yml").read_text()
    jobs = re.split(r"^  (\w+):$", workflow, flags=re.MULTILINE)
    for job, builds in (("build", "make test-wheel"), ("images", "docker/build-push-action")):
        steps = jobs[jobs.index(job) + 1]
        assert 0 < steps.find("release.py") < steps.index(builds), job


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        ("README.md", ("docs/server.md)", "docs/serve.md)"), "docs/serve.md is linked and does"),
        ("README.md", ("From a clone, ", ""), "README.md does not say 'From a clone, on Linux'"),
        ("CHANGELOG.md", (" (2027-01-31)", " (not yet released)"), "has no section '## "),
        ("pyproject.toml", (f'"{VERSION}"', '"9.9.9"'), "the version in pyproject.toml 9.9.9"),
    ],
)
def test_what_is_not_ready_is_refused(prepare, tmp_path, file, change, message):
    path = tmp_path / file
    path.write_text(path.read_text().replace(*change))
    with pytest.raises(SystemExit, match=re.escape(message)):
        prepare()
