"""One table of calls of the two attention ops: small enough to interpret, otherwise as they come.

Heads are those of Llama-3.1-8B and 70B, as many as one of 4 devices has, or one of 8. Edges of
windows, of visible keys and of documents lie before, at and after those of blocks, tiles and pages.
"""

import dataclasses
from collections.abc import Collection
from typing import Any

import jax.numpy as jnp

from swiftkv_jax.pallas_kernels import choice, hopper, tpu
from swiftkv_jax.pallas_kernels.selfcheck import Case, Row
from tests.pallas_kernels.interpreted import device

WHOLE = (Row(),)


def rows_at(*positions: int) -> tuple[Row, ...]:
    return tuple(map(Row, positions))


def decoding(
    queries: int,
    lengths: tuple[int, ...],
    heads: int,
    kv_heads: int,
    keys: int,
    head_dim: int,
    **options: Any,
) -> Case:
    """Rows of `lengths` valid positions, the queries included."""
    rows = rows_at(*(length - queries for length in lengths))
    return Case("decode", rows, queries, heads, kv_heads, keys, head_dim, **options)


PREFILL = {
    "whole rows": Case("prefill", WHOLE, 70, 8, 2, 70, 128),
    "one token": Case("prefill", WHOLE, 1, 4, 4, 1, 64),
    "several blocks": Case("prefill", WHOLE * 2, 256, 2, 2, 256, 64),
    "4 queries a head, odd": Case("prefill", WHOLE, 133, 4, 1, 133, 80),
    "8 queries a head, odd": Case("prefill", WHOLE, 129, 8, 1, 129, 96),
    "wide": Case("prefill", WHOLE * 2, 67, 4, 1, 67, 256),
    "chunk up to the end of the cache": Case("prefill", rows_at(121), 9, 4, 4, 130, 256),
    "chunk of one": Case("prefill", rows_at(6, 6), 1, 4, 1, 19, 128),
    "first chunk of a long cache": Case("prefill", WHOLE, 64, 4, 2, 500, 64),
    "rows at different offsets": Case("prefill", rows_at(0, 260, 100), 40, 2, 1, 300, 128),
    "ragged rows": Case(
        "prefill", (Row(), Row(queries=1), Row(queries=0), Row(queries=77)), 140, 2, 1, 140, 64
    ),
    "ragged rows at different offsets": Case(
        "prefill", (Row(130), Row(0, 0), Row(220, 33)), 70, 2, 1, 290, 96, return_lse=True
    ),
    "log-sum-exps": Case("prefill", WHOLE * 2, 140, 4, 2, 140, 64, return_lse=True),
}
PACKED = {
    "short documents": Case(
        "prefill",
        (Row(documents=(30, 60, 20)), Row(documents=(140,))),
        140,
        4,
        2,
        140,
        64,
        return_lse=True,
    ),
    "one block a document": Case("prefill", (Row(documents=(128, 64, 64)),), 256, 8, 2, 256, 128),
    "documents across blocks": Case("prefill", (Row(documents=(100, 90)),), 210, 2, 1, 210, 96),
    "wide documents": Case("prefill", (Row(documents=(17, 73)),), 90, 2, 1, 90, 256),
    "documents of one token": Case("prefill", (Row(documents=(1, 1, 140)),), 150, 2, 2, 150, 80),
}
CHUNKS = {
    "of one prompt": Case(
        "prefill",
        (Row(0, 128, None, 0), Row(128, 128, None, 0), Row(256, 70, None, 0)),
        *(128, 2, 1, 384, 128),
        page_size=128,
    ),
    "of two prompts, an idle row first": Case(
        "prefill",
        (Row(5, 0, None, 0), Row(130, 70, None, 0), Row(60, 70, None, 1), Row(0, 33, None, 1)),
        *(70, 2, 1, 384, 64),
        page_size=128,
    ),
    "pages of 64, up to the last position": Case(
        "prefill",
        (Row(280, 40, None, 0), Row(216, 64, None, 0), Row(0, 0, None, 1)),
        *(64, 2, 2, 320, 64),
        page_size=64,
    ),
    "pages of 256": Case("prefill", (Row(0, 40), Row(300, 40)), 40, 2, 1, 512, 96, page_size=256),
    "pages of 1536": Case("prefill", (Row(2000, 20),), 20, 1, 1, 3072, 128, page_size=1536),
    "more pages than are loaded at once": Case(
        "prefill", (Row(1100, 16), Row(3, 9)), 16, 2, 1, 1280, 64, page_size=128
    ),
    "fewer positions than queries": Case(
        "prefill",
        (Row(0, 128, None, 0), Row(28, 100, None, 0)),
        *(150, 2, 1, 128, 128),
        page_size=128,
        return_lse=True,
    ),
    "pages of 7": Case(
        "prefill",
        (Row(0, 300, None, 0), Row(188, 300, None, 0), Row(300, 9, None, 1)),
        *(300, 4, 2, 490, 24),
        page_size=7,
    ),
    "pages of 16, in one block": Case(
        "prefill",
        (Row(0, 33, None, 0), Row(33, 33, None, 0), Row(66, 1, None, 0)),
        *(33, 4, 4, 96, 64),
        page_size=16,
    ),
}


