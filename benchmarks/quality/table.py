"""The table of a result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swiftkv_jax.train.loss.far_tokens import FAR_NATS

from .. import markdown
from .students import PACKAGE_RATES
from .verdict import (
    MAX_FAR_LOSS,
    Row,
    comparisons,
    is_refused,
    key,
    start_of,
)

HEADER = (
    "K of layers",
    "g",
    "start",
    "steps",
    "serving",
    "perplexity",
    "above the teacher",
    "after the prompt",
    "KL",
    "agreement",
    "far tokens, nats lost",
    "far tokens, KL",
    "recall",
    "blocks",
    "verdict",
)
VERDICT_NAMES = {"met": "better", "not met": "worse", "mixed": "mixed", "undecided": "undecided"}


def table(document: dict[str, Any]) -> str:
    """Markdown, with what the columns are above it."""
    about = f"{describe(document)} {describe_answers(document)}"
    return "\n\n".join([about, LEGEND, rows_table(document["rows"])])


def rows_table(rows: Sequence[Row]) -> str:
    """A line for each student."""
    found = verdicts(rows)
    return markdown.table(HEADER, (_line(row, found[key(row)]) for row in rows))


def verdicts(rows: Sequence[Row]) -> dict[tuple, str]:
    """Of each row, by its key."""
    beside = {key(ours): VERDICT_NAMES[outcome] for ours, _, outcome in comparisons(rows)}
    return {
        key(row): ", ".join(
            filter(None, [beside.get(key(row)), "refused" if is_refused(row) else ""])
        )
        for row in rows
    }


def _bullets(*terms: tuple[str, str]) -> str:
    return "\n".join(f"- **{term}**: {meaning}" for term, meaning in terms)


TERMS = _bullets(
    (
        "K",
        "the number of lower layers, which have keys and values of their own as in the teacher. "
        "The layers above them are the upper layers. 50 % of 8 layers is K = 4.",
    ),
    ("g", "the number of upper layers that share a cache; g = 1 means that no layers share."),
    (
        "`boundary`",
        "the upper keys and values of every token come from the hidden state that enters layer K.",
    ),
    (
        "`own`",
        "tokens after the prompt keep their own upper keys and values, computed as in the teacher. "
        "With `own+64` the last 64 tokens of the prompt keep theirs too.",
    ),
    (
        "`authors`",
        "the student starts from the teacher's projections (their mean in a group), and is trained "
        "with the authors' recipe at the best of several learning rates (`64 at 0.004`: 64 steps "
        "at 0.004).",
    ),
    (
        "`closed-form`",
        "the student starts from a least-squares fit, and is trained with this package's recipe, "
        "at a learning rate of 0.002 unless the table names another. `closed-form, own` is fitted "
        "to `own`. With g = 1 it is also trained for `own`, without an exact tail; with larger "
        "groups it is trained for `boundary`, and its queries are scaled for `own` afterwards.",
    ),
    ("KL", "KL(teacher \\|\\| student) in nats, the mean over the tokens after the prompt."),
    (
        "Far tokens",
        f"tokens after the prompt on which the teacher loses more than {FAR_NATS:g} nat if it sees "
        "only the last 64 tokens of the prompt. The tables show how many nats the student loses "
        "on them against the teacher. A loss below 0 is no gain: the student deviates from the "
        "teacher and happens to be right more often.",
    ),
    (
        "refused",
        f"the student loses more than {MAX_FAR_LOSS:g} nats on far tokens, or its KL there is "
        "larger than that, where the KL was measured. It no longer reads the distant prompt as the "
        "teacher does, however close its averages are to the teacher's.",
    ),
)
VERDICTS = "\n\n".join(
    [
        "The verdict also compares a student from the closed form with the authors' recipe after "
        "the same number of steps, by perplexity and by the loss on far tokens:",
        _bullets(
            ("better", "perplexity is lower and the far loss is not higher."),
            ("mixed", "one of them is lower, the other is higher."),
            ("worse", "one of them is higher, and neither is lower."),
            ("undecided", "everything else."),
        ),
        "A figure of this package's student counts as lower if it is lower by more than two "
        "standard errors over seeds, and if the 95 % interval of the difference over the files "
        "does not include 0. It counts as higher if one of the two says so. The perplexity of a "
        "student with one seed is given the spread over seeds that is the median of the same "
        "teacher's students with several. Losses on far tokens of one seed each are compared over "
        "the files alone. Where an older result has no sums of each file, seeds decide alone, or, "
        "with one seed each, whether the intervals overlap. A far loss below 0 counts as 0. A "
        "lower figure does not count if the best learning rate of the authors' recipe is the "
        "smallest or the largest that was tried, because another rate may be better. The best "
        "rates of both recipes are chosen by the perplexity on the same files that the tables "
        "report, which flatters both a little. The steps of both see the same tokens; the closed "
        "form has also seen its calibration tokens, 256 for each entry of the hidden state "
        "(those of 8 steps for the demo model, 12 for t1, 24 for t2).",
    ]
)
"""What readers need to know before the first table."""

COLUMNS = (
    "`leader` students start from the projections of a group's first layer, and are trained with "
    "this package's recipe. There are two controls: `text alone` is trained on the text without a "
    "teacher, and `own (trained for it)` has groups, is scaled first and then trained for `own`. "
    "`perplexity` and `above the teacher` are of all tokens; the columns from `after the prompt` "
    "on are of the tokens after the prompt. Brackets are 95 % intervals over the files. ± is the "
    "standard deviation over seeds; a row without it has one seed. The KL on far tokens also shows "
    "students that deviate there without losing nats; older results do not have it."
)
"""What readers of the full table need to know too."""
LEGEND = f"{TERMS}\n\n{VERDICTS}\n\n{COLUMNS}"


def describe(document: dict[str, Any]) -> str:
    """What was measured, in a paragraph."""
    first = next(row for row in document["rows"] if row["all"])
    whole, answers, far = (first[name] for name in ("all", "answers", "far"))
    sentences = [
        f"{_teacher(document)} has a perplexity of {whole['teacher_perplexity']:.3f} on "
        f"{whole['tokens']:,} tokens of {document['documents']} held-out files. "
        f"{answers['tokens']:,} of them come after a prompt of {document['prompt']} tokens.",
    ]
    if far:
        sentences.append(
            f"{far['tokens']:,} are far tokens; the teacher's cross-entropy is "
            f"{far['teacher']:.3f} nats on them and {first['others']['teacher']:.3f} on the others "
            f"after the prompt."
        )
    sentences.append(f"An optimiser step has {document['tokens_per_step']:,} tokens.")
    return " ".join(sentences)


def describe_answers(document: dict[str, Any]) -> str:
    """What the columns of recall and blocks are."""
    rows, sentences = document["rows"], []
    if recall := next(row["recall"] for row in rows if row["all"]):
        sentences.append(
            f"`recall` is how often the student ranks the right token first, minus how often the "
            f"teacher does ({recall['teacher']:.1%}), on {recall['tokens']:,} tokens of "
            f"identifiers that were used once before, at least 256 tokens back."
        )
    if blocks := next((row["blocks"] for row in rows if row["blocks"]), None):
        sentences.append(
            f"`blocks` is how many of {blocks['prompts']} functions, written greedily from their "
            f"header, parse as Python (the teacher's: {blocks['teacher']})."
        )
    return " ".join(sentences)


def _teacher(document: dict[str, Any]) -> str:
    """The subject of a sentence."""
    layers, teacher = document["layers"], document.get("teacher", {"name": "demo"})
    if "tokens" not in teacher:
        return f"The demo model ({layers} layers)"
    parameters, tokens = (teacher[name] / 1e6 for name in ("parameters", "tokens"))
    return (
        f"The teacher `{teacher['name']}` ({layers} layers, {parameters:.1f}M parameters, trained "
        f"on {tokens:.1f}M tokens)"
    )


def _line(row: Row, verdict: str) -> tuple[str, ...]:
    whole, answers, blocks = row["all"], row["answers"], row["blocks"]
    *_, loss = key(row)
    return (
        f"{row['num_key_value_layers']} ({row['share']:.1%})",
        str(row["key_value_group_size"]),
        start_of(row),
        steps_of(row) + (", text alone" if loss == "cross-entropy" else ""),
        row["mode"],
        f"{whole['perplexity']:.3f}" + _seeds(row, whole["perplexity_std"]) if whole else "",
        _interval(whole["above"], "+.2%") if whole else "",
        _interval(answers["above"], "+.2%"),
        f"{answers['kl']['value']:.4f}",
        f"{answers['agreement']['value']:.1%}",
        _beside_teacher(row, "far", "+.3f"),
        f"{row['far']['kl']['value']:.3f}" if "kl" in (row["far"] or {}) else "",
        _beside_teacher(row, "recall", "+.1%"),
        "" if blocks is None else str(blocks["student"]),
        verdict,
    )


def steps_of(row: Row) -> str:
    """Its steps and learning rate; this package's default rate is not named."""
    default = () if row["start"] == "authors" else PACKAGE_RATES
    if not row["steps"] or row["learning_rate"] in default:
        return str(row["steps"])
    return f"{row['steps']} at {row['learning_rate']:g}"


def _seeds(row: Row, spread: float) -> str:
    return f" ± {spread:.3f}" if len(row["seeds"]) > 1 else ""


def _interval(figure: dict[str, float], form: str) -> str:
    value, low, high = (format(figure[part], form) for part in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def _beside_teacher(row: Row, part: str, form: str) -> str:
    """The difference of the student's figure from the teacher's."""
    return _interval(row[part]["difference"], form) if row[part] else ""
