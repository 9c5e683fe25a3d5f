"""Options as fields of dataclasses, which give the flags of the commands.

    max_num_seqs: int = option(64, "sequences that decode together (default: %(default)s)")

The name, type, default and help of the field are those of the flag.
`add_flags` adds the flags of a class to a parser. `given` reads the parsed arguments, without those
that were left out: for them the defaults of the class, or of a command, count. `check_options`
holds the fields of an object to their types and smallest values.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal

from ..errors import UsageError

MISSING: Any = dataclasses.MISSING
"""The default of a field without one."""


@dataclasses.dataclass(frozen=True)
class Flag:
    """The way to give a field on a command line."""

    help: str
    """`%(default)s` stands for the field's default, `%(demo)s` for that of the demo."""
    metavar: str | None = None
    names: tuple[str, ...] = ()
    """Option strings; by default the field's name, with hyphens. Those of a bool make it True, or
    False if they begin with `--no-`. One that is True by default gets both forms."""
    choices: Collection[Any] | None = None
    """Values that the flag takes; by default those of the field's `Literal`, if it is one."""
    parse: Callable[[str], Any] | None = None
    """Reads the text of one flag and may raise `UsageError`; by default the field's type."""
    convert: Callable[[Any], Any] | None = None
    """Turns the argument into the field's value; may raise `UsageError`."""
    group: str | None = None
    """Title of the group of this flag and the ones after it."""
    several: bool = False
    """True for a flag that takes several values at once, if it may be repeated."""
    scope: str | None = None
    """Name for flags that only the calls of `add_flags` with this name add."""


def option[T](
    default: T,
    help: str | None = None,
    *,
    at_least: int | None = None,
    metadata: Mapping[str, Any] | None = None,
    **how: Any,
) -> T:
    """The field of an option: its default, `MISSING` for none, its smallest value, and the fields
    of its `Flag`. Without `help` it has none."""
    notes = {"at_least": at_least, **(metadata or {})}
    if help is not None:
        notes["flag"] = Flag(help, **how)
    if isinstance(default, dict):
        return dataclasses.field(default_factory=dict, hash=False, metadata=notes)  # type: ignore
    return dataclasses.field(default=default, metadata=notes)


@dataclasses.dataclass(frozen=True)
class Option:
    """A field that has a flag."""

    name: str
    type: Any
    """Type of the field, without None."""
    default: Any
    """`dataclasses.MISSING` if there is none, or one that is made anew for each object."""
    is_required: bool
    at_least: int | None
    flag: Flag

    @property
    def names(self) -> tuple[str, ...]:
        """Option strings."""
        return self.flag.names or (f"--{self.name.replace('_', '-')}",)

    @property
    def collects(self) -> type | None:
        """The class that a flag's values make if it may be repeated, else None."""
        origin = typing.get_origin(self.type)
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return dict
        return tuple if origin is tuple and self.flag.parse is None else None


@functools.cache
def options_of(cls: type) -> dict[str, Option]:
    """The fields of the dataclass `cls` that have a `Flag`, by their names."""
    found = {}
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        if "flag" in field.metadata:
            missing = field.default is field.default_factory  # both are MISSING
            kind = _without_none(hints[field.name])
            notes = field.metadata
            found[field.name] = Option(
                field.name, kind, field.default, missing, notes.get("at_least"), notes["flag"]
            )
    return found


def add_flags(
    parser: argparse._ActionsContainer,
    cls: type,
    *,
    leave_out: Collection[str] = (),
    shown: Mapping[str, Any] | None = None,
    demo: Any = None,
    scope: str | None = None,
) -> None:
    """Add the flags of `cls` to a parser, or to one of its groups, but for the fields `leave_out`
    and those of another `scope`.

    `shown` are defaults to print in the place of the fields'. `demo` is an object of `cls` that is
    used where no model is named, so that no flag is required.
    """
    here = parser
    for name, option in options_of(cls).items():
        flag = option.flag
        if flag.scope != scope:
            continue
        if flag.group is not None:
            here = group(parser, flag.group)
        if name in leave_out:
            continue
        default = (shown or {}).get(name, option.default)
        text = flag.help.replace("%(default)s", _text(default))
        text = text.replace("%(demo)s", _text(getattr(demo, name, None)))
        how = _how(option)
        if option.is_required and demo is None:
            how["required"] = True
        here.add_argument(*option.names, dest=name, help=text, **how)