def seen_in(*rows: tuple[int, int | None, int]) -> tuple[Row, ...]:
    """Rows at a position, with so many queries, that see so many keys."""
    return tuple(Row(position, queries, keys) for position, queries, keys in rows)


PARTS = {
    "part of pages": Case(
        "prefill",
        seen_in((600, 40, 300), (128, 40, 128), (90, 33, 0), (255, 0, 77)),
        *(40, 4, 2, 512, 64),
        page_size=128,
    ),
    "part that ends with pages and blocks": Case(
        "prefill",
        seen_in(*((640, None, keys) for keys in (127, 128, 129, 255, 256, 640))),
        *(8, 2, 1, 640, 64),
        page_size=128,
    ),
    "part before the queries and after": Case(
        "prefill",
        seen_in((0, None, 384), (100, None, 150), (300, None, 65), (254, None, 384)),
        *(130, 2, 1, 384, 128),
        page_size=128,
    ),
    "part of pages of 256": Case(
        "prefill", seen_in((700, 20, 520), (800, 20, 255)), 20, 2, 2, 768, 96, page_size=256
    ),
    "part of rows": Case(
        "prefill",
        seen_in((250, 70, 290), (0, 66, 65), (1000, 70, 64), (129, 70, 0)),
        70,
        2,
        1,
        290,
        64,
    ),
    "part of one key": Case("prefill", seen_in((129, None, 1), (0, None, 1)), 3, 4, 1, 130, 80),
    "more queries than keys": Case(
        "prefill", seen_in((0, None, 100), (7, None, 63)), 150, 2, 1, 100, 256
    ),
    "part of whole rows": Case(
        "prefill", seen_in((0, None, 64), (0, None, 101)), 140, 2, 1, 140, 64
    ),
    "part of pages, window 65": Case(
        "prefill",
        seen_in((620, 40, 600), (300, 40, 320), (700, 9, 640)),
        *(40, 2, 1, 640, 64),
        page_size=128,
        window=65,
    ),
    "part of pages, window 300": Case(
        "prefill",
        seen_in((700, None, 640), (900, None, 610), (200, None, 129)),
        *(40, 2, 1, 640, 64),
        page_size=128,
        window=300,
    ),
    "part of pages, window 1": Case(
        "prefill",
        seen_in((600, None, 620), (300, None, 300), (0, None, 33)),
        *(40, 2, 1, 640, 64),
        page_size=128,
        window=1,
    ),
    "part of rows, window 129": Case(
        "prefill",
        seen_in((0, None, 420), (380, None, 400), (300, None, 64)),
        *(140, 2, 1, 420, 128),
        window=129,
    ),
    "part past which a window of the row's length reaches": Case(
        "prefill", seen_in((20, None, 16)), 4, 2, 1, 16, 8, window=16
    ),
}
DECODE = {
    "decode": decoding(1, (200, 77), 8, 2, 200, 128),
    "decode 70B": decoding(1, (99,), 16, 2, 130, 128),
    "decode a long row": decoding(1, (1050,), 8, 1, 1100, 128),
    "decode one query a head": decoding(1, (1, 70, 33), 4, 4, 70, 64),
    "decode 4 queries a head": decoding(1, (137, 2), 8, 2, 137, 80),
    "decode 8 queries a head": decoding(1, (5, 119, 1), 8, 1, 119, 96),
    "decode wide": decoding(1, (80, 31), 8, 4, 80, 256),
    "decode idle rows": decoding(1, (0, 96, 0, 12), 8, 2, 96, 64, return_lse=True),
    "decode several tokens": decoding(4, (4, 129, 63), 8, 2, 129, 128),
    "decode several tokens, one key/value head": decoding(7, (131,), 4, 1, 145, 256),
    "decode fewer positions than tokens": decoding(4, (2, 130), 4, 2, 130, 80, return_lse=True),
    "decode one long row, many short": decoding(
        1, (3, 590, 0, 129), 4, 1, 600, 64, return_lse=True
    ),
    "decode more splits than are combined at once": decoding(
        1, (1300, 200), 4, 2, 1300, 256, return_lse=True
    ),
    "decode pages, most of them unused": decoding(1, (700, 0, 90), 4, 2, 4096, 64, page_size=128),
    "decode pages": decoding(1, (300, 1, 128), 8, 2, 384, 128, page_size=128),
    "decode pages, several tokens": decoding(
        2, (512, 131), 4, 2, 512, 64, page_size=256, return_lse=True
    ),
    "decode pages of several tiles": decoding(3, (640, 130), 4, 2, 640, 64, page_size=640),
}
SMALL_BLOCKS = {  # bytes of a TPU's block: four pages, two, half of one; chunks of a row
    "decode blocks of four pages": 2**17,
    "decode blocks of two pages": 2**17,
    "decode blocks of half a page": 2**15,
    "decode blocks of four chunks": 2**17,
}
DECODE |= {
    "decode blocks of four pages": decoding(1, (1000, 0, 860, 129), 8, 2, 1024, 64, page_size=128),
    "decode blocks of two pages": decoding(2, (768, 1, 630), 8, 2, 768, 128, page_size=128),
    "decode blocks of half a page": decoding(2, (1000, 300), 8, 2, 1024, 64, page_size=256),
    "decode blocks of four chunks": decoding(1, (1000, 300), 8, 2, 1024, 64),
}
GRADIENT = {
    "gradient": Case("gradient", WHOLE, 100, 2, 1, 100, 64),
    "gradient of 4 queries a head": Case("gradient", WHOLE, 200, 4, 1, 200, 128),
    "gradient of documents": dataclasses.replace(PACKED["documents across blocks"], op="gradient"),
    "gradient of documents of one token": dataclasses.replace(
        PACKED["documents of one token"], op="gradient"
    ),
    "gradient of wide documents": dataclasses.replace(PACKED["wide documents"], op="gradient"),
}


