"""Draw the pictures of the documentation.

    python docs/img/make_pictures.py             all of them, into docs/img/
    python docs/img/make_pictures.py pages       one

The drawings (`swiftkv`, `stacks`, `pages`, `engine-step`) are SVG written here. The others are
plots of committed measurements.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
DATA = HERE / "data"
RESULTS = HERE.parents[1] / "benchmarks" / "results"
PREFILL = RESULTS / "serve-nvidia-h100-80gb-hbm3-20261128-043804.json"

BLUE, RED, GREEN, GREY, INK = "#1f5fa8", "#c8553d", "#3d8b5f", "#7a7a7a", "#222222"
LIGHT = {BLUE: "#dce8f5", RED: "#f8e2dc", GREEN: "#dff0e5", GREY: "#f1f1f1"}


class Drawing:
    """An SVG of `width` x `height` pixels; (0, 0) is the upper left corner."""

    def __init__(self, width: int, height: int, title: str):
        self._width, self._height, self._title = width, height, title
        self._parts: list[str] = []

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        text: str = "",
        *,
        color: str = GREY,
        dashed: bool = False,
        bold: bool = False,
        size: int = 13,
        fill: str | None = None,
    ) -> None:
        """A rectangle with centred lines of text."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self._parts.append(
            f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" '
            f'fill="{fill or LIGHT[color]}" stroke="{color}"{dash}/>'
        )
        lines = text.split("\n") if text else []
        first = y + height / 2 - (len(lines) - 1) * 0.65 * size + 0.35 * size
        for number, line in enumerate(lines):
            self.text(
                x + width / 2,
                first + number * 1.3 * size,
                line,
                size=size,
                anchor="middle",
                bold=bold and number == 0,
                color=GREY if dashed else INK,
            )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = 13,
        anchor: str = "start",
        bold: bool = False,
        color: str = INK,
    ) -> None:
        """A line of text whose base line is at `y`."""
        weight = ' font-weight="bold"' if bold else ""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" '
            f'fill="{color}"{weight}>{escape(text)}</text>'
        )

    def arrow(self, *points: tuple[float, float], color: str = INK, both: bool = False) -> None:
        """A line through `points` with a head at its end, or at both ends."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        start = f' marker-start="url(#head-{color[1:]})"' if both else ""
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.6"'
            f'{start} marker-end="url(#head-{color[1:]})"/>'
        )

    def save(self, path: Path) -> None:
        heads = "".join(
            f'<marker id="head-{color[1:]}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
            f'markerHeight="7" orient="auto-start-reverse">'
            f'<path d="M0,1 L10,5 L0,9 z" fill="{color}"/></marker>'
            for color in (BLUE, RED, GREEN, GREY, INK)
        )
        path.write_text(
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self._width} {self._height}" '
            f'width="{self._width}" height="{self._height}" '
            f'font-family="DejaVu Sans, Verdana, sans-serif" role="img">\n'
            f"<title>{escape(self._title)}</title>\n<defs>{heads}</defs>\n"
            f'<rect width="{self._width}" height="{self._height}" fill="#ffffff"/>\n'
            + "\n".join(self._parts)
            + "\n</svg>\n",
            encoding="utf-8",
        )


# Drawings ----------------------------------------------------------------------


def swiftkv(path: Path) -> None:
    """What runs for a prompt token and for a generated one."""
    drawing = Drawing(520, 480, "Prefill and decoding under SwiftKV")
    box = functools.partial(drawing.box, size=14)
    left, cache, right, width = 10, 210, 355, 155
    gaps = (cache + left + width) / 2, (cache + 100 + right) / 2
    titles = ("prompt tokens", "(prefill)"), ("KV cache", ""), ("generated tokens", "(decode)")
    for middle, lines in zip(
        (left + width / 2, cache + 50, right + width / 2), titles, strict=True
    ):
        for index, line in enumerate(lines):
            drawing.text(middle, 20 + 19 * index, line, size=15, anchor="middle", bold=True)
    for x in (left, right):
        box(x, 438, width, 34, "embedding")
        box(x, 330, width, 76, "layers 0 .. K-1\nattention, MLP", color=BLUE, bold=True)
        drawing.arrow((x + width / 2, 438), (x + width / 2, 407))
    box(cache, 330, 100, 76, "lower:\nK layers", color=BLUE, fill="#ffffff")
    box(
        cache, 116, 100, 172, "upper:\none for\neach layer,\nor for each\ngroup\n(AcrossKV)",
        color=RED, fill="#ffffff",
    )  # fmt: skip
    drawing.arrow((left + width + 1, 368), (cache - 1, 368), color=BLUE, both=True)
    drawing.arrow((right - 1, 368), (cache + 101, 368), color=BLUE, both=True)

    # The projection of layer K's input: the same for both kinds of token.
    for x in (left + 55, right):
        box(x, 240, 100, 48, "RMSNorm,\nW_k, W_v", color=RED)
        drawing.arrow((x + 50, 330), (x + 50, 289))
    drawing.arrow((left + width, 264), (cache - 1, 264), color=RED)
    drawing.arrow((right, 264), (cache + 101, 264), color=RED)
    for index, line in enumerate(("input of", "layer K")):
        drawing.text(left + 97, 307 + 16 * index, line, anchor="end", color=GREY)

    box(left, 116, width, 84, "layers K .. L-1\nskipped", dashed=True)
    box(right, 116, width, 84, "layers K .. L-1\nquery, attention,\nMLP", color=RED, bold=True)
    drawing.arrow((right + 130, 330), (right + 130, 201))
    drawing.arrow((cache + 100, 158), (right - 1, 158), color=RED)
    for middle, y, text in (
        (gaps[0], 256, "write"),
        (gaps[1], 256, "write"),
        (gaps[1], 150, "read"),
    ):
        drawing.text(middle, y, text, anchor="middle", color=RED)
    box(right, 52, width, 44, "norm, head:\nnext token")
    drawing.arrow((right + width / 2, 116), (right + width / 2, 97))
    drawing.save(path)


def stacks(path: Path) -> None:
    """The parameter trees: frozen stacks, and the trained delta beside them."""
    drawing = Drawing(900, 400, "The two stacks of layers and the trained tree")
    drawing.text(230, 26, "model.llama: frozen, shared", size=15, anchor="middle", bold=True)
    drawing.text(685, 26, "model.swiftkv: the delta, trained", size=15, anchor="middle", bold=True)
    drawing.box(30, 360, 400, 28, "embed [V, D]", size=12)
    drawing.box(30, 42, 400, 28, "final_norm [D], lm_head [V, D]", size=12)
    drawing.text(328, 96, "the teacher's only", size=12, anchor="middle", color=GREY)
    drawing.text(575, 96, "U query projections", size=12, anchor="middle", color=GREY)
    drawing.text(780, 96, "J = U / g of keys and values", size=12, anchor="middle", color=GREY)
    for index in range(4):
        y = 318 - 30 * index
        if index < 3:
            drawing.box(30, y, 190, 26, "lower: norms, o, MLP", color=BLUE, size=12)
            drawing.box(226, y, 204, 26, "lower_qkv: q, k, v", color=BLUE, size=12)
        y = 194 - 30 * index
        drawing.box(30, y, 190, 26, "upper: norms, o, MLP", color=BLUE, size=12)
        drawing.box(226, y, 204, 26, "upper_qkv: q, k, v", size=12, dashed=True)
        drawing.box(500, y, 150, 26, "q [N, H, D]", color=RED, size=12)
        if index % 2:
            drawing.box(690, y, 180, 56, "k, v [K, H, D]", color=RED, size=12)
    drawing.text(30, 248, "K lower layers", color=BLUE, bold=True)
    drawing.text(30, 96, "U upper layers", color=BLUE, bold=True)
    for start, end in ((360, 345), (258, 221), (104, 71)):  # the hidden state goes up
        drawing.arrow((200, start), (200, end))
    drawing.box(690, 258, 180, 26, "norm [D]", color=RED, size=12)
    drawing.arrow((780, 258), (780, 221), color=RED)
    drawing.arrow((200, 239), (670, 239), (670, 271), (689, 271))
    drawing.text(560, 255, "input of layer K", size=12, anchor="middle", color=GREY)
    for index, line in enumerate(
        (
            "Teacher: embed, lower, upper with upper_qkv, head.",
            "Student: embed, lower, upper with the delta, head.",
            "Gradients, moments and checkpoints: the delta only.",
            "It replaces upper_qkv; nothing is added.",
        )
    ):
        drawing.text(500, 316 + 22 * index, line)
    drawing.save(path)


def pages(path: Path) -> None:
    """A chunk of two requests, their page tables, and the pool."""
    drawing = Drawing(900, 400, "Pages of the KV cache and a chunk of prefill")
    cell = 38
    drawing.text(30, 28, "A chunk: 8 tokens of two requests, packed without padding", bold=True)
    tokens = [("a6", BLUE), ("a7", BLUE), ("a8", BLUE), ("a9", BLUE)]
    tokens += [(f"b{index}", GREEN) for index in range(4)]
    for index, (name, color) in enumerate(tokens):
        drawing.box(30 + cell * index, 40, cell, 30, name, color=color)

    drawing.text(30, 134, "Page tables", bold=True)
    for row, (name, table, color) in enumerate((("a", (5, 2, 7), BLUE), ("b", (1,), GREEN))):
        drawing.text(30, 166 + 40 * row, f"request {name}", size=13)
        for index, page in enumerate(table):
            drawing.box(120 + 44 * index, 146 + 40 * row, 40, 30, str(page), color=color)
    drawing.text(440, 134, "Tiles: the part of a request that falls into one page", bold=True)
    tiles = (
        ("page 2", ". . a6 a7", BLUE),
        ("page 7", "a8 a9 . .", BLUE),
        ("page 1", "b0 b1 b2 b3", GREEN),
    )
    for index, (page, text, color) in enumerate(tiles):
        drawing.text(440, 166 + 34 * index, page, size=13)
        for place, token in enumerate(text.split()):
            fill = "#ffffff" if token == "." else None
            drawing.box(
                510 + cell * place, 147 + 34 * index, cell, 28, token.replace(".", ""),
                color=color, fill=fill,
            )  # fmt: skip
    drawing.arrow((340, 55), (590, 55), (590, 108), color=INK)

    drawing.text(30, 290, "The pool: pages of 4 positions (128 by default)", bold=True)
    held = {
        5: [f"a{i}" for i in range(4)],
        2: ["a4", "a5", "a6", "a7"],
        7: ["a8", "a9", "", ""],
        1: [f"b{i}" for i in range(4)],
    }
    fresh = {"a6", "a7", "a8", "a9", "b0", "b1", "b2", "b3"}
    for page in range(8):
        x = 30 + 107 * page
        drawing.text(x + 50, 312, f"page {page}", size=12, anchor="middle", color=GREY)
        for place in range(4):
            token = held.get(page, [""] * 4)[place]
            color = GREY if not token else BLUE if token[0] == "a" else GREEN
            fill = LIGHT[color] if token in fresh else "#ffffff"
            drawing.box(x + 25 * place, 320, 25, 28, token, color=color, size=11, fill=fill)
    drawing.text(
        30, 378, "Filled cells are written by this chunk; a0 .. a5 were cached before. "
        "A full page may be shared by all requests that begin alike.", size=12, color=GREY,
    )  # fmt: skip
    drawing.save(path)


def engine_step(path: Path) -> None:
    """Host and device over four steps: the host reads one step behind."""
    drawing = Drawing(900, 224, "Steps of the engine: the host is one step behind the device")
    drawing.text(20, 72, "host", bold=True)
    drawing.text(20, 152, "device", bold=True)
    step, start, prefill_width = 262, 92, 122
    for index in range(3):
        x, n = start + step * index, f"n+{index}" if index else "n"
        last = ("n-1", "n", "n+1")[index]
        drawing.box(x, 46, 76, 42, f"schedule\n{n}", color=BLUE, size=11)
        drawing.box(x + 80, 46, 48, 42, f"send\n{n}", color=BLUE, size=11)
        drawing.box(x + 132, 46, 122, 42, f"read {last}:\noutputs", color=GREEN, size=11)
        drawing.arrow((x + 104, 89), (x + 104, 125), color=BLUE)
        busy = x + 112
        drawing.box(busy, 126, prefill_width, 42, f"prefill chunks {n}", color=RED, size=11)
        if index < 2:
            rest = step - prefill_width
            drawing.box(busy + prefill_width, 126, rest, 42, f"decode call {n}", color=RED, size=11)
    drawing.text(
        92, 206, "The next step is in the device's queue before the last one ends, so reading does "
        "not hold it up.", size=12, color=GREY,
    )  # fmt: skip
    drawing.save(path)


# Plots from measurements -------------------------------------------------------


def prefill(path: Path) -> None:
    """Prefill of Llama-3.1-8B on an H100 over the length of the prompt."""
    found = json.loads(PREFILL.read_text(encoding="utf-8"))
    kinds = ("teacher", GREY), ("swiftkv", BLUE)
    rates: dict[int, list[tuple[float, str]]] = {}
    for variant, color in kinds:
        for row in found["parts"]["prefill-lengths"]["rows"]:
            if row["variant"] == variant:
                length = int(row["label"].split()[0])
                rates.setdefault(length, []).append((row["tokens_per_s"], color))
    drawing = Drawing(520, 356, "Prefill of Llama-3.1-8B on an H100, by length of the prompt")
    drawing.text(10, 22, "Prefill of Llama-3.1-8B on one H100, tokens a second", size=15, bold=True)
    for index, ((_, color), name) in enumerate(zip(kinds, ("teacher", "SwiftKV"), strict=True)):
        drawing.box(120 + 120 * index, 36, 14, 14, color=color, fill=color)
        drawing.text(140 + 120 * index, 48, name, size=14)
    y, per_pixel = 64.0, max(rate for bars in rates.values() for rate, _ in bars) / 390
    for length, bars in sorted(rates.items()):
        drawing.text(110, y + 12 * len(bars) + 4, f"{length:,} tokens", size=14, anchor="end")
        slowest = bars[0][0]
        for rate, color in bars:
            drawing.box(120, y, rate / per_pixel, 22, color=color, fill=color)
            times = "" if rate == slowest else f", {rate / slowest:.2f}x"
            text = f"{rate:,.0f}{times}"
            drawing.text(128, y + 16, text, size=14, color="#ffffff", bold=True)
            y += 24
        y += 16
    command = f"swiftkv infer bench prefill, {found['date'][:10]}."
    for line in ("Random weights in bfloat16, K = 16 of 32 layers.", command):
        drawing.text(10, y + 6, line, color=GREY)
        y += 18
    drawing.save(path)


def analysis(path: Path, data: str = "analysis.json") -> None:
    """`swiftkv train analyze` of the demo model, or of another with another data file."""
    from swiftkv_jax.calibration import LayerFit
    from swiftkv_jax.train.analysis.sweep import Analysis, CutResult, LayerR2
    from swiftkv_jax.train.report.plots import draw_analysis

    found = json.loads((DATA / data).read_text(encoding="utf-8"))
    teacher = found["teacher_perplexity"]
    older = {  # of a file from before students had these
        "prompt_attention_layers": 0,
        "prompt_mlp_neurons": 0,
        "boundary_taps": 0,
        "exact_head": 0,
        "generated_kv": "boundary",
        "exact_tail": 0,
        "tokens": found["tokens"],
        "teacher_perplexity": teacher,
        "perplexity_loss_error": 0.0,
        "far_nats_error": 0.0,
    }
    cuts = []
    for cut in found["cuts"]:
        lost = {"perplexity_loss": cut["student_perplexity"] / teacher - 1}
        fits = [LayerFit(**layer) for layer in cut["layers"]]
        lost["r2"] = [LayerR2(fit.layer, fit.r2_k, fit.r2_v) for fit in fits]
        cuts.append(CutResult(**(older | lost | cut | {"layers": fits})))
    names = {field.name for field in dataclasses.fields(Analysis)} - {"cuts", "heads"}
    facts: dict[str, Any] = {"rows": 0} | {name: found[name] for name in names if name in found}
    draw_analysis(Analysis(**facts, cuts=cuts, heads=[]), path)


def run(path: Path) -> None:
    """The curves in `report.html` of a short run on the demo model, without its speed."""
    from swiftkv_jax.train.report.plots import draw_run
    from swiftkv_jax.train.run.metrics import read_metrics

    picture = draw_run(read_metrics(DATA / "metrics.jsonl"))
    in_pixels = picture.replace('pt"', 'px"', 2)  # its width and height, which come first
    path.write_text(in_pixels, encoding="utf-8")


PICTURES: dict[str, tuple[Callable[[Path], None], str]] = {
    "swiftkv": (swiftkv, "svg"),
    "stacks": (stacks, "svg"),
    "pages": (pages, "svg"),
    "engine-step": (engine_step, "svg"),
    "prefill": (prefill, "svg"),
    "analysis": (analysis, "png"),
    "analysis-t2": (functools.partial(analysis, data="analysis-t2.json"), "png"),
    "run": (run, "svg"),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(PICTURES)}")
    names = parser.parse_args().names or PICTURES
    for name in names:
        draw, ending = PICTURES[name]
        draw(HERE / f"{name}.{ending}")


if __name__ == "__main__":
    main()
