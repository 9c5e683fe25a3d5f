"""The states of the tokens before, of packed chunks and of decoded tokens."""

import jax.numpy as jnp
import numpy as np
import pytest

from swiftkv_jax.infer.engine.request_state import RequestState, ScheduledTokens
from swiftkv_jax.infer.engine.requests import ScoreRequest
from swiftkv_jax.infer.runner.prefill_chunk import INVALID_PAGE, pack_chunk
from swiftkv_jax.infer.runner.taps import chunk_before, decode_before

PAGE, PAGES = 4, 12


def state_of(token: int) -> list[float]:
    """The state of a token, in which it shows."""
    return [float(token), -float(token)]


def scheduled(first: int, start: int, stop: int, pages: list[int]) -> ScheduledTokens:
    """Positions `start .. stop-1` of a request whose tokens are `first`, `first` + 1, ..."""
    state = RequestState(0, ScoreRequest(range(first, first + stop + 1), 1))
    state.pages = pages
    return ScheduledTokens(state, start, stop)


def run(states, parts: list[ScheduledTokens], context_pages: int | None):
    chunk = pack_chunk(
        [parts], tokens=16, tiles=8, page_size=PAGE, table_pages=4, context_pages=context_pages
    )
    s = jnp.asarray([[state_of(token) for token in chunk.tokens[0]]])
    before = chunk_before(chunk.tiles, chunk.gathered_pages, PAGE, None)
    found, states = before(states, s)
    tokens = [token for part in parts for token in range(part.start, part.stop)]
    return np.asarray(found)[0, : len(tokens), 0].tolist(), states


@pytest.mark.parametrize("context_pages", [None, 9])
def test_a_chunk(context_pages):
    """Each token's is that of its own request: the token packed before it, the page that an
    earlier chunk wrote, or nothing; never that of another request or an older chunk."""
    states = jnp.full((PAGES, 2), 777.0)
    # a (from 100 on) and b (from 200 on) begin; b ends inside its second page
    parts = [scheduled(100, 0, 8, [3, 5, 7]), scheduled(200, 0, 6, [2, 4])]
    found, states = run(states, parts, context_pages)
    assert found == [0, *range(100, 107), 0, *range(200, 205)]
    assert np.asarray(states)[[3, 5, 2, 4], 0].tolist() == [103, 107, 203, 205]
    # b goes on inside its page and into the next one; a begins a page; c (from 300 on) shares the
    # first page of d, which comes first in the same chunk.
    parts = [
        scheduled(200, 6, 9, [2, 4, 6]),
        scheduled(100, 8, 10, [3, 5, 7]),
        scheduled(300, 0, 5, [8, 9]),
        scheduled(300, 4, 6, [8, 10]),
    ]
    found, states = run(states, parts, context_pages)
    assert found == [205, 206, 207, 107, 108, 0, 300, 301, 302, 303, 303, 304]
    expected = {4: 207, 6: 208, 7: 109, 8: 303, 9: 304, 10: 305, 3: 103, 0: 777, 11: 777}
    assert {page: float(states[page, 0]) for page in expected} == expected


def test_decoded_tokens():
    """At position 0, inside a page, at the start of one, and of a sequence that has ended."""
    states = jnp.asarray([state_of(10 * page) for page in range(PAGES)])
    page, last = jnp.array([1, 2, 4, INVALID_PAGE]), jnp.array([1, 2, 3, 5])
    s = jnp.asarray([[state_of(token)] for token in (101, 102, 103, 104)])
    before = decode_before(page, last, jnp.array([0, 6, 4, 7]), None)
    found, states = before(states, s)
    assert found[:, 0, 0].tolist() == [0, 20, 30, 50]
    assert states[:, 0].tolist() == [0, 101, 102, 30, 103, *range(50, 120, 10)]
