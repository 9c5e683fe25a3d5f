"""What `python -m swiftkv_jax.infer` runs, and what stands between people and the engine: flags,
text, files."""
