"""A model that does what its prompt says: an engine without weights, for clients that need sensible
answers and real calls of tools.

The last turn of the user with one of these, up to the end of a line, is its script:

    Call: {"name": ..., "arguments": {...}}    calls a tool; several are one call after another
    Say: text                                  the answer after them; `{result}` in it is what the
                                               last tool returned, `\\n` a new line

The number of results after that turn tells how far the script is, so the model keeps nothing
between requests. An answer in words ends the script. A call of a tool that the request has not is
left out.
"""

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import AddedToken
from transformers import AutoTokenizer

from swiftkv_jax import demo
from swiftkv_jax.infer.engine.constrained import ConstrainedCall
from swiftkv_jax.infer.engine.engine import Engine
from swiftkv_jax.infer.engine.options import EngineOptions
from swiftkv_jax.infer.engine.request_state import RequestState, SequenceState
from swiftkv_jax.infer.engine.sampler_output import NON_FINITE, AsyncOutput, SamplerOutput
from swiftkv_jax.infer.engine.shapes import DecodeCall, Shapes
from swiftkv_jax.infer.structured.structured_outputs import GrammarCompiler
from swiftkv_jax.serve.app import Loaded
from tests.infer.mock_model_runner import CONFIG, MockModelRunner

MAX_MODEL_LEN = 131_072
"""Larger than the first prompts of all agents, and small enough to fill."""
SILENT = "Done."
"""Answer to a prompt without a script."""


def make_tokenizer() -> Any:
    """The demo's, with the added tokens and a chat template in Qwen's form. As in Qwen's own
    tokenizers the tags of calls are single tokens, and not special ones."""
    tokenizer = AutoTokenizer.from_pretrained(demo.LLAMA)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    tags = [AddedToken(tag, normalized=False) for tag in ("<tool_call>", "</tool_call>")]
    tokenizer.add_tokens(tags)
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.chat_template = (Path(__file__).parent / "qwen.jinja").read_text(encoding="utf-8")
    return tokenizer


def answer_to(prompt: str) -> str:
    """What the model writes after a prompt."""
    turns = re.findall(r"<\|im_start\|>(\w+)\n(.*?)(?=<\|im_end\|>|\Z)", prompt, re.DOTALL)
    script, results = "", []
    for role, text in turns[:-1]:
        if text.startswith("<tool_response>"):
            results.append(
                text.removeprefix("<tool_response>\n").removesuffix("\n</tool_response>")
            )
        elif role == "user" and re.search("Call: {|Say: ", text):
            script, results = text, []
        elif role == "assistant" and "<tool_call>" not in text:
            script, results = "", []
    declared = re.search(r"<tools>(.*?)</tools>", prompt, re.DOTALL)
    tools = re.findall(r'"name": "([^"]+)"', declared[1]) if declared else []
    calls = re.findall(r'Call: (\{"name": "([^"]+)".*\})', script)
    for call, name in calls[len(results) :]:
        if name in tools:
            return f"<tool_call>\n{call}\n</tool_call>"
    said = re.search("Say: (.*)", script)
    text = said[1].replace("\\n", "\n") if said else SILENT
    return text.replace("{result}", results[-1].strip() if results else "no result")


