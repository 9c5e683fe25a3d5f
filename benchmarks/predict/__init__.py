"""A simulator of the engine's schedule: what `benchmarks.serve` would measure on a GPU, by the real
engine over a model of the device's time."""
