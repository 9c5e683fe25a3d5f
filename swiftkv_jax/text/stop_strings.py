"""Stop strings, found while text appears, at a cost that does not depend on what they are."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

from ..errors import UsageError


class StopStrings:
    """Text up to the first of some strings to be complete. Holds back what may be the beginning of
    one."""

    def __init__(self, stops: Iterable[str]):
        """Raises `UsageError` for an empty string."""
        self._automaton = _automaton(tuple(stops))
        self._state = 0
        self._held = ""
        self.hit: str | None = None
        """The string that was complete first; of two at once, the longer."""

    @property
    def is_empty(self) -> bool:
        """There are no strings to look for."""
        return len(self._automaton.children) == 1

    def push(self, text: str, *, counts: bool = True) -> str:
        """The text that cannot be part of a stop string any more. After a hit, nothing. With
        `counts` False a string that is complete within `text` is none, one that begins there may
        be."""
        if self.hit:
            return ""
        children, suffixes, depths, complete = self._automaton
        if self.is_empty:
            return text
        whole = self._held + text
        before = len(self._held)
        state = self._state
        for at, character in enumerate(text, start=1):
            while state and character not in children[state]:
                state = suffixes[state]
            state = children[state].get(character, 0)
            if counts and (stop := complete[state]):
                self.hit = stop
                self._held = ""
                return whole[: before + at - len(stop)]
        certain = len(whole) - depths[state]
        self._state = state
        self._held = whole[certain:]
        return whole[:certain]

    def finish(self) -> str:
        """Return the text that was held back, now that nothing follows."""
        held = self._held
        self._held = ""
        self._state = 0
        return held


class _Automaton(NamedTuple):
    """The trie of the strings with the suffix links of Aho and Corasick (1975): a state is a
    beginning of a string, state 0 the empty one."""

    children: list[dict[str, int]]
    """The state after one more character of a string."""
    suffixes: list[int]
    """The longest proper end of a state that is a state."""
    depths: list[int]
    """Characters of a state."""
    complete: list[str | None]
    """The longest string that a state ends with."""


@functools.lru_cache(maxsize=64)
def _automaton(stops: tuple[str, ...]) -> _Automaton:
    """Build the automaton in time and memory proportional to the strings."""
    if "" in stops:
        raise UsageError("stop='': a stop string must have at least one character")
    found = _Automaton([{}], [0], [0], [None])
    for stop in stops:
        state = 0
        for character in stop:
            child = found.children[state].setdefault(character, len(found.children))
            if child == len(found.children):
                found.children.append({})
                found.suffixes.append(0)
                found.depths.append(found.depths[state] + 1)
                found.complete.append(None)
            state = child
        found.complete[state] = stop
    # Shorter states first: the suffix of a state is shorter than the state
    states = [*found.children[0].values()]
    for state in states:
        for character, child in found.children[state].items():
            suffix = found.suffixes[state]
            while suffix and character not in found.children[suffix]:
                suffix = found.suffixes[suffix]
            found.suffixes[child] = found.children[suffix].get(character, 0)
            found.complete[child] = found.complete[child] or found.complete[found.suffixes[child]]
            states.append(child)
    return found