class ScriptedModelRunner(MockModelRunner):
    """Writes `answer_to` its prompt, as far as a grammar lets it."""

    def __init__(self, shapes: Shapes, tokenizer: Any):
        super().__init__(shapes)
        self._tokenizer, self._end = tokenizer, tokenizer.eos_token_id
        self._answers: dict[int, list[int]] = {}
        """Slot -> tokens that are still to be written."""

    def add_sequences(self, sequences: Sequence[SequenceState]) -> None:
        super().add_sequences(sequences)
        for sequence in sequences:
            tokens = sequence.request_state.prefill_token_ids
            self._answers[sequence.slot] = self._tokens(answer_to(self._tokenizer.decode(tokens)))

    def _tokens(self, text: str) -> list[int]:
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def run_decode(self, sequences: Sequence[SequenceState], call: DecodeCall) -> AsyncOutput:
        return self._write_answers(sequences, call)

    def run_decode_constrained(self, call: ConstrainedCall) -> AsyncOutput:
        assert call.width == 1, "the server has no --speculative-config"
        allowed = np.unpackbits(call.masks[:, 0].view(np.uint8), axis=1, bitorder="little")
        return self._write_answers(call.sequences, DecodeCall(1), allowed)

    def _write_answers(
        self,
        sequences: Sequence[SequenceState],
        call: DecodeCall,
        allowed: np.ndarray | None = None,
    ) -> AsyncOutput:
        emitted = np.full((len(sequences), call.steps), -1)
        for number, sequence in enumerate(sequences):
            row = self.rows[sequence.slot]
            for step in range(min(call.steps, row.remaining)):
                mask = None if allowed is None else allowed[number]
                emitted[number, step] = token = self._next(sequence.slot, mask)
                row.remaining = 0 if token in (self._end, NON_FINITE) else row.remaining - 1
                if not row.remaining:
                    break
        return AsyncOutput(emitted, "tokens")

    def _next(self, slot: int, allowed: np.ndarray | None) -> int:
        """The next token of the answer, or with a grammar the longest with which it goes on."""
        rest = self._answers[slot]
        token = rest[0] if rest else self._end
        if allowed is None or allowed[token]:
            del rest[:1]
            return token
        text = self._tokenizer.decode(rest)
        texts = {one: self._tokenizer.decode([one]) for one in map(int, np.flatnonzero(allowed))}
        going_on = [one for one, part in texts.items() if part and text.startswith(part)]
        if not going_on:
            return NON_FINITE  # ends the request with an error: the script is no such answer
        token = max(going_on, key=lambda one: len(texts[one]))
        self._answers[slot] = self._tokens(text.removeprefix(texts[token]))
        return token

    def read(self, output: AsyncOutput) -> SamplerOutput | None:
        if output.index is None:
            return None
        token = np.array(output.result)
        nothing = np.full((*token.shape, 20), -1)
        return SamplerOutput(token, np.zeros(token.shape, np.float32), nothing, nothing * np.inf)

    def _write(
        self, state: RequestState, pages: Sequence[int], start: int, tokens: Sequence[int]
    ) -> None:
        """Pages are checked by the engine's own tests; prompts here are long."""

    def _check(
        self,
        state: RequestState,
        pages: Sequence[int],
        tokens: Sequence[int],
        query: int,
    ) -> None: ...


def load() -> Loaded:
    """An engine of this model, for a server."""
    tokenizer = make_tokenizer()
    vocab_size = len(tokenizer)
    page_size, slots, chunk = 128, 8, 8192
    shapes = Shapes(
        dp_size=1,
        page_size=page_size,
        num_pages=slots * MAX_MODEL_LEN // page_size,
        table_pages=MAX_MODEL_LEN // page_size,
        slots=slots,
        decode_rows=(slots,),
        decode_steps=4,
        decode_kinds=("sampling",),
        chunks=(chunk,),
        spare_tiles=(slots,),
        contexts=(None,),
        scoring=False,
        single_step_rows=slots,
        structured_outputs=True,
    )
    options = EngineOptions(
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=slots,
        page_size=page_size,
        structured_outputs=True,
    )
    config = dataclasses.replace(
        CONFIG, vocab_size=vocab_size, max_position_embeddings=MAX_MODEL_LEN
    )
    ends = [tokenizer.eos_token_id]
    engine = Engine(
        ScriptedModelRunner(shapes, tokenizer),
        config=config,
        eos_token_ids=ends,
        options=options,
    )
    compiler = GrammarCompiler(tokenizer, vocab_size=vocab_size, eos_token_ids=ends)
    return Loaded(engine, tokenizer, {}, 0.0, compiler)
