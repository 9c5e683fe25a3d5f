"""The tokenizer of a checkpoint directory, the same for every `model_type`, `tokenizer_class` and
version of transformers.

Ids are those of tokenizer.json, read by the package tokenizers: classes of transformers that build
a tokenizer of their own from its vocabulary are not used. tokenizer_config.json names the special
tokens, brings chat templates, adds tokens that tokenizer.json lacks, and says by `add_bos_token`
and `add_eos_token` what goes around a text. Without a tokenizer.json the SentencePiece file
tokenizer.model is read (`spm_file`). Fields and their order of precedence are those of
transformers (`tokenization_utils_base.py`).
"""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..process.json_files import parse_json
from ..text.special_tokens import ids_around
from .gguf.tokenizer import TEKKEN as TEKKEN_PATTERN
from .gguf.tokenizer import THREE_DIGITS
from .spm_file import ModelFile, read_model_file

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

logger = logging.getLogger(__name__)

TEMPLATES = "additional_chat_templates"
"""Folder of chat templates beside the default one: `NAME.jinja`."""
TEKKEN = "tekken.json"
"""Mistral's own tokenizer, which is not read: it says how texts are split (`corrected`)."""

_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
_NAMED += ("mask_token",)
# Classes in which transformers 4 makes the post-processor from the two flags alone.
_LLAMA_CLASSES = frozenset(
    f"{name}Tokenizer{fast}" for name in ("Llama", "CodeLlama", "Gemma") for fast in ("", "Fast")
)


def read_tokenizer(path: Path, contents: Mapping[str, bytes], hf_config: Mapping[str, Any]) -> Any:
    """A `transformers.PreTrainedTokenizerFast`. `contents` are the tokenizer's files in the
    directory `path`, of which one is tokenizer.json or tokenizer.model. Raises whatever malformed
    files make tokenizers and transformers raise, and `CheckpointError`."""
    from transformers import PreTrainedTokenizerFast

    settings = _settings(contents)
    llama = settings.get("tokenizer_class") in _LLAMA_CLASSES
    flags = {name: settings.get(name) for name in ("add_bos_token", "add_eos_token")}
    if "tokenizer.json" in contents:
        stored = _json(contents, "tokenizer.json")
        known = {token["id"]: token["content"] for token in stored.get("added_tokens") or ()}
        source = _source(path / "tokenizer.json", contents["tokenizer.json"])
        if not {"tokenizer_config.json", "special_tokens_map.json"} & contents.keys():
            settings |= _named_by_ids(hf_config, known)
    else:
        model = read_model_file(contents["tokenizer.model"])
        source = {"tokenizer_object": _built(model, settings)}
        known = model.added
        settings = model.named | settings
        if flags["add_bos_token"] is None and (llama or "tokenizer_class" not in settings):
            flags["add_bos_token"] = True
    tokenizer = PreTrainedTokenizerFast(
        **source,
        **_special_tokens(settings),
        added_tokens_decoder=_missing(settings, contents, set(known.values())),
        chat_template=_chat_template(settings, contents),
        clean_up_tokenization_spaces=False,
    )
    # Only now: transformers looks up some names on the Hub, to correct their tokenizers.
    tokenizer.name_or_path = str(path)
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    _obey_flags(tokenizer, flags["add_bos_token"], flags["add_eos_token"], exact=llama)
    return tokenizer


def _source(file: Path, content: bytes) -> dict[str, Any]:
    """The argument of transformers for a tokenizer.json: its file, or where it was made from
    something else, an object."""
    if file.is_file() and file.read_bytes() == content:  # an object would be copied
        return {"tokenizer_file": str(file)}
    from tokenizers import Tokenizer

    return {"tokenizer_object": Tokenizer.from_str(content.decode())}


def corrected(path: Path, content: bytes) -> bytes:
    """The content of the tokenizer.json of a Mistral model at `path`. Mistral Small 3.1 and others
    were converted with Llama 3's pattern in the place of Tekken's, and split texts otherwise than
    in training. Corrected as by transformers' `fix_mistral_regex`, but only where a tekken.json
    tells that the model has Tekken's; elsewhere there is a warning."""
    if b"{1,3}" not in content:
        return content
    found = _with_tekkens_pattern(content)
    if found is None:
        return content
    if (path / TEKKEN).is_file():
        return found
    _warn_of_pattern(path)
    return content


