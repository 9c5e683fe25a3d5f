"""Benchmarks of the attention ops: their errors, their speed, and the tuning of their kernels."""
