"""Predictions of what `benchmarks.kernels` and `benchmarks.serve` measure on a GPU: time by count
of bytes, products and launches."""
