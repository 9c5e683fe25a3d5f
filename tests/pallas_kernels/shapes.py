"""One table of shapes for every implementation: small enough to interpret, otherwise as they come.

Heads are those of Llama-3.1-8B and 70B, as many as one of 4 devices has, or one of 8.
"""

from typing import NamedTuple


class Prefill(NamedTuple):
    batch: int
    queries: int  # T
    heads: int  # N
    kv_heads: int  # K
    keys: int  # S
    head_dim: int  # H
    offset: int | tuple[int, ...] = 0  # position of the first query, of all rows or of each
    lengths: tuple[int, ...] | None = None  # real queries of each row


class Chunks(NamedTuple):
    """Chunks of prompts whose keys and values lie in a pool of pages."""

    batch: int
    queries: int
    heads: int
    kv_heads: int
    keys: int  # positions of a row's pages
    head_dim: int
    offset: tuple[int, ...]
    lengths: tuple[int, ...]
    page: int  # positions of a page
    tables: tuple[int, ...]  # the row whose pages each row uses


class Context(NamedTuple):
    """Queries that see the first positions of a row only, and may stand past all of them."""

    batch: int
    queries: int
    heads: int
    kv_heads: int
    keys: int  # positions of a row, or of its pages
    head_dim: int
    offset: tuple[int, ...]
    lengths: tuple[int, ...] | None
    kv_lengths: tuple[int, ...]  # visible positions of each row
    page: int | None = None  # positions of a page of the pool; None is a cache row by row


class Decode(NamedTuple):
    batch: int
    queries: int
    heads: int
    kv_heads: int
    keys: int
    head_dim: int
    lengths: tuple[int, ...]  # valid positions of each row, the queries included; 0 is an idle row
    page: int | None = None  # positions of a page of the pool; None is a cache row by row


PREFILL = {
    "8B": Prefill(1, 70, 8, 2, 70, 128),
    "70B on one of 8 devices, chunk": Prefill(1, 66, 8, 1, 200, 128, 134),
    "one token": Prefill(1, 1, 4, 4, 1, 64),
    "square, several blocks": Prefill(2, 256, 2, 2, 256, 64),
    "4 queries a head, odd": Prefill(1, 133, 4, 1, 133, 80),
    "8 queries a head, odd": Prefill(1, 129, 8, 1, 129, 96),
    "one key/value head, wide": Prefill(2, 67, 4, 1, 67, 256),
    "chunk up to the end of the cache": Prefill(1, 9, 4, 4, 130, 256, 121),
    "chunk of one": Prefill(2, 1, 4, 1, 19, 128, 6),
    "first chunk of a long cache": Prefill(1, 64, 4, 2, 500, 64),
    "rows at different offsets": Prefill(3, 40, 2, 1, 300, 128, (0, 260, 100)),
    "ragged rows": Prefill(4, 140, 2, 1, 140, 64, 0, (140, 1, 0, 77)),
    "ragged rows at different offsets": Prefill(3, 70, 2, 1, 290, 96, (130, 0, 220), (70, 0, 33)),
}
CHUNKS = {
    "of one prompt": Chunks(3, 128, 2, 1, 384, 128, (0, 128, 256), (128, 128, 70), 128, (0, 0, 0)),
    "of two prompts, an idle row first": Chunks(
        4, 70, 4, 2, 384, 64, (5, 130, 60, 0), (0, 70, 70, 33), 128, (1, 1, 3, 3)
    ),
    "pages of 64, up to the last position": Chunks(
        3, 64, 2, 2, 320, 64, (280, 216, 0), (40, 64, 0), 64, (0, 0, 2)
    ),
    "pages of 256": Chunks(2, 40, 2, 1, 512, 96, (0, 300), (40, 40), 256, (0, 1)),
    "pages of 1536": Chunks(1, 20, 1, 1, 3072, 128, (2000,), (20,), 1536, (0,)),
    "more pages than are loaded at once": Chunks(
        2, 16, 2, 1, 1280, 64, (1100, 3), (16, 9), 128, (0, 1)
    ),
    "fewer positions than queries": Chunks(
        2, 150, 2, 1, 128, 128, (0, 28), (128, 100), 128, (0, 0)
    ),
    "pages of 7": Chunks(3, 300, 4, 2, 490, 24, (0, 188, 300), (300, 300, 9), 7, (0, 0, 2)),
    "pages of 16, in one block": Chunks(
        3, 33, 4, 4, 96, 64, (0, 33, 66), (33, 33, 1), 16, (0, 0, 0)
    ),
}
DECODE = {
    "8B": Decode(2, 1, 8, 2, 200, 128, (200, 77)),
    "70B": Decode(1, 1, 16, 2, 130, 128, (99,)),
    "long row, few slots": Decode(1, 1, 8, 1, 1100, 128, (1050,)),
    "one query a head": Decode(3, 1, 4, 4, 70, 64, (1, 70, 33)),
    "4 queries a head": Decode(2, 1, 8, 2, 137, 80, (137, 2)),
    "8 queries a head": Decode(3, 1, 8, 1, 119, 96, (5, 119, 1)),
    "wide": Decode(2, 1, 8, 4, 80, 256, (80, 31)),
    "idle rows": Decode(4, 1, 8, 2, 96, 64, (0, 96, 0, 12)),
    "several tokens": Decode(3, 4, 8, 2, 129, 128, (4, 129, 63)),
    "several tokens, one key/value head": Decode(1, 7, 4, 1, 145, 256, (131,)),
    "one long row, many short": Decode(7, 1, 8, 2, 1300, 128, (3, 1290, 70, 0, 129, 64, 256)),
    "more splits than are combined at once": Decode(2, 1, 4, 2, 1300, 256, (1300, 200)),
    "page table, most of it unused": Decode(3, 1, 4, 2, 4096, 64, (700, 0, 90), page=128),
    "page table": Decode(3, 1, 8, 2, 384, 128, (300, 1, 128), page=128),
    "page table, several tokens": Decode(2, 2, 4, 2, 512, 64, (512, 131), page=256),
}
SEGMENTS = {  # lengths of the documents of each row, in order; what is left is padding (id 0)
    "short documents": (Prefill(2, 140, 4, 2, 140, 64), ((30, 60, 20), (140,))),
    "8B, one block a document": (Prefill(1, 256, 8, 2, 256, 128), ((128, 64, 64),)),
    "documents across blocks": (Prefill(1, 333, 2, 1, 333, 96), ((100, 200),)),
    "wide": (Prefill(1, 90, 2, 1, 90, 256), ((17, 73),)),
    "odd head dim": (Prefill(1, 150, 2, 2, 150, 80), ((1, 1, 140),)),
}
