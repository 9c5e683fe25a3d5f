"""The commands of `python -m swiftkv_jax.infer`: flags, prompts, rows of input and output."""
