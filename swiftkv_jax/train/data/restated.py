"""Examples whose answers repeat parts of their prompts in another order, made from any text.

Most tokens of text follow from what is near, so a short training on text alone can teach a student
to attend less to the prompt keys that it predicts. Here the answer can only be read in the prompt.
Three in five examples are records of a key and a value, invented from the words of the text, in
one of `FORMATS`; the others are lines or sentences of a document.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ...errors import DataError, UsageError
from ...process import files
from .dataset import is_packed_dataset
from .documents import Document
from .sources import DataSource, find_files, read_file, unweighted

DOCUMENTS = 10_000
"""Documents that are read, the first ones of every source in turn."""
RECORDS_SHARE = 0.6
PROMPT_SHARE = 0.55
"""Share of an example's tokens that the prompt takes; the answer gets the rest."""
SPECIAL_TOKENS = 2
"""Room for the first and the last token that a tokenizer adds."""
MIN_PARTS = 4
"""Lines or sentences of a prompt, which fill half of its room: less is no example."""
MIN_WORDS = 16
"""Different words that the text must have for keys and values to be invented."""

Rng = np.random.Generator


class Format(NamedTuple):
    """A form of records."""

    record: str
    """Text with `{k}` and `{v}` for key and value."""
    is_code: bool = False
    """True where key and value are names."""


FORMATS = (
    *map(
        Format,
        (
            "{k} = {v}\n",
            '"{k}": "{v}",\n',
            "| {k} | {v} |\n",
            "{k} -> {v}\n",
            "<{k}>{v}</{k}>\n",
            "{k},{v}\n",
            "{k}\t{v}\n",
            "The {k} is {v}.\n",
            "({k}) {v}\n",
            "set {k} to {v};\n",
        ),
    ),
    *(
        Format(text, is_code=True)
        for text in (
            "def {k}({v}):\n    return {v}\n\n",
            "class {k}({v}):\n    pass\n\n",
            "from {v} import {k}\n",
            "{k} = {v}()\n",
            "const {k} = new {v}();\n",
        )
    ),
)
HEADINGS = ("", "Records:\n", "# values\n", "Notes\n\n", "Below is a list.\n\n")
REPEATS = ("\nAgain:\n", "\n---\n", "\n# repeated\n", "\nIn another order:\n\n", "\n\n")
"""Text between a prompt's parts and the answer."""


def write(
    sources: Sequence[str], tokenizer: Any, file: Path, examples: int, length: int, seed: int = 0
) -> None:
    """Write the rows of `restate`, made of the texts of `sources` (values of `--data`), as JSONL.
    Raises its errors and those of `read_texts`."""
    rows = restate(read_texts(sources), tokenizer, examples, length, seed)
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    files.write_atomic(file, "".join(lines).encode())


def read_texts(sources: Sequence[str]) -> list[str]:
    """The texts of `DOCUMENTS` documents, conversations as their messages one after the other.
    Raises the errors of `find_files` and `read_file`."""
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*map(_texts, sources)))
    return list(itertools.islice(filter(None, in_turn), DOCUMENTS))


def _texts(source: str) -> Iterator[str]:
    path = unweighted("data", source).path
    if is_packed_dataset(Path(path)):
        raise UsageError(f"`data`={path}: prepared already; name the text that it was made of")
    for file in find_files(DataSource(path)):
        for document in read_file(file):
            if isinstance(document, Document):
                contents = [message["content"] for message in document.messages or ()]
                yield document.text or "\n".join(one for one in contents if isinstance(one, str))


