"""The table of a result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from swiftkv_jax.train.far_tokens import FAR_NATS

from .. import markdown
from .students import PACKAGE_RATES
from .verdict import MAX_FAR_LOSS, Row, against, is_refused, key, of_authors, start_of

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
_VERDICTS = {"met": "better", "not met": "worse", "mixed": "mixed", "undecided": "undecided"}


def table(document: dict[str, Any]) -> str:
    """Markdown, with what the columns are above it."""
    return "\n\n".join([describe(document), LEGEND, rows_table(document["rows"])])


def rows_table(rows: Sequence[Row]) -> str:
    """A line for each student."""
    found = verdicts(rows)
    return markdown.table(HEADER, (_line(row, found[key(row)]) for row in rows))


def verdicts(rows: Sequence[Row]) -> dict[tuple, str]:
    """Of each row, by its key."""
    beside = {key(ours): _VERDICTS[against(ours, authors)] for ours, authors in of_authors(rows)}
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
        "the number of lower layers. They keep keys and values of their own, as in the teacher. "
        "The others are the upper layers; at 50 % of 8 layers K is 4.",
    ),
    ("g", "the number of upper layers that share a cache. With g = 1 none do."),
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
        "with the authors' recipe at the best of several learning rates.",
    ),
    (
        "`closed-form`",
        "the student starts from least squares, and is trained with this package's recipe, at its "
        "default learning rate unless the table names another. `closed-form, own` is fitted to "
        "`own`. Without groups it is also trained for `own`; with groups it is trained for "
        "`boundary`, and its queries are scaled for `own` afterwards.",
    ),
    ("KL", "KL(teacher \\|\\| student) in nats, the mean over the tokens after the prompt."),
    (
        "Far tokens",
        f"tokens after the prompt on which the teacher loses more than {FAR_NATS:g} nat if it sees "
        "only the last 64 tokens of the prompt. The table has the nats that the student loses "
        "there against the teacher. A loss below 0 is no gain: the student deviates from the "
        "teacher, and happens to be right more often.",
    ),
    (
        "refused",
        f"the student loses more than {MAX_FAR_LOSS:g} nats on far tokens. It no longer reads the "
        "distant prompt, however close its averages are to the teacher's.",
    ),
    (
        "better, worse, mixed, undecided",
        "the student against the authors' recipe after as many steps, by perplexity and by the "
        "loss on far tokens, where a loss below 0 counts as 0. Two figures differ where they are "
        "more than two standard errors over seeds apart, or, with one seed each, where their "
        "intervals over the files do not overlap. Better: perplexity is lower and the far loss is "
        "not higher. Mixed: one is lower, the other is higher. Worse: one is higher and none is "
        "lower. Else undecided. A lower figure does not count where the best learning rate of the "
        "authors' recipe is the smallest or the largest that was tried.",
    ),
)
"""What readers need to know before the first table."""

COLUMNS = (
    "`leader` students start from the projections of a group's first layer, and are trained with "
    "this package's recipe. `text alone` is a control that is trained on the text without a "
    "teacher. `perplexity` and `above the teacher` are of all tokens, the columns from `after the "
    "prompt` on of the tokens after the prompt. Brackets are 95 % intervals over the files. ± is "
    "the standard deviation over seeds; a row without it has one seed. The KL on far tokens also "
    "shows students that deviate there without losing nats; older results do not have it."
)
"""What the full table has besides."""
LEGEND = f"{TERMS}\n\n{COLUMNS}"


def describe(document: dict[str, Any]) -> str:
    """What was measured, in a paragraph."""
    rows = document["rows"]
    first = next(row for row in rows if row["all"])
    whole, answers, far, recall = (first[name] for name in ("all", "answers", "far", "recall"))
    sentences = [
        f"{_teacher(document)} on {document['documents']} held-out files, "
        f"{whole['tokens']:,} tokens, where the teacher's perplexity is "
        f"{whole['teacher_perplexity']:.3f}; {answers['tokens']:,} come after a prompt of "
        f"{document['prompt']}. An optimiser step has {document['tokens_per_step']:,} tokens.",
    ]
    if far:
        sentences.append(
            f"{far['tokens']:,} tokens are far, on which the teacher is at {far['teacher']:.3f} "
            f"nats; on the others it is at {first['others']['teacher']:.3f}."
        )
    if recall:
        sentences.append(
            f"Recall: {recall['tokens']:,} tokens of identifiers used once before, 256 tokens back "
            f"or more, that are ranked first, beside the teacher's {recall['teacher']:.1%}."
        )
    if blocks := next((row["blocks"] for row in rows if row["blocks"]), None):
        sentences.append(
            f"Blocks: of {blocks['prompts']} functions written greedily from their header, those "
            f"that parse (teacher {blocks['teacher']})."
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
    rate = f" at {row['learning_rate']:g}" if _has_other_rate(row) else ""
    return (
        f"{row['num_key_value_layers']} ({row['share']:.1%})",
        str(row["key_value_group_size"]),
        start_of(row),
        f"{row['steps']}{rate}" + (", text alone" if loss == "cross-entropy" else ""),
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


def _has_other_rate(row: Row) -> bool:
    """Whether its learning rate is to be named: always with the authors' recipe, with this
    package's where it is not the default."""
    default = () if row["start"] == "authors" else PACKAGE_RATES
    return bool(row["steps"]) and row["learning_rate"] not in default


def _seeds(row: Row, spread: float) -> str:
    return f" ± {spread:.3f}" if len(row["seeds"]) > 1 else ""


def _interval(figure: dict[str, float], form: str) -> str:
    value, low, high = (format(figure[part], form) for part in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def _beside_teacher(row: Row, part: str, form: str) -> str:
    """The difference of the student's figure from the teacher's."""
    return _interval(row[part]["difference"], form) if row[part] else ""
