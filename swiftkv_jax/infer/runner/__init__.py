"""The device side of the engine: weights, cache, compiled programs."""