def with_windows(name: str, case: Case, *windows: int) -> dict[str, Case]:
    return {f"{name}, window {w}": dataclasses.replace(case, window=w) for w in windows}


STEPS = decoding(1, (620, 0, 64, 261), 4, 2, 640, 64, page_size=128)
TOKENS = decoding(3, (640, 130), 4, 2, 640, 64, page_size=128, return_lse=True)
WINDOWS = (
    with_windows(
        "whole rows", Case("prefill", WHOLE, 300, 2, 1, 300, 64), 1, 63, 64, 65, 127, 128, 129, 299
    )
    | with_windows("ragged rows", PREFILL["ragged rows"], 1, 64, 100)
    | with_windows(
        "offsets", Case("prefill", rows_at(0, 380, 100), 40, 2, 1, 420, 128), 1, 39, 128, 129, 300
    )
    | with_windows(
        "documents", Case("prefill", (Row(documents=(100, 90)),), 210, 2, 1, 210, 64), 1, 64, 90
    )
    | with_windows("chunks of one prompt", CHUNKS["of one prompt"], 1, 64, 128, 129, 200)
    | with_windows("chunks", CHUNKS["more pages than are loaded at once"], 1, 200, 700)
    | with_windows("chunks in pages of 1536", CHUNKS["pages of 1536"], 500)
    | with_windows("decode pages", STEPS, 1, 63, 64, 65, 127, 128, 129, 130, 619, 620)
    | with_windows("decode several tokens", TOKENS, 1, 62, 63, 128, 300)
    | with_windows("decode pages of several tiles", DECODE["decode pages of several tiles"], 3, 129)
    | with_windows("decode rows", dataclasses.replace(STEPS, page_size=None), 1, 64, 65, 129, 256)
    | with_windows("decode blocks of four pages", DECODE["decode blocks of four pages"], 600)
    | with_windows("decode blocks of half a page", DECODE["decode blocks of half a page"], 129)
    | with_windows("decode blocks of four chunks", DECODE["decode blocks of four chunks"], 700)
    | with_windows(
        "gradient", Case("gradient", WHOLE, 260, 2, 1, 260, 64), 1, 33, 64, 65, 128, 140, 259
    )
    | with_windows(
        "gradient of documents",
        Case("gradient", (Row(documents=(60, 90)),), 170, 2, 1, 170, 64),
        *(1, 64, 70),
    )
)