@functools.lru_cache(maxsize=1)
def _with_tekkens_pattern(content: bytes) -> bytes | None:
    """A tokenizer.json with Tekken's pattern in the place of Llama 3's; None if it does not split
    by that first. Kept for the next time that a command opens its model: the file is large."""
    try:
        stored = json.loads(content)
        step = stored["pre_tokenizer"]
        step = step.get("pretokenizers", [step])[0]
        if step["pattern"]["Regex"] != THREE_DIGITS:
            return None
    except (LookupError, TypeError, AttributeError, ValueError, RecursionError):
        return None  # damage is found where the tokenizer is built
    step["pattern"] = {"Regex": TEKKEN_PATTERN}
    return json.dumps(stored, ensure_ascii=False).encode()


@functools.cache
def _warn_of_pattern(path: Path) -> None:
    """Warn of token ids that may be wrong, once per directory."""
    logger.warning(
        "%s: tokenizer.json splits texts as Llama 3 does. Mistral's models of 2025 were published "
        "with that mistake, which is corrected where their %s lies beside it: get that file",
        path,
        TEKKEN,
    )


def _settings(contents: Mapping[str, bytes]) -> dict[str, Any]:
    """tokenizer_config.json, and where it has no `added_tokens_decoder` the older
    special_tokens_map.json over it."""
    settings = _json(contents, "tokenizer_config.json")
    if "added_tokens_decoder" not in settings:
        settings |= _json(contents, "special_tokens_map.json")
    return settings


def _json(contents: Mapping[str, bytes], name: str) -> dict[str, Any]:
    return parse_json(Path(name), contents.get(name, b"{}"))


def _named_by_ids(hf_config: Mapping[str, Any], known: Mapping[int, str]) -> dict[str, str]:
    """The tokens that begin and end a text, of a directory whose config.json alone says so."""
    found = {}
    for name in ("bos_token", "eos_token"):
        ids = hf_config.get(f"{name}_id")
        first = ids[0] if isinstance(ids, list) and ids else ids
        if isinstance(first, int) and first in known:
            found[name] = known[first]
    return found


