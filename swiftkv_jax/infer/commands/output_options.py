"""Options of the commands that write rows."""

import functools

from ...cli.fields import option

output = functools.partial(
    option,
    None,
    "a row per row of input, in its order (default: %(default)s)",
    metavar="JSONL",
    names=("--output", "-o"),
)
resume = functools.partial(
    option, False, "continue the --output of an interrupted run, if there is one"
)