def capped(case: Case) -> Case:
    return dataclasses.replace(case, score_cap=3.0)


CAPPED = {
    "cap in one block": capped(PREFILL["ragged rows at different offsets"]),
    "cap in several blocks": capped(WINDOWS["whole rows, window 129"]),
    "cap in pages": capped(CHUNKS["of one prompt"]),
    "cap of a part": capped(PARTS["part of rows"]),
    "cap of decode": capped(DECODE["decode pages, several tokens"]),
    "cap of decode in several blocks": capped(DECODE["decode blocks of four pages"]),
    "cap of a gradient": capped(WINDOWS["gradient, window 65"]),
}
PARTS = {name: dataclasses.replace(case, return_lse=True) for name, case in PARTS.items()}
CASES: dict[str, Case] = PREFILL | PACKED | CHUNKS | PARTS | DECODE | GRADIENT | WINDOWS | CAPPED
FORMATS = {
    "xla": ("float32", "bfloat16", "float8_e4m3fn", "int8"),
    "hopper": ("bfloat16", "float8_e4m3fn", "int8"),
    "tpu": ("bfloat16", "float8_e4m3fn", "int8"),
}
SHORT: dict[str, Collection[str]] = {
    "xla float32": {
        *("one token", "several blocks", "4 queries a head, odd", "wide"),
        *("chunk up to the end of the cache", "ragged rows at different offsets"),
        *("whole rows, window 1", "whole rows, window 65", "offsets, window 129"),
        *("short documents", "documents of one token", "documents, window 1"),
        *("of two prompts, an idle row first", "pages of 7", "pages of 16, in one block"),
        *("fewer positions than queries", "chunks, window 200"),
        *("part of pages", "part of rows", "part of one key", "part of pages, window 65"),
        "part past which a window of the row's length reaches",
        *("decode", "decode idle rows", "decode fewer positions than tokens"),
        *("decode more splits than are combined at once", "decode pages, several tokens"),
        *("decode pages, window 65", "decode several tokens, window 1"),
        *("gradient", "gradient of documents", "gradient, window 65"),
        *("cap in one block", "cap in several blocks", "cap of decode", "cap of a gradient"),
    },
    "xla bfloat16": {"documents across blocks", "gradient of documents", "decode wide"},
    "xla int8": {"of one prompt", "part of pages", "decode pages, several tokens"},
    "xla float8_e4m3fn": {"rows at different offsets", "decode several tokens"},
    "hopper bfloat16": {
        *("ragged rows at different offsets", "offsets, window 129"),
        *("wide documents", "documents, window 90", "of two prompts, an idle row first"),
        *("part of rows", "part of pages, window 65"),
        *("gradient", "gradient of documents, window 70"),
        *("decode wide", "decode one long row, many short", "decode pages, several tokens"),
        *("decode pages, window 65", "decode several tokens, window 63"),
    },
    "hopper int8": {"decode pages, several tokens"},
    "hopper float8_e4m3fn": {"pages of 256", "decode idle rows"},
    "tpu bfloat16": {
        *("whole rows", "ragged rows at different offsets", "offsets, window 129"),
        *("wide documents", "documents, window 90", "of two prompts, an idle row first"),
        *("part of rows", "part of pages, window 65"),
        *("gradient", "gradient of documents, window 70"),
        *("decode wide", "decode idle rows", "decode one long row, many short"),
        *("decode pages, several tokens", "decode rows, window 129"),
        *("decode several tokens, window 63", "decode blocks of four pages, window 600"),
    },
    "tpu int8": {"part of pages", "decode blocks of two pages"},
    "tpu float8_e4m3fn": {"pages of 256", "decode blocks of half a page"},
}
"""What `make test` runs: each feature of each implementation once."""
ON_DEVICES = {name for run, names in SHORT.items() if "xla" not in run for name in names}


