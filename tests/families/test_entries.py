"""Every entry of `checkpoints/families` is complete: what it names exists, and tests and documents
know it."""

import dataclasses
import sys
from pathlib import Path

import pytest

import swiftkv_jax.checkpoints as checkpoints
from swiftkv_jax.checkpoints import families
from swiftkv_jax.checkpoints.auxiliary import read_auxiliary_files
from swiftkv_jax.checkpoints.families import ARCHITECTURES, FAMILIES, GROUPS
from swiftkv_jax.model.params import QKV, Block

from . import models
from .cases import CASES

ROOT = Path(__file__).parents[2]
SHARED = {"__init__", "fields", "layers", "gguf"}
"""Files of the folder that are no group."""
CASE = {CASES[case]["model_type"]: case for case in CASES}


def test_every_file_is_in_the_list():
    files = {path.stem for path in Path(families.__file__).parent.glob("*.py")} - SHARED
    listed = {group.__name__.rpartition(".")[2] for group in GROUPS}
    assert files == listed, "a file of checkpoints/families is not in GROUPS of its __init__.py"
    assert len(FAMILIES) == sum(len(group.FAMILIES) for group in GROUPS), "two of one name"
    assert len(ARCHITECTURES) == sum(len(group.ARCHITECTURES) for group in GROUPS)


@pytest.mark.parametrize("name", FAMILIES)
def test_entry(name):
    family = FAMILIES[name]
    case = CASE.get(name) or ("llama" if name == "llama" else None)
    assert case, f"tests/fixtures/families has no config.json of model_type {name!r}"
    if name != "llama":  # recorded with the authors' model
        recorded = models.FIXTURES / f"{case}.safetensors"
        assert recorded.is_file(), f"record {case} by tests/families/record.py"
    assert f"`{name}`" in (ROOT / "docs" / "models.md").read_text(), "no row in docs/models.md"
    params = {field.name for part in (Block, QKV) for field in dataclasses.fields(part)}
    joined = {field for fields in family.fused.values() for field in fields}
    assert {*family.names, *joined} <= params, "a name of no field of model/params.py"
    both = family.fields.keys() & family.neutral.keys()
    assert not both, f"both used and of one value: {both}"


@pytest.mark.parametrize("name", CASE)
def test_reading_a_config_passes_six_files(name, tmp_path):
    """The list of families, whose code runs when it is imported, is the sixth."""
    models.write(CASE[name], tmp_path / "hf")
    (folder,) = checkpoints.__path__
    passed = set()

    def note(frame, event, argument):
        file = frame.f_code.co_filename
        if file.startswith(folder):
            passed.add(Path(file).relative_to(folder).as_posix())

    sys.setprofile(note)
    try:
        read_auxiliary_files(tmp_path / "hf")
    finally:
        sys.setprofile(None)
    assert {"auxiliary.py", "hf_config.py"} < passed
    assert len(passed | {"families/__init__.py"}) <= 6, sorted(passed)
