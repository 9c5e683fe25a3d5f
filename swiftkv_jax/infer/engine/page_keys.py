"""The keys that pages are found by: digests of all the tokens up to their ends."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


def page_keys(
    tokens: Sequence[int],
    page_size: int,
    cache_salt: str = "",
    after: Sequence[bytes] = (),
    prompt_digest: bytes = b"",
) -> list[bytes]:
    """The keys of the pages `after` which `tokens` follow, and of each full page of `tokens`.
    `prompt_digest` is that of the request's adapter (`Adapters.prompt_digest`)."""
    keys = list(after)
    content = np.asarray(tokens, np.int32).tobytes()
    key = keys[-1] if keys else _digest(cache_salt.encode(), prompt_digest)
    size = 4 * page_size
    for start in range(0, len(content) - size + 1, size):
        key = _digest(key + content[start : start + size])
        keys.append(key)
    return keys


def _digest(content: bytes, key: bytes = b"") -> bytes:
    return hashlib.blake2b(content, digest_size=32, key=key).digest()