def case_of(name: str, cache_format: str) -> Case:
    dtype = "float32" if cache_format == "float32" else "bfloat16"
    return dataclasses.replace(CASES[name], dtype=dtype, cache_dtype=cache_format)


def table() -> list[tuple[str, str, str, bool]]:
    """(implementation, format, name, whether it is in the short selection) of all that can run;
    with 8 bits of prefill and of XLA only what `SHORT` names."""
    found = []
    for implementation, formats in FORMATS.items():
        for cache_format in formats:
            short = SHORT[f"{implementation} {cache_format}"]
            for name in CASES:
                if name in short or runs(implementation, cache_format, name):
                    found.append((implementation, cache_format, name, name in short))
    return found


def runs(implementation: str, cache_format: str, name: str) -> bool:
    case = case_of(name, cache_format)
    eight_bits = jnp.dtype(cache_format).itemsize == 1
    if eight_bits and (implementation == "xla" or case.op != "decode"):
        return False  # prefill widens them first
    if implementation == "xla":
        return True
    kind = device("H100" if implementation == "hopper" else "v5e")
    return choice.choose(kind, case.spec).implementation == implementation


def tunings(implementation: str, name: str) -> dict[str, Any]:
    """Smaller blocks than the table's, so that there are several."""
    case, base = CASES[name], name.partition(", window")[0]
    if implementation == "tpu" and base in SMALL_BLOCKS:
        return {"tuning": tpu.decode.Tuning(block_bytes=SMALL_BLOCKS[base], buffers=2, rows=2)}
    if implementation == "xla" or case.op == "decode" or case.page_size or case.head_dim > 128:
        return {}
    if implementation == "hopper":
        found: dict[str, Any] = {"tuning": hopper.prefill.Tuning(block_kv=64)}
        backward: Any = hopper.backward.Tuning(dq_block_kv=64)
    else:
        sizes = {"block_rows": 256, "block_kv_compute": 128}
        found = {"tuning": tpu.prefill.Tuning(**sizes, block_kv=256)}
        backward = tpu.backward.Tuning(**sizes, block_kv=128)
    return found | ({"backward_tuning": backward} if case.op == "gradient" else {})
