"""The interface between the engine and its model runner."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from .constrained import ConstrainedCall
from .host_tier import HostMemory
from .request_state import Chunk, SequenceState
from .sampler_output import AsyncOutput, SamplerOutput
from .shapes import DecodeCall, Shapes

if TYPE_CHECKING:  # it needs JAX, the engine does not
    from ...model.model import Model


class Adapter(NamedTuple):
    """An adapter that a model runner has read."""

    layers: Any
    """Its matrices, as the model runner keeps them."""
    prompt_digest: bytes
    """Digest of those that keys and values of prompts depend on; empty if there are none: the
    prefix cache of the model is then the adapter's too."""


class ModelRunnerBase(HostMemory, Protocol):
    """Interface that the engine needs of a model runner. A test double needs no model."""

    shapes: Shapes
    wide_costs: tuple[float, ...]
    """Cost of a step of a wide call beside one of width 1, for each of `Shapes.decode_rows`; known
    after `prepare`, and equal in all processes."""

    def prepare(self) -> None:
        """Compile everything, allocate the memory, and start counting compilations: after this
        there should be none."""
        ...

    def num_compilations(self) -> int:
        """Programs that the process has compiled since the first `prepare` ended."""
        ...

    def update_weights(self, model: Model, *, donate: bool) -> None:
        """Serve the weights of `model`. See `Engine.update_weights`; no sequence runs."""
        ...

    def read_adapter(self, path: Path) -> Adapter:
        """Read an adapter for `insert_adapter`, in any thread. Raises `CheckpointError` and
        `ConfigError`."""
        ...

    def insert_adapter(self, number: int, adapter: Adapter) -> None:
        """Let the calls from now on find an adapter at a number from 1 on (`RequestState.adapter`),
        at most `Shapes.num_adapters`. No sequence that runs has this number."""
        ...

    def remove_sequences(self, slots: Sequence[int]) -> None:
        """Stop the sequences in these slots."""
        ...

    def add_sequences(self, sequences: Sequence[SequenceState]) -> None:
        """Start decoding sequences, whose prompts are cached, with the next decode call."""
        ...

    def update_pages(self, sequences: Sequence[SequenceState]) -> None:
        """Let running sequences use the pages that were added to them."""
        ...

    def run_chunk(self, chunk: Chunk) -> AsyncOutput | None:
        """Run a chunk of prefill, then its page copies. `read` returns an entry for each scored
        token, in the order of `Chunk.scheduled_tokens`."""
        ...

    def run_last_chunk(self, chunk: Chunk) -> AsyncOutput:
        """`run_chunk`, and one step of the sequence whose prompt the chunk ends, which has been
        added, in one call. `read` returns B 1. Needs `Shapes.first_tokens`, and room in a chunk for
        one token more."""
        ...

    def run_decode(self, sequences: Sequence[SequenceState], call: DecodeCall) -> AsyncOutput:
        """Decode. `read` returns up to M T tokens for each sequence, in `call.steps` (M) steps of
        `call.width` (T) tokens or fewer: B M T, -1 or `REJECTED` where there is none. `steps` is
        `decode_steps`, or 1 for at most `single_step_rows` sequences, and `Shapes.wide_call` says
        which widths there are."""
        ...

    def run_decode_constrained(self, call: ConstrainedCall) -> AsyncOutput:
        """Decode a step of sequences that follow a grammar. `read` returns B T, as for
        `run_decode`. Needs `structured_outputs`."""
        ...

    def is_idle(self) -> bool:
        """True if the device has done the last chunk and the last decode call."""
        ...

    def read(self, output: AsyncOutput) -> SamplerOutput | None:
        """Wait for a result: NumPy arrays."""
        ...
