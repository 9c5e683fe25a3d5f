"""Two processes on this machine, one device each: together they calibrate the delta that one of
them fits alone."""

from pathlib import Path

import numpy as np
import pytest

from tests.calibration.test_meshes import fit, numbers
from tests.two_processes import run_together

MESHES = {1: "2x1", 2: "1x2"}
"""Mesh for each size of a group: rows, or heads, of different processes."""
SECONDS = 120
"""In which the pair has ended, also on a busy machine, or is killed."""

WORK = """
    import numpy as np
    from tests.calibration.test_meshes import fit, numbers
    from tests.calibration.test_processes import MESHES

    index, out = sys.argv[2:]
    for group, mesh in MESHES.items():
        np.savez(f"{out}/{group}-{index}", **numbers(fit(group, 0, mesh)))
"""


@pytest.fixture(scope="module")
def together(tmp_path_factory) -> Path:
    """Where each process has written what it found, of each group size."""
    out = tmp_path_factory.mktemp("together")
    run_together(WORK, str(out), folder=out, seconds=SECONDS)
    return out


@pytest.mark.long
@pytest.mark.parametrize("group", MESHES)
def test_two_processes_calibrate_like_one(group, together):
    """Each has the whole delta, the pairing of heads where layers share, and the figures of every
    layer."""
    expected = numbers(fit(group, 0, None))
    for index in (0, 1):
        with np.load(together / f"{group}-{index}.npz") as file:
            found = dict(file)
        assert found.keys() == expected.keys()
        for name, array in expected.items():
            atol = 1e-5 * np.abs(array).max(initial=0)
            np.testing.assert_allclose(found[name], array, rtol=0, atol=atol, err_msg=name)