# Special and added tokens -----------------------------------------------------


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments of transformers for the special tokens: the usual names, names that a model has
    besides (`image_token`), and those without a name."""
    listed = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    own: dict[str, Any] = {}
    if isinstance(listed, dict):
        own = listed
        listed = []
    if not isinstance(listed, list):
        raise ValueError(f"extra_special_tokens={listed!r:.60} must be a list or an object")
    own = own | {name: value for name, value in settings.items() if name.endswith("_token")}
    named: dict[str, Any] = {
        name: _token(value) for name, value in own.items() if isinstance(value, str | dict)
    }
    if listed:
        named["extra_special_tokens"] = [_token(value) for value in listed]
    return named


def _token(value: str | dict[str, Any]) -> AddedToken:
    """A special token, which files spell as text or with its properties."""
    from tokenizers import AddedToken

    if isinstance(value, str):
        return AddedToken(value, special=True, normalized=False)
    return _added_token({**value, "special": True})


def _added_token(fields: Mapping[str, Any]) -> AddedToken:
    from tokenizers import AddedToken

    names = ("single_word", "lstrip", "rstrip", "normalized", "special")
    return AddedToken(fields["content"], **{name: fields[name] for name in names if name in fields})


def _missing(
    settings: Mapping[str, Any], contents: Mapping[str, bytes], known: set[str]
) -> dict[int, AddedToken]:
    """Id -> token, of those that only tokenizer_config.json or the older added_tokens.json adds.
    One in tokenizer.json is as that says."""
    decoder = settings.get("added_tokens_decoder")
    if decoder is None:
        named = {str(token) for token in _special_tokens(settings).values()}
        decoder = {
            index: {"content": text, "special": text in named, "normalized": text not in named}
            for text, index in _json(contents, "added_tokens.json").items()
        }
    tokens = {int(index): _added_token(fields) for index, fields in decoder.items()}
    return {index: token for index, token in tokens.items() if token.content not in known}


def has_chat_template(contents: Mapping[str, bytes]) -> bool:
    """True if the tokenizer's files, name -> content, have a chat template. Builds no tokenizer.
    Raises `CheckpointError` for a file that is no JSON object."""
    return bool(_chat_template(_settings(contents), contents))


def _chat_template(
    settings: Mapping[str, Any], contents: Mapping[str, bytes]
) -> str | dict[str, str] | None:
    """The chat template, or name -> template. Files go before tokenizer_config.json, but for
    chat_template.json, which processors of images wrote, and which has the template alone."""
    found = {
        Path(name).stem: content.decode()
        for name, content in contents.items()
        if name.startswith(f"{TEMPLATES}/")
    }
    if "chat_template.jinja" in contents:
        found["default"] = contents["chat_template.jinja"].decode()
    if not found:
        stated = settings.get("chat_template")
        if stated is None:
            stated = _json(contents, "chat_template.json").get("chat_template")
        if not isinstance(stated, list):
            return stated
        found = {template["name"]: template["template"] for template in stated}
    return (found["default"] or None) if found.keys() == {"default"} else found


def with_chat_template(
    contents: Mapping[str, bytes], template: str | dict[str, str] | None
) -> dict[str, bytes]:
    """The tokenizer's files with this chat template, or name -> template; the same files if they
    have it."""
    named = _by_name(template)
    if named == _by_name(_chat_template(_settings(contents), contents)):
        return dict(contents)
    found = {name: text for name, text in contents.items() if not name.startswith(f"{TEMPLATES}/")}
    found.pop("chat_template.jinja", None)
    for name, text in (named or {"default": ""}).items():  # an empty one hides other files' too
        file = "chat_template.jinja" if name == "default" else f"{TEMPLATES}/{name}.jinja"
        found[file] = text.encode()
    return found


def _by_name(template: str | dict[str, str] | None) -> dict[str, str]:
    if isinstance(template, dict):
        return template
    return {"default": template} if template else {}


# What goes around a text ------------------------------------------------------


def _obey_flags(tokenizer: Any, bos: bool | None, eos: bool | None, *, exact: bool) -> None:
    """Make the post-processor add what the flags say. None leaves it as it is, as False does where
    the flags are not `exact`."""
    from tokenizers import processors

    backend: Tokenizer = tokenizer.backend_tokenizer
    stored = ids_around(backend)
    first = tokenizer.bos_token_id
    last = tokenizer.eos_token_id
    before = _with(bos, first, stored[0], 0, exact)
    after = _with(eos, last, stored[1], len(stored[1]), exact)
    if (before, after) == stored:
        return
    names = {index: backend.id_to_token(index) for index in (*before, *after)}
    around = ([names[i] for i in before], [names[i] for i in after])
    template = processors.TemplateProcessing(
        single=[*around[0], "$A", *around[1]],
        pair=[*around[0], "$A", *around[1], *around[0], "$B", *around[1]],
        special_tokens=[(name, index) for index, name in names.items()],
    )
    # A template after a template would go around the token that the first one has put there.
    kept = backend.post_processor if stored == ([], []) else None
    backend.post_processor = template if kept is None else processors.Sequence([kept, template])


def _with(
    wanted: bool | None, token: int | None, ids: list[int], at: int, exact: bool
) -> list[int]:
    """`ids` with `token` at the place `at` or without it, as is `wanted`."""
    if token is None or wanted is None or wanted is (token in ids):
        return ids
    if wanted:
        return [*ids[:at], token, *ids[at:]]
    return [index for index in ids if index != token] if exact else ids


def _built(model: ModelFile, settings: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a SentencePiece file. `legacy`, on by default, puts a space before each
    part of a text that special tokens divide, not only before the first."""
    prefix = settings.get("add_prefix_space")
    return model.build(
        prefix=model.prefix if prefix is None else bool(prefix),
        every_part=settings.get("legacy") is not False,
    )
