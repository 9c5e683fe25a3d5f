"""Eight emulated CPU devices, and array shapes checked at run time in the modules that hold only
functions."""

import gc
import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault(
    "PJRT_NPROC", "32"
)  # threads of XLA's CPU runtime: collectives between 8 devices need at least as many

import jax
from jaxtyping import install_import_hook

jax.config.update("jax_num_cpu_devices", 8)

# Not the modules that define pytree dataclasses: the hook would also check what a transformation
# puts into their fields.
FUNCTION_MODULES = [
    "swiftkv_jax.layers",
    "swiftkv_jax.attention",
    "swiftkv_jax.pallas_kernels",
]
install_import_hook(FUNCTION_MODULES, "beartype.beartype")

# Tracing makes many small objects that live; looking through all of them every time is a tenth of
# the tests' time.
gc.freeze()
gc.set_threshold(100_000, 20, 20)
