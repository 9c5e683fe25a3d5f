"""Accuracy on benchmark tasks: EleutherAI's lm-evaluation-harness on this package's engine. See
`python -m swiftkv_jax.eval --help`."""
