"""A model runner without a model. Its cache holds the tokens themselves, and which of them keep
their own keys and values, so every read of a page can check that it holds the right ones."""

import collections
import dataclasses
import hashlib
import random
from collections.abc import Iterator, MutableSequence, Sequence
from pathlib import Path

import numpy as np

from swiftkv_jax.infer.engine.constrained import ConstrainedCall
from swiftkv_jax.infer.engine.engine import Engine
from swiftkv_jax.infer.engine.host_tier import PageMove
from swiftkv_jax.infer.engine.model_runner_base import Adapter
from swiftkv_jax.infer.engine.options import EngineOptions
from swiftkv_jax.infer.engine.page_store import FINGERPRINT_BYTES, HEADER, PageStore
from swiftkv_jax.infer.engine.request_state import Chunk, RequestState, SequenceState
from swiftkv_jax.infer.engine.requests import ScoreRequest
from swiftkv_jax.infer.engine.sampler_output import REJECTED, AsyncOutput, SamplerOutput
from swiftkv_jax.infer.engine.scheduler import MAX_SKIPS
from swiftkv_jax.infer.engine.shapes import DecodeCall, Shapes
from swiftkv_jax.infer.runner.prefill_chunk import chunk_needs
from swiftkv_jax.model.config import Config, LayerKind
from swiftkv_jax.model.model import Model

VOCAB, END = 97, 0
CONFIG = Config(
    vocab_size=VOCAB,
    embed_dim=8,
    mlp_dim=8,
    num_layers=2,
    num_key_value_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    max_position_embeddings=4096,
)


def next_token(tokens: Sequence[int], sample: int = 0, ends: bool = True) -> int:
    """A fixed function of all the tokens before."""
    digest = hashlib.blake2b(
        np.array([sample, *tokens], np.int32).tobytes(), digest_size=4
    ).digest()
    return int.from_bytes(digest) % (VOCAB - 1 + ends) + (not ends)