def given(cls: type, args: argparse.Namespace) -> dict[str, Any]:
    """The fields of `cls` for which there was a flag. Raises `UsageError`, also for a value below
    the smallest."""
    found = {}
    for name, option in options_of(cls).items():
        value = getattr(args, name, None)
        if value is None:
            continue
        if option.collects is not None:
            values, value = value, option.collects(value)
            if option.flag.several and len(value) < len(values):
                raise UsageError(f"`{name}`: a name is given twice", option=name)
        _check_limit(name, value, option.at_least)
        found[name] = value if option.flag.convert is None else option.flag.convert(value)
    return found


_KINDS = {bool: (bool, "a bool"), int: (int, "a whole number"), float: (int | float, "a number")}


def check_options(options: Any, *, above: int | None = None) -> None:
    """Raise `UsageError` for a field of `options` that should be a bool or a number and is not, is
    below its `at_least`, or without one not above `above`. NumPy's values become Python's."""
    hints = typing.get_type_hints(type(options))
    for field in dataclasses.fields(options):
        name, least = field.name, field.metadata.get("at_least")
        value: Any = getattr(options, name)
        kind = _without_none(hints[name])
        if kind not in _KINDS:
            continue
        if getattr(value, "shape", None) == ():
            value = value.item()
            object.__setattr__(options, name, value)  # the class may be frozen
        if value is None and kind is not hints[name]:
            continue
        types, words = _KINDS[kind]
        if not isinstance(value, types) or isinstance(value, bool) is not (kind is bool):
            words += "" if least is None else f" from {least} up"
            raise UsageError(f"`{name}`={value!r} must be {words}", option=name, value=value)
        _check_limit(name, value, least, None if kind is bool else above)


def _check_limit(name: str, value: Any, least: int | None, above: int | None = None) -> None:
    """Raise `UsageError` unless `value` is `least` or more, or without it `above` this. NaN is
    neither."""
    if least is not None and not value >= least:
        message = f"`{name}`={value}: must be at least {least}"
        raise UsageError(message, option=name, value=value, limit=least)
    if least is None and above is not None and not value > above:
        message = f"`{name}`={value} must be above {above}"
        raise UsageError(message, option=name, value=value, limit=above)


def _how(option: Option) -> dict[str, Any]:
    """The arguments of `add_argument` that follow from the type."""
    flag = option.flag
    kind = option.type
    if kind is bool:
        negative = option.names[0].startswith("--no-")
        if option.default and not negative:
            return {"action": argparse.BooleanOptionalAction}
        return {"action": "store_const", "const": not negative}
    choices = flag.choices
    if choices is None and typing.get_origin(kind) is Literal:
        choices = typing.get_args(kind)
    reader = kind if kind in (int, float, Path) else None
    if flag.parse is not None:
        reader = functools.partial(_read, flag.parse)
    how = {"metavar": flag.metavar, "type": reader, "choices": choices}
    if option.collects is None:
        return how
    return how | ({"action": "extend", "nargs": "+"} if flag.several else {"action": "append"})


def _read(parse: Callable[[str], Any], text: str) -> Any:
    """The value of a flag, with an error that argparse reports."""
    try:
        return parse(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _without_none(hint: Any) -> Any:
    if typing.get_origin(hint) not in (typing.Union, types.UnionType):
        return hint
    kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
    return kinds[0] if len(kinds) == 1 else hint


def group(parser: argparse._ActionsContainer, title: str) -> argparse._ActionsContainer:
    """The group of this title, a new one if there is none yet."""
    groups = (one for one in parser._action_groups if one.title == title)
    return next(groups, None) or parser.add_argument_group(title)


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
