"""A device without a model. Its cache holds the tokens themselves, so whatever reads a page can
check that it is its own."""

import dataclasses
import hashlib
from collections import abc

import numpy as np

from swiftkv_jax.config import Config
from swiftkv_jax.infer.engine.engine import Engine
from swiftkv_jax.infer.engine.options import EngineOptions
from swiftkv_jax.infer.engine.request_state import Chunk, Sequence
from swiftkv_jax.infer.engine.requests import ScoreRequest
from swiftkv_jax.infer.engine.scheduler import Limits
from swiftkv_jax.infer.runner.model_runner import AsyncOutput
from swiftkv_jax.infer.runner.prefill_chunk import chunk_needs
from swiftkv_jax.infer.runner.shapes import Shapes
from swiftkv_jax.infer.sampling.sampler import SamplerOutput

VOCAB, END = 97, 0
CONFIG = Config(
    vocab_size=VOCAB,
    embed_dim=8,
    mlp_dim=8,
    num_layers=2,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=4096,
)


def next_token(tokens: abc.Sequence[int], sample: int = 0, ends: bool = True) -> int:
    """A fixed function of all the tokens before."""
    digest = hashlib.blake2b(
        np.array([sample, *tokens], np.int32).tobytes(), digest_size=4
    ).digest()
    return int.from_bytes(digest) % (VOCAB - 1 + ends) + (not ends)


def continuation(
    prompt: abc.Sequence[int], max_tokens: int, sample: int = 0, *, ends: bool = True
) -> list[int]:
    """What the mock answers, without the end token."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        if (token := next_token(tokens, sample, ends)) == END:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


@dataclasses.dataclass
class Row:
    sample: Sequence
    tokens: list[int]
    budget: int


class MockDevice:
    """`ModelRunnerBase` in plain Python. Every wrong, stale or foreign page that anything reads is an
    `AssertionError`."""

    def __init__(self, shapes: Shapes, limits: Limits):
        self.shapes, self.limits = shapes, limits
        self.pages = np.full((shapes.lanes, shapes.num_pages, shapes.page_size), -1)
        self.rows: dict[int, Row] = {}
        self.calls: list[str] = []

    def prepare(self) -> None:
        self.calls.append("prepare")

    def leave(self, slots: abc.Sequence[int]) -> None:
        for slot in slots:
            self.rows.pop(slot, None)

    def enter(self, samples: abc.Sequence[Sequence]) -> None:
        for sample in samples:
            assert 0 <= sample.slot < self.shapes.lanes * self.shapes.slots
            old = self.rows.get(sample.slot)
            assert old is None or old.budget == 0, "the slot is somebody's"
            self.rows[sample.slot] = Row(sample, list(sample.task.tokens), sample.left)

    def run_chunk(self, chunk: Chunk) -> AsyncOutput | None:
        lanes = [lane for lane in chunk.spans if lane]
        if lanes:
            tokens, pieces, scored, _, context = chunk_needs(chunk.spans, self.shapes.page_size)
            assert (
                tokens <= self.limits.chunk_tokens
                and pieces <= self.limits.max_pieces
                and scored <= self.limits.scored_tokens
            )
            assert self.limits.context_pages is None or context <= self.limits.context_pages
            self.calls.append(f"prefill {tokens}")
        written: set[tuple[int, int]] = set()
        for spans in lanes:
            for span in spans:
                places = {
                    (span.task.lane, span.task.pages[at // self.shapes.page_size])
                    for at in range(span.start, span.stop)
                }
                assert not places & written, "two spans write one page"
                written |= places
                self._write(
                    span.task.lane,
                    span.task.pages,
                    span.start,
                    span.task.tokens[span.start : span.stop],
                )
        likeliest = []
        for spans in lanes:
            for span in (
                spans
            ):  # every request reads all that is before its last token, once all is written
                self._check(span.task.lane, span.task.pages, span.task.tokens[: span.stop])
                if isinstance(span.task.request, ScoreRequest):
                    likeliest += [next_token(span.task.tokens[: at + 1]) for at in span.scored]
        for lane, copies in enumerate(chunk.copies):
            for source, target in copies:
                self.pages[lane, target] = self.pages[lane, source]
        return AsyncOutput(likeliest, "scores" if likeliest else None) if lanes else None

    def run_decode(self, samples: abc.Sequence[Sequence]) -> AsyncOutput:
        assert len({sample.slot for sample in samples}) == len(samples) > 0
        self.calls.append(f"decode {len(samples)}")
        emitted = np.full((len(samples), self.shapes.decode_steps), -1)
        for row, sample in zip(emitted, samples, strict=True):
            state = self.rows[sample.slot]
            assert state.sample is sample
            for step in range(self.shapes.decode_steps if state.budget else 0):
                lane, pages, cached = sample.task.lane, sample.pages, len(state.tokens) - 1
                self._write(lane, pages, cached, state.tokens[-1:])
                self._check(lane, pages, state.tokens)
                row[step] = next_token(state.tokens, sample.index, not sample.params.ignore_eos)
                state.tokens.append(int(row[step]))
                state.budget = 0 if row[step] == END else state.budget - 1
                if not state.budget:
                    break
        return AsyncOutput(emitted, "tokens")

    def read(self, handle: AsyncOutput) -> SamplerOutput | None:
        if handle.index is None:
            return None
        token = np.array(handle.result)
        return SamplerOutput(
            token,
            -token.astype(np.float32),
            np.stack([token] * 20, -1),
            np.zeros((*token.shape, 20), np.float32),
        )

    def _write(
        self, lane: int, pages: abc.Sequence[int], start: int, tokens: abc.Sequence[int]
    ) -> None:
        for at, token in enumerate(tokens, start):
            self.pages[lane, pages[at // self.shapes.page_size], at % self.shapes.page_size] = token

    def _check(self, lane: int, pages: abc.Sequence[int], tokens: abc.Sequence[int]) -> None:
        cached = self.pages[lane, list(pages)].reshape(-1)[: len(tokens)]
        assert cached.tolist() == list(tokens), "a row reads what it has not written"


def mock_engine(
    *,
    lanes: int = 1,
    slots: int = 4,
    page_size: int = 4,
    num_pages: int = 64,
    chunk: int = 16,
    pieces: int | None = None,
    steps: int = 3,
    context: int | None = None,
    scored: int = 8,
    max_model_len: int = 64,
    **options,
) -> tuple[Engine, MockDevice]:
    pieces = pieces or chunk // page_size + 3
    table_pages = -(-max_model_len // page_size)
    shapes = Shapes(
        lanes,
        page_size,
        num_pages,
        table_pages,
        slots,
        (slots,),
        steps,
        (chunk,),
        3,
        (context,),
        True,
    )
    device = MockDevice(shapes, Limits(slots, chunk, pieces, context, scored))
    settings = EngineOptions(
        max_model_len=max_model_len, max_num_seqs=lanes * slots, scoring=True, **options
    )
    return Engine(device, config=CONFIG, end_ids=(END,), options=settings), device
