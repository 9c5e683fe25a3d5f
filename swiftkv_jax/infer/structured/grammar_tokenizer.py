"""A tokenizer as llguidance is to see it: with it, the text that a grammar forces is always
tokenized into those very bytes.

llguidance tokenizes forced text with the tokenizer itself, and allows those tokens alone. An added
token that the text spells (`<tool_call>` in a string of JSON) is then the only one allowed, and is
refused, since it stands for a control token and not for its letters. So does text change that the
tokenizer normalizes. Here control tokens have names that no text has, and nothing is normalized.
"""

from __future__ import annotations

import json
import re
from typing import Any

_MARK = "\U0010ffff"
"""Mark in the names of control tokens: not a character, so that no text has it."""
_SPACE = "\u2581"
_HIDDEN_SPACE = "\U0010fffe"
"""How vocabularies with tokens for bytes spell a space, and a spelling that no text has."""
_LARK_NAME = re.compile(
    r'"(?:\\.|[^"\\\n])*+"?|(?://|#)[^\n]*|/(?:\\[\s\S]|[^/\\])++/?|(<)(?=[^\[<>\s][^<>\s]*>)'
)
"""Texts, comments and regular expressions of a grammar in Lark's syntax, and the beginning (the
group) of a name of a token."""


def grammar_tokenizer(text: str) -> str:
    """The JSON of a tokenizer of the package tokenizers, changed for llguidance: ids and the bytes
    of ordinary tokens are the same."""
    found = json.loads(text)
    model = found["model"]
    control = set[str]()
    for token in found["added_tokens"]:
        name = token["content"]
        if not _is_text(token, model):
            control.add(name)
            token |= {"content": _hidden(name), "special": True}
        token |= dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    _rename(model, control)
    if model.get("unk_token") in control:
        model["unk_token"] = _hidden(model["unk_token"])
    found["normalizer"] = _spelling_of_spaces(found["normalizer"])
    found["pre_tokenizer"] = _without_prefix(found["pre_tokenizer"])
    found["post_processor"] = None
    made = json.dumps(found, ensure_ascii=False)
    if model.get("byte_fallback"):
        made = made.replace(_SPACE, _HIDDEN_SPACE)
    return made


def hide_token_names(lark: str) -> str:
    """A grammar in Lark's syntax with the names that control tokens have in
    `grammar_tokenizer`."""
    return _LARK_NAME.sub(lambda found: f"<{_MARK}" if found[1] else found[0], lark)


def show_token_names(message: str) -> str:
    """A message of llguidance with the names of the tokenizer itself."""
    return message.replace(_MARK, "").replace(r"\u{10ffff}", "")


def _is_text(token: dict[str, Any], model: dict[str, Any]) -> bool:
    """Return whether an added token stands for its letters, and llguidance reads them as the
    tokenizer does: runs of spaces, for example."""
    name = token["content"]
    if token["special"] or (name.startswith("<") and name.endswith(">")):  # llguidance's own rule
        return False
    return name in model["vocab"] if model.get("byte_fallback") else name.isascii()


def _hidden(name: str) -> str:
    return f"<{_MARK}{name[1:]}" if name.startswith("<") else f"{_MARK}{name}"


def _rename(model: dict[str, Any], names: set[str]) -> None:
    """Give tokens of a vocabulary their hidden names. Merges that make such a token are left out:
    no text is to become one."""
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):  # Unigram
        model["vocab"] = [
            [_hidden(name) if name in names else name, *rest] for name, *rest in vocabulary
        ]
        return
    if not (renamed := names & vocabulary.keys()):
        return
    for name in renamed:
        vocabulary[_hidden(name)] = vocabulary.pop(name)
    pairs = (one.split(" ") if isinstance(one, str) else one for one in model.get("merges", ()))
    model["merges"] = [
        [first, second]
        for first, second in pairs
        if not (first in renamed or second in renamed or first + second in renamed)
    ]


def _spelling_of_spaces(normalizer: dict[str, Any] | None) -> dict[str, Any] | None:
    """Keep, of a normalizer, what spells spaces as the vocabulary does."""
    if normalizer is None or normalizer["type"] == "Sequence":
        inside = map(_spelling_of_spaces, (normalizer or {}).get("normalizers", ()))
        if kept := [one for one in inside if one is not None]:
            return {"type": "Sequence", "normalizers": kept}
    elif normalizer["type"] == "Replace" and normalizer["pattern"] == {"String": " "}:
        return normalizer
    return None


def _without_prefix(pre_tokenizer: dict[str, Any] | None) -> dict[str, Any] | None:
    """A pre-tokenizer that puts no space before a text."""
    if pre_tokenizer is None:
        return None
    made = dict(pre_tokenizer)
    if "pretokenizers" in made:
        made["pretokenizers"] = [_without_prefix(one) for one in made["pretokenizers"]]
    if "add_prefix_space" in made:
        made["add_prefix_space"] = False
    return made