def restate(
    texts: Sequence[str], tokenizer: Any, examples: int, length: int, seed: int = 0
) -> Iterator[dict[str, str]]:
    """Yield rows of the fields `prompt` and `completion`, which have about `length` tokens together
    and not more. The same texts, tokenizer and seed give the same rows.

    Raises `DataError` if the texts have too few words, or no document that has enough lines or
    sentences.
    """
    words = sorted({word.lower() for text in texts for word in re.findall(r"[^\W\d_]{4,10}", text)})
    if len(words) < MIN_WORDS:
        raise DataError(
            f"`data`: {len(words)} different words of 4 to 10 letters, and keys and values are "
            f"made of at least {MIN_WORDS}"
        )

    def count(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    room = int(PROMPT_SHARE * length)
    rng = np.random.default_rng(seed)
    for _ in range(examples):
        if rng.random() < RECORDS_SHARE:
            parts = _fill(_records(_Names(words, rng)), count, room)
        else:
            parts = _parts(texts, count, room, rng)
        prompt = HEADINGS[rng.integers(len(HEADINGS))] + "".join(parts)
        prompt += REPEATS[rng.integers(len(REPEATS))]
        order = [parts[i] for i in rng.permutation(len(parts))]
        answer = _fill(order, count, length - SPECIAL_TOKENS - count(prompt))
        while count(prompt + "".join(answer)) > length - SPECIAL_TOKENS:
            answer.pop()  # together they can be more tokens than apart
        yield {"prompt": prompt, "completion": "".join(answer)}


def _fill(parts: Iterator[str] | list[str], count: Callable[[str], int], room: int) -> list[str]:
    """The first parts that have `room` tokens together or fewer."""
    found = []
    for part in parts:
        room -= count(part)
        if room < 0:
            break
        found.append(part)
    return found


def _parts(texts: Sequence[str], count: Callable[[str], int], room: int, rng: Rng) -> list[str]:
    """Different lines or sentences, one after the other, of a document."""
    numbers: list[int] = rng.integers(len(texts), size=1_000).tolist()
    for number in numbers:
        text = texts[number]
        if rng.random() < 0.5:
            found = [line for line in text.splitlines() if 16 < len(line.strip()) < 120]
        else:
            sentences = re.split(r"(?<=[.:;!?])\s+|(?<=[。！？])", " ".join(text.split()))
            found = [one for one in sentences if 20 < len(one) < 240]
        found = [f"{one}\n" for one in dict.fromkeys(found)]
        first = int(rng.integers(max(1, len(found) - 2 * MIN_PARTS)))
        found = _fill(found[first:], count, room)
        if len(found) >= MIN_PARTS and sum(map(count, found)) > room / 2:
            return found
    raise DataError(f"`data`: no document has lines or sentences for a prompt of {room} tokens")


def _records(names: _Names) -> Iterator[str]:
    """Endless records of different keys in one format, with values of one kind or of all."""
    form = names.choose(FORMATS)
    key = names.identifier if form.is_code else names.key
    kinds = [names.word, names.identifier]
    if not form.is_code:
        kinds += [names.digits, names.hexadecimal]
    values = [*([kind] for kind in kinds), kinds]
    chosen = names.choose(values)
    seen = set[str]()
    while True:
        if (name := key()) not in seen:
            seen.add(name)
            yield form.record.replace("{k}", name).replace("{v}", names.choose(chosen)())


class _Names:
    """Keys and values, invented at random."""

    def __init__(self, words: Sequence[str], rng: Rng):
        self.words = words
        self.rng = rng

    def choose(self, among: Sequence[Any]) -> Any:
        return among[int(self.rng.integers(len(among)))]

    def word(self) -> str:
        return self.choose(self.words)

    def digits(self) -> str:
        return "".join(str(digit) for digit in self.rng.integers(10, size=self.rng.integers(2, 7)))

    def hexadecimal(self) -> str:
        return "".join(
            f"{digit:x}" for digit in self.rng.integers(16, size=self.rng.integers(4, 9))
        )

    def identifier(self) -> str:
        """A name of syllables of words, in snake case or camel case."""
        parts = [
            "".join(self.word()[:3] for _ in range(self.rng.integers(1, 3)))
            for _ in range(self.rng.integers(1, 4))
        ]
        if self.rng.random() < 0.5:
            return "".join(part.title() for part in parts)
        return "_".join(parts)

    def key(self) -> str:
        two = self.choose(("_", " ", ".")).join((self.word(), self.word()))
        numbered = f"{self.word()} {self.digits()[:3]}"
        return self.choose((two, numbered, self.word(), self.identifier()))
