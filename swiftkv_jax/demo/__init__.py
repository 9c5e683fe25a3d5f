"""The embedded default model: a small Llama trained on the Python standard library's source, and
its SwiftKV student."""

from pathlib import Path

LLAMA = Path(__file__).parent / "llama"
"""The teacher, a plain Hugging Face Llama checkpoint."""
SWIFTKV = Path(__file__).parent / "swiftkv"
"""Teacher and delta. The index takes what both share from the teacher's file, so this folder cannot
be copied alone: `swiftkv_jax.save_hf` writes a whole one."""


def shares_a_file(path: Path) -> bool:
    """Say whether `path` is the student's folder, which needs its teacher's beside it."""
    return path.resolve() == SWIFTKV.resolve()
