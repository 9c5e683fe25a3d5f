"""Generated documents and questions that only who has read them can answer.

`RECALL`: lines of a register, and some of the keys again, whose values are asked for. `PEOPLE`:
sentences about people among others, and questions about some. `IDENTIFIERS`: functions with
invented names, and calls of some, whose names are to be completed from their first parts. Each
question has one answer, which stands in the document word for word.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from swiftkv_jax.errors import UsageError

QUESTIONS = {512: 4, 1024: 8, 2048: 16, 4096: 16}
"""Tokens of a row, document and questions together -> number of questions."""
_ROOM_PER_QUESTION = 40
"""Tokens kept for a question and its answer: invented names take the most."""

Rng = np.random.Generator


@dataclasses.dataclass(frozen=True)
class Quiz:
    """A document and questions after it, with their answers."""

    text: str
    document: int
    """Characters of the document."""
    answers: tuple[tuple[int, int], ...]
    """(first character, character after the last) of each answer, the space before it included."""


@dataclasses.dataclass(frozen=True)
class Fact:
    """What a document says once, and how it is asked for."""

    statement: str
    question: str
    answer: str
    """With the space that stands before it."""
    after: str
    """What follows the answer."""


@dataclasses.dataclass(frozen=True)
class Task:
    """A kind of document."""

    name: str
    facts: Callable[[Rng], Iterator[Fact]]
    """An endless stream of facts without repetition, or as many as there are."""
    opening: str
    between: str
    """What stands between the document and the questions."""


def quizzes(task: Task, tokenizer: Any, length: int, count: int, seed: int) -> list[Quiz]:
    """`count` documents that fill rows of `length` tokens, a key of `QUESTIONS`, with questions
    about facts at random places. Raises `UsageError` for a tokenizer that needs so many tokens that
    there are too few facts."""
    rng = np.random.default_rng([seed, length, TASKS.index(task)])
    return [_quiz(task, tokenizer, length, rng) for _ in range(count)]


def _quiz(task: Task, tokenizer: Any, length: int, rng: Rng) -> Quiz:
    questions = QUESTIONS[length]
    room = length - questions * _ROOM_PER_QUESTION
    stated = list[Fact]()
    used = len(tokenizer(task.opening + task.between)["input_ids"])
    for fact in task.facts(rng):
        used += len(tokenizer(fact.statement, add_special_tokens=False)["input_ids"])
        if used > room:
            break
        stated.append(fact)
    if len(stated) < questions:
        raise UsageError(
            f"{task.name}: {length} tokens hold {len(stated)} facts and {questions} are asked for"
        )
    chosen = rng.choice(len(stated), questions, replace=False)
    text = task.opening + "".join(fact.statement for fact in stated) + task.between
    document = len(text)
    answers = list[tuple[int, int]]()
    for fact in (stated[i] for i in chosen):
        text += fact.question
        answers.append((len(text), len(text) + len(fact.answer)))
        text += fact.answer + fact.after
    return Quiz(text, document, tuple(answers))


# The facts ---------------------------------------------------------------------

_ADJECTIVES = (
    "amber brisk calm dusty eager faint gentle hollow icy jolly keen lively mellow narrow open "
    "polite quick rusty silent tidy upper vivid warm young zesty bitter clever distant early frosty"
).split()
_NOUNS = (
    "anchor basket candle desert engine falcon garden hammer island jacket kettle lantern meadow "
    "needle orchard pencil quarry ribbon saddle temple umbrella valley window yard anvil bridge "
    "carpet dragon ferry glacier"
).split()
_FIRST = (
    "Ada Boris Clara Dario Elena Felix Greta Hugo Irene Jonas Karin Leo Mira Nils Olga Pavel Rosa "
    "Stefan Tessa Ulrich Vera Walter Yara Zoltan"
).split()
_LAST = (
    "Abbot Brandt Castle Dorn Ekman Fischer Garner Holt Ivers Jansen Keller Lindqvist Moreau Novak "
    "Olsen Parker Quist Reyes Sommer Thorn Ullman Varga Weber Zeller"
).split()
_CITIES = (
    "Lisbon Oslo Prague Dublin Vienna Athens Madrid Warsaw Helsinki Geneva Naples Hamburg Boston "
    "Denver Toronto Lima Cairo Nairobi Mumbai Seoul Kyoto Sydney Havana Riga"
).split()
_JOBS = (
    "baker pilot nurse farmer plumber lawyer dentist painter driver teacher butcher sailor "
    "librarian mechanic gardener tailor carpenter journalist chemist translator"
).split()
_PETS = (
    "parrot cat dog rabbit turtle hamster goldfish pony lizard canary ferret snake goat duck"
).split()
_FILLER = (
    "The market opens at eight on most days.",
    "It rained for most of the week.",
    "The old road along the river was closed in spring.",
    "A new bridge was built near the station last year.",
    "Trains to the coast run twice a day.",
    "Nobody remembers who planted the trees in the square.",
)
_SYLLABLES = "bra cor del fin gus hal jor kel lum mip nor pra quo ren sil tav ulm vex wim zan"
_VERBS = "Counts Sorts Merges Prints Checks Saves Loads Splits Joins Removes".split()
_OBJECTS = "orders letters parcels tickets receipts invoices labels drawings recipes bookings"


def _shuffled(rng: Rng, *words: Sequence[str]) -> Iterator[tuple[str, ...]]:
    """All combinations in random order."""
    found = list(itertools.product(*words))
    return (found[i] for i in rng.permutation(len(found)))


def _register(rng: Rng) -> Iterator[Fact]:
    for adjective, noun in _shuffled(rng, _ADJECTIVES, _NOUNS):
        key = f"{adjective}-{noun}:"
        value = f" {rng.integers(1_000, 10_000)}"
        yield Fact(f"{key}{value}\n", key, value, "\n")


def _people(rng: Rng) -> Iterator[Fact]:
    for number, (first, last) in enumerate(_shuffled(rng, _FIRST, _LAST)):
        city, job, pet = (str(rng.choice(words)) for words in (_CITIES, _JOBS, _PETS))
        filler = _FILLER[rng.integers(len(_FILLER))]
        statement = f"{first} {last} lives in {city}, works as a {job} and has a {pet}. {filler}\n"
        asked, answered, answer = (
            ("In which city does {} live?", "{} lives in", city),
            ("What is the job of {}?", "{} works as a", job),
            ("Which pet does {} have?", "{} has a", pet),
        )[number % 3]
        question = f"Question: {asked}\nAnswer: {answered}".replace("{}", f"{first} {last}")
        yield Fact(statement, question, f" {answer}", ".\n")


def _functions(rng: Rng) -> Iterator[Fact]:
    syllables = _SYLLABLES.split()
    seen = set[str]()
    for verb, adjective, things in _shuffled(rng, _VERBS, _ADJECTIVES, _OBJECTS.split()):
        first, second = ("".join(rng.choice(syllables, 3)) for _ in range(2))
        if first in seen:
            continue
        seen.add(first)
        statement = (
            f"def {first}_{second}(values):\n"
            f'    """{verb} the {adjective} {things}."""\n'
            f"    return run(values, {len(seen)})\n\n\n"
        )
        yield Fact(statement, f"values = {first}", f"_{second}", "(values)\n")


RECALL = Task("recall", _register, "Register\n\n", "\nSome of the lines again:\n\n")
PEOPLE = Task("questions", _people, "", "\nQuestions about the text above:\n\n")
IDENTIFIERS = Task("identifiers", _functions, "", "values = read()\n")
TASKS = (RECALL, PEOPLE, IDENTIFIERS)
