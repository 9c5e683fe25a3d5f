"""Measurements, each one command that checks, times, prints a table and writes JSON into `benchmarks/results/`.

    python -m benchmarks.kernels     the attention ops: right, how fast, against other libraries and the device's limits
    python -m benchmarks.tune        the best block sizes for the device at hand, into `pallas_kernels/tuning.json`
    python -m benchmarks.boundary    what a fused kernel for the key/value projection could still save

All of them run on a CPU with `--shapes smoke`, to prove that they work; times mean something on a GPU or a TPU.
"""
