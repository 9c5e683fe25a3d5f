"""Compilers for machines that are not here. Needs the wheels of `make test-compile` on the path."""

import os
import tempfile

from swiftkv_jax.plan.topology import ENVIRONMENT

DUMP = tempfile.mkdtemp(prefix="mosaic-")
"""Where Mosaic leaves the PTX of each kernel it compiles, and ptxas its figures."""

os.environ.update(
    ENVIRONMENT, MOSAIC_GPU_DUMP_PTX="1", MOSAIC_GPU_DUMP_PTXAS="1", MOSAIC_GPU_DUMP_TO=DUMP
)
