"""Write each case of `cases` as `save_hf` does, to FOLDER/CASE/out, for `check_exports`:

python -m tests.families.write_exports FOLDER
"""

import sys
from pathlib import Path

import swiftkv_jax as skv

from . import models
from .cases import CASES

if __name__ == "__main__":
    for case in CASES:
        folder = Path(sys.argv[1]) / case
        skv.save_hf(skv.load(models.write(case, folder / "in"), dtype="float32"), folder / "out")