def continuation(
    prompt: Sequence[int], max_tokens: int, sample: int = 0, *, ends: bool = True
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
    sequence: SequenceState
    tokens: list[int]
    remaining: int


class MockHostPages:
    """`HostPagesBase` of tokens."""

    def __init__(self, size: int):
        self.slots: dict[int, np.ndarray] = {}
        self.store: PageStore | None = None
        self.weights = b"the first weights"
        self.page_bytes = 8 * size

    def get(self, slot: int) -> np.ndarray:
        return self.slots[slot]

    def put(self, slot: int, page: np.ndarray) -> None:
        self.slots[slot] = page

    def drop(self, slot: int) -> None:
        self.slots.pop(slot, None)

    def fingerprint(self) -> bytes:
        return self.weights[:FINGERPRINT_BYTES]

    def open(self, folder: Path, limit: int = 2**30) -> PageStore:
        """A store of these pages."""
        self.store = PageStore(
            folder,
            limit,
            self.fingerprint(),
            self.page_bytes,
            encode=lambda page: [page],
            decode=lambda content: np.frombuffer(content, np.int64),
        )
        return self.store


class MockModelRunner:
    """`ModelRunnerBase` in plain Python. A read of a page that holds other tokens than those of its
    request is an `AssertionError`."""

    def __init__(self, shapes: Shapes, window: int | None = None):
        self.shapes, self.window = shapes, window
        self.wide_costs = (1.0,) * len(shapes.widths)
        self.pages = np.full((shapes.dp_size, shapes.num_pages, shapes.page_size), -1)
        self.host_pages = MockHostPages(shapes.page_size)
        self.rows: dict[int, Row] = {}
        self.calls: MutableSequence[str] = []
        self.random = random.Random(0)
        self.adapters: dict[int, int] = {}

    def prepare(self) -> None:
        self.calls.append("prepare")

    def num_compilations(self) -> int:
        return 0

    def update_weights(self, model: Model, *, donate: bool) -> None:
        self.calls.append("update")

    def read_adapter(self, path: Path) -> Adapter:
        """The folder's name is a number below 256, which is added to those of the samples; from 100
        on it changes what the cache holds."""
        number = int(path.name)
        return Adapter(number, bytes([number]) if number >= 100 else b"")

    def insert_adapter(self, number: int, adapter: Adapter) -> None:
        assert 1 <= number <= self.shapes.num_adapters
        self.adapters[number] = adapter.layers

    def is_idle(self) -> bool:
        return True

    def move_pages(self, moves: Sequence[PageMove]) -> None:
        for saves, page, slot, _ in moves:
            assert 0 <= slot < self.shapes.host_pages
            if saves:
                self.host_pages.put(slot, self.pages[0, page].copy())
            else:
                self.pages[0, page] = self.host_pages.get(slot)

    def fingerprint(self) -> bytes:
        return self.host_pages.fingerprint()

    def remove_sequences(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self.rows.pop(slot, None)

    def add_sequences(self, sequences: Sequence[SequenceState]) -> None:
        for sequence in sequences:
            assert 0 <= sequence.slot < self.shapes.dp_size * self.shapes.slots
            old = self.rows.get(sequence.slot)
            assert old is None or old.remaining == 0, "the slot is in use"
            tokens = list(sequence.request_state.prefill_token_ids)
            self.rows[sequence.slot] = Row(sequence, tokens, sequence.num_remaining_tokens)

    def update_pages(self, sequences: Sequence[SequenceState]) -> None:
        assert all(self.rows[sequence.slot].sequence is sequence for sequence in sequences)

    def run_chunk(self, chunk: Chunk) -> AsyncOutput | None:
        size = self.shapes.page_size
        scheduled_tokens = [scheduled for _, scheduled in chunk.scheduled_tokens()]
        if scheduled_tokens:
            needs, longest = chunk_needs(chunk.shards, size), self.shapes.chunks[-1]
            assert needs.tokens <= longest and needs.tiles <= self.shapes.tiles(longest)[-1]
            context = self.shapes.contexts[-1]
            assert context is None or needs.context_pages <= context
            self.calls.append(f"prefill {needs.tokens}")
        written: set[tuple[int, int]] = set()
        for scheduled in scheduled_tokens:
            state = scheduled.request_state
            pages = {
                (state.dp_rank, state.pages[at // size])
                for at in range(scheduled.start, scheduled.stop)
            }
            assert not pages & written, "two requests write one page"
            written |= pages
            tokens = state.prefill_token_ids[scheduled.start : scheduled.stop]
            self._write(state, state.pages, scheduled.start, tokens)
        likeliest = []
        # All is written before a request reads what is before its last token.
        for scheduled in scheduled_tokens:
            state = scheduled.request_state
            tokens = state.prefill_token_ids[: scheduled.stop]
            self._check(state, state.pages, tokens, scheduled.start)
            if isinstance(state.request, ScoreRequest):
                prompt = state.prefill_token_ids
                likeliest += [next_token(prompt[: at + 1]) for at in scheduled.scored]
        for dp_rank, copies in enumerate(chunk.page_copies):
            for source, target in copies:
                self.pages[dp_rank, target] = self.pages[dp_rank, source]
        scores = "scores" if likeliest else None
        return AsyncOutput((likeliest, None), scores) if scheduled_tokens else None

    def run_last_chunk(self, chunk: Chunk) -> AsyncOutput:
        assert self.shapes.first_tokens and 0 < chunk.num_tokens < self.shapes.chunks[-1]
        self.run_chunk(chunk)
        self.calls[-1] += " and go on"
        (sequence,) = chunk.finished_prefill
        return self._decode([sequence], DecodeCall(1))

    def run_decode(self, sequences: Sequence[SequenceState], call: DecodeCall) -> AsyncOutput:
        assert all(sequence.matcher is None for sequence in sequences)
        rows = max(collections.Counter(one.request_state.dp_rank for one in sequences).values())
        if call.width > 1:
            assert call == self.shapes.wide_call(rows)
        elif call.steps != self.shapes.decode_steps:
            assert call.steps == 1 and rows <= self.shapes.single_step_sizes[-1]
        self.calls.append(f"decode {len(sequences)}")
        return self._decode(sequences, call)

    def run_decode_constrained(self, call: ConstrainedCall) -> AsyncOutput:
        """The drafts of the host, of which those are emitted that come next anyhow."""
        sequences, width = call.sequences, call.width
        assert call.masks.shape == (len(sequences), width, -(-VOCAB // 32))
        assert width in (1, *self.shapes.widths)
        self.calls.append(f"constrained {len(sequences)}" + f" of {width}" * (width > 1))
        return self._decode(sequences, DecodeCall(1, width), call)

    def _constrained_token(
        self, row: Row, call: ConstrainedCall, number: int, column: int, token: int
    ) -> int:
        """The first token from `token` on that may come."""
        bits = np.unpackbits(call.masks[number, column].view(np.uint8), bitorder="little")
        (possible,) = np.nonzero(bits[:VOCAB])
        return min(possible.tolist(), key=lambda one: (one - token) % VOCAB)

    def _given_places(
        self, row: Row, call: ConstrainedCall, number: int, out: np.ndarray, source: np.ndarray
    ) -> Iterator[int]:
        """Columns of the tokens that a call emits: as long as they are the drafts."""
        drafts = call.drafts.tokens[number][call.drafts.source[number] >= 0].tolist()
        assert len(drafts) < row.remaining
        state, pages = row.sequence.request_state, row.sequence.pages
        self._write(state, pages, len(row.tokens), drafts)
        source[1 : 1 + len(drafts)] = call.drafts.source[number][call.width - len(drafts) :]
        out[1 : 1 + len(drafts)] = REJECTED
        for place, draft in enumerate([*drafts, None]):
            yield place
            if row.tokens[-1] != draft:
                return

    def _decode(
        self,
        sequences: Sequence[SequenceState],
        call: DecodeCall,
        constrained: ConstrainedCall | None = None,
    ) -> AsyncOutput:
        """A wide step has drafts that are right up to a random one: it writes all of them, and
        emits as many and one more. They are of the prediction, where there is one."""
        assert len({sequence.slot for sequence in sequences}) == len(sequences) > 0
        emitted = np.full((len(sequences), call.most), -1)
        sources = emitted.copy()
        rows = zip(emitted, sources, sequences, strict=True)
        for number, (out, source, sequence) in enumerate(rows):
            row, ends = self.rows[sequence.slot], not sequence.params.ignore_eos
            assert row.sequence is sequence
            state, pages = sequence.request_state, sequence.pages
            if constrained is None:
                places = self._places(row, call, out, source)
            else:
                places = self._given_places(row, constrained, number, out, source)
            for step in places if row.remaining else ():
                self._write(state, pages, len(row.tokens) - 1, row.tokens[-1:])
                self._check(state, pages, row.tokens, len(row.tokens) - 1)
                sample = sequence.index + self.adapters.get(state.adapter, 0)
                token = next_token(row.tokens, sample, ends)
                if constrained is not None:
                    last = int((constrained.drafts.source[number] >= 0).sum())
                    column = call.width - 1 - last + step
                    token = self._constrained_token(row, constrained, number, column, token)
                out[step] = token
                row.tokens.append(int(out[step]))
                over = out[step] == END or out[step] in sequence.params.stop_token_ids
                row.remaining = 0 if over else row.remaining - 1
                if not row.remaining:
                    break
        return AsyncOutput((emitted, sources), "tokens")

    def _places(
        self, row: Row, call: DecodeCall, out: np.ndarray, source: np.ndarray
    ) -> Iterator[int]:
        """Places of the tokens that a call emits, while it writes the drafts of its steps."""
        for start in range(0, call.most, call.width):
            most = min(call.width - 1, row.remaining - 1) if row.sequence.has_drafts else 0
            drafts = self.random.randint(0, most)
            state, pages = row.sequence.request_state, row.sequence.pages
            self._write(state, pages, len(row.tokens), [VOCAB - 1] * drafts)
            first, after_last = row.sequence.predicted_places
            source[start + 1 : start + 1 + drafts] = first if first < after_last else 0
            out[start + 1 : start + 1 + drafts] = REJECTED
            yield from range(start, start + 1 + self.random.randint(0, drafts))

    def read(self, output: AsyncOutput) -> SamplerOutput | None:
        if output.index is None:
            return None
        result, sources = output.result
        token = np.array(result)
        return SamplerOutput(
            token,
            -token.astype(np.float32),
            (token[..., None] + np.arange(20)) % VOCAB,
            np.broadcast_to(-np.arange(20, dtype=np.float32), (*token.shape, 20)),
            sources,
        )

    def _write(
        self, state: RequestState, pages: Sequence[int], start: int, tokens: Sequence[int]
    ) -> None:
        size = self.shapes.page_size
        for at, token in enumerate(tokens, start):
            self.pages[state.dp_rank, pages[at // size], at % size] = _entry(state, at, token)

    def _check(
        self,
        state: RequestState,
        pages: Sequence[int],
        tokens: Sequence[int],
        query: int,
    ) -> None:
        """All that positions from `query` on see is there."""
        first = 0 if self.window is None else max(query - self.window + 1, 0)
        cached = self.pages[state.dp_rank, list(pages)].reshape(-1)[first : len(tokens)]
        expected = [_entry(state, at, token) for at, token in enumerate(tokens)][first:]
        assert cached.tolist() == expected, "a page holds other tokens, or of another kind"


def _entry(state: RequestState, position: int, token: int) -> int:
    """What the cache holds of a token."""
    kind = 2 * int.from_bytes(state.prompt_digest) + (position >= state.own_start)
    return token + VOCAB * kind


def mock_engine(
    *,
    dp_size: int = 1,
    slots: int = 4,
    page_size: int = 4,
    num_pages: int = 64,
    chunk: int = 16,
    tiles: int | None = None,
    steps: int = 3,
    context: int | None = None,
    max_model_len: int = 64,
    max_skips: int = MAX_SKIPS,
    single_step_rows: int = 0,
    window: int | None = None,
    exact_tail: int | None = None,
    width: int = 1,
    first_tokens: bool = False,
    host_pages: int = 0,
    num_adapters: int = 0,
    folder: Path | None = None,
    disk_pages: int = 2**20,
    **options,
) -> tuple[Engine, MockModelRunner]:
    """With `exact_tail` the model keeps own keys and values. `folder` is for files of pages."""
    least = -(-chunk // page_size)
    tiles = tiles or least + 3
    shapes = Shapes(
        dp_size=dp_size,
        page_size=page_size,
        num_pages=num_pages,
        table_pages=-(-max_model_len // page_size),
        slots=slots,
        decode_rows=(slots,),
        decode_steps=steps,
        decode_kinds=("sampling",),
        chunks=(chunk,),
        spare_tiles=(tiles - least,),
        contexts=(context,),
        scoring=True,
        single_step_rows=single_step_rows,
        widths=(width,) * (width > 1),
        first_tokens=first_tokens,
        host_pages=host_pages,
        num_adapters=num_adapters,
    )
    runner = MockModelRunner(shapes, window)
    if folder is not None:
        runner.host_pages.open(folder, disk_pages * (HEADER.size + 8 * page_size))
    config = dataclasses.replace(
        CONFIG,
        layer_kinds=(LayerKind(window=window),),
        generated_kv="boundary" if exact_tail is None else "own",
        exact_tail=exact_tail or 0,
    )
    settings = EngineOptions(
        max_model_len=max_model_len, max_num_seqs=dp_size * slots, scoring=True, **options
    )
    engine = Engine(
        runner, config=config, eos_token_ids=(END,), options=settings, max_skips=max_skips
    )
    return engine, runner
