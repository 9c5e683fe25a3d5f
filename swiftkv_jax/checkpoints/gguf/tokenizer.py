"""The tokenizer's files of a Hugging Face directory, from the metadata of a GGUF file: byte pairs
with their merges (`gpt2`), and SentencePiece's pieces with their scores (`llama`)."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import ConfigError
from ..families.fields import shown
from ..families.gguf import removal, shortest
from ..spm_file import ModelFile

if TYPE_CHECKING:
    from tokenizers import Tokenizer

# tokenizer.ggml.token_type
_UNKNOWN = 2
_CONTROL = 3
_USER_DEFINED = 4
_UNUSED = 5
_BYTE = 6
_BPE = 2  # SentencePiece's trainer_spec.model_type
_GGML = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_NAMED = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "sep_token": "seperator_token_id",
    "pad_token": "padding_token_id",
    "mask_token": "mask_token_id",
}
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Tokens that end a turn, which many files do not name beside the one that ends a text.
_END_NAMES = frozenset(
    "<|eot_id|> <|eom_id|> <|im_end|> <|end|> <end_of_turn> <|endoftext|> <|end_of_text|>".split()
)
# general.sampling. -> generation_config.json. llama.cpp's samplers that have no field there (xtc,
# mirostat, the order of samplers, how far back repetitions are looked for) are left out.
_SAMPLING = {
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "penalty_repeat": "repetition_penalty",
}
_USED = frozenset(
    """
    model pre tokens token_type scores merges add_bos_token add_eos_token add_space_prefix
    """.split()
)
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_sep_token": (False,),
    "remove_extra_whitespaces": (False,),
    "token_type_count": (0, 1),
}


def tokenizer_files(
    metadata: Mapping[str, Any], max_length: int, eos_token_ids: tuple[int, ...]
) -> dict[str, bytes]:
    """File name -> content; none for a file without a tokenizer. `max_length` is the longest text
    of the model. Raises `ConfigError` for a tokenizer that is not supported."""
    kind = _get(metadata, "model")
    if kind in (None, "none"):
        return {}
    _check(metadata)
    tokens = _get(metadata, "tokens")
    if not isinstance(tokens, list) or len(_types(metadata)) != len(tokens):
        raise ConfigError(f"{_GGML}tokens and {_GGML}token_type must be lists of equal length")
    if kind == "gpt2":
        pre = pre_tokenizer(_get(metadata, "pre"))
        tokenizer = _byte_pairs(metadata, pre)
        bos = pre.add_bos
        eos = False
    elif kind == "llama":
        tokenizer = _sentence_pieces(metadata)
        bos = True
        eos = False
    else:
        raise ConfigError(f"{_GGML}model={shown(kind)} is not supported; supported: gpt2, llama")
    named = {
        name: tokens[index]
        for name, key in _NAMED.items()
        if (index := _id(metadata, key)) is not None
    }
    around = {
        "add_bos_token": _get(metadata, "add_bos_token", bos) and "bos_token" in named,
        "add_eos_token": _get(metadata, "add_eos_token", eos) and "eos_token" in named,
    }
    settings = named | around | _templates(metadata)
    settings |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
    }
    _put_around(tokenizer, settings)
    generation = _sampling(metadata)
    if eos_token_ids:
        generation["eos_token_id"] = [*eos_token_ids]
    if (bos_id := _id(metadata, "bos_token_id")) is not None:
        generation["bos_token_id"] = bos_id
    content = tokenizer.to_str()
    if kind == "llama" and metadata.get("general.architecture") == "phi3":
        content = _take_spaces(content)
    return {
        "tokenizer.json": content.encode(),
        "tokenizer_config.json": json.dumps(settings, indent=2, ensure_ascii=False).encode(),
        "generation_config.json": json.dumps(generation, indent=2).encode(),
    }


def end_tokens(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """The tokens that end a generation: those that the file names, and the known ones that end a
    turn."""
    named = [_id(metadata, key) for key in _ENDS]
    tokens = _get(metadata, "tokens", [])
    pairs = zip(tokens, _types(metadata), strict=False)
    turns = [
        i
        for i, (text, kind) in enumerate(pairs)
        if kind in (_CONTROL, _USER_DEFINED) and text in _END_NAMES
    ]
    return tuple(dict.fromkeys(i for i in (*named, *turns) if i is not None))


def _get(metadata: Mapping[str, Any], name: str, default: Any = None) -> Any:
    return metadata.get(_GGML + name, default)


def _types(metadata: Mapping[str, Any]) -> list[int]:
    found = _get(metadata, "token_type")
    if found is None:  # all of them normal
        return [1] * len(_get(metadata, "tokens", []))
    return found.tolist() if isinstance(found, np.ndarray) else []


def _id(metadata: Mapping[str, Any], key: str) -> int | None:
    """The token of a key; SentencePiece's own where a file of its kind does not say. None for a
    number beyond the vocabulary, which stands for no token."""
    default = None
    if _get(metadata, "model") == "llama":
        default = {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0}.get(key)
    index = _get(metadata, key, default)
    count = len(_get(metadata, "tokens", []))
    return index if type(index) is int and 0 <= index < count else None


def _check(metadata: Mapping[str, Any]) -> None:
    """Raise `ConfigError` for a key of the tokenizer that could change ids and is not known."""
    for key, value in metadata.items():
        if not key.startswith(_GGML):
            continue
        name = key.removeprefix(_GGML)
        if name in _USED or name.endswith(("_token_id", "_token_ids")):
            continue
        if name not in _NEUTRAL or value not in _NEUTRAL[name]:
            raise ConfigError(
                f"unknown metadata {key}={shown(value)}: it could change token ids; if it changes "
                f"nothing, remove it by {removal(key)}"
            )


def _templates(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The chat template, or the default one and the named ones, as tokenizer_config.json has
    them."""
    named = [
        {"name": key.removeprefix(f"{_TEMPLATE}."), "template": value}
        for key, value in metadata.items()
        if key.startswith(f"{_TEMPLATE}.")
    ]
    default = metadata.get(_TEMPLATE)
    if not named:
        return {} if default is None else {"chat_template": default}
    if default is not None:
        named.insert(0, {"name": "default", "template": default})
    return {"chat_template": named}


def _sampling(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters that a file recommends, as generation_config.json has them. Raises
    `ConfigError` for one that is no number."""
    found: dict[str, Any] = {}
    for key, name in _SAMPLING.items():
        if (value := metadata.get(f"general.sampling.{key}")) is None:
            continue
        if type(value) not in (int, float):
            raise ConfigError(f"general.sampling.{key}={shown(value)} must be a number")
        found[name] = shortest(value)
    if found:
        found["do_sample"] = found.get("temperature", 1.0) > 0
    return found


def _put_around(tokenizer: Tokenizer, settings: Mapping[str, Any]) -> None:
    """Have the tokenizer put around a text what the settings say, for readers of tokenizer.json
    alone."""
    from tokenizers import processors

    before = [settings["bos_token"]] if settings["add_bos_token"] else []
    after = [settings["eos_token"]] if settings["add_eos_token"] else []
    if before or after:
        one = [*before, "$A", *after]
        other = [*before, "$B:1", *after]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=one,
            pair=one + other,
            special_tokens=[(text, tokenizer.token_to_id(text)) for text in {*before, *after}],
        )


def _take_spaces(content: str) -> str:
    """The tokenizer.json of a Phi-3, whose special tokens take the spaces after them. The file does
    not say so of any token."""
    fields = json.loads(content)
    for token in fields["added_tokens"]:
        token["rstrip"] = token["content"] not in ("<unk>", "<s>", "<|endoftext|>")
    return json.dumps(fields, ensure_ascii=False)


def _byte_pairs(metadata: Mapping[str, Any], pre: PreTokenizer) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models

    if _get(metadata, "add_space_prefix", False):
        raise ConfigError(f"{_GGML}add_space_prefix=True is not supported for byte pairs")
    merges = [tuple(merge.split(" ")) for merge in _get(metadata, "merges", [])]
    typed = list(enumerate(zip(_get(metadata, "tokens"), _types(metadata), strict=True)))
    # Numbers beyond the tokenizer's, which fill the embedding's rows.
    vocabulary = {text: i for i, (text, kind) in typed if kind != _UNUSED}
    if wrong := [merge for merge in merges if len(merge) != 2 or "".join(merge) not in vocabulary]:
        raise ConfigError(f"{_GGML}merges: {shown(' '.join(wrong[0]))} makes no token")
    if not merges:
        raise ConfigError(f"missing: {_GGML}merges")
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre.ignore_merges))
    tokenizer.pre_tokenizer, normalizer = pre.build()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(
        [
            AddedToken(text, normalized=False, special=kind != _USER_DEFINED)
            for _, (text, kind) in typed
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]
    )
    return tokenizer


def _sentence_pieces(metadata: Mapping[str, Any]) -> Tokenizer:
    tokens = _get(metadata, "tokens")
    scores = _get(metadata, "scores")
    types = _types(metadata)
    if not isinstance(scores, np.ndarray) or len(scores) != len(tokens):
        raise ConfigError(f"{_GGML}scores must have a number for each token")
    pieces = [  # the text of the unknown token is that token, as in llama.cpp
        SimpleNamespace(piece=text, score=score, type=_CONTROL if kind == _UNKNOWN else kind)
        for text, score, kind in zip(tokens, scores.tolist(), types, strict=True)
    ]
    prefix = bool(_get(metadata, "add_space_prefix", True))
    trainer = SimpleNamespace(
        model_type=_BPE, unk_id=_id(metadata, "unknown_token_id") or 0, byte_fallback=_BYTE in types
    )
    normalizer = SimpleNamespace(precompiled_charsmap=b"", remove_extra_whitespaces=False)
    model = ModelFile(
        SimpleNamespace(pieces=pieces, trainer_spec=trainer, normalizer_spec=normalizer)
    )
    return model.build(prefix=prefix, every_part=True)


# Splitting before the merges --------------------------------------------------

# The patterns that tokenizer.ggml.pre names, as the models' tokenizer.json files have them.
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
THREE_DIGITS = rf"{_WORDS}|\p{{N}}{{1,3}}|{_TAIL}"
_ONE_DIGIT = rf"{_WORDS}|\p{{N}}|{_TAIL}"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
TEKKEN = rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}|{_PATHS}"
_GPT4O = (
    rf"{_BEFORE}{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|{_BEFORE}{_UPPER}+{_LOWER}*{_CONTRACTIONS}?|"
    rf"\p{{N}}{{1,3}}|{_PATHS}"
)
_SEED = rf"{_WORDS}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclasses.dataclass(frozen=True)
class PreTokenizer:
    """Steps that a byte-pair tokenizer takes before its merges."""

    patterns: tuple[str, ...]
    """A text is divided into the matches of the first and what lies between them, each part by the
    second, and so on."""
    nfc: bool = False
    """Normalisation of texts to NFC."""
    ignore_merges: bool = False
    """True if a part that is a token is that token, whatever the merges make of it."""
    add_bos: bool = False
    """True if a text begins with the token that begins texts, where the file does not say so."""

    def build(self) -> tuple[Any, Any]:
        """The pre-tokenizer and the normaliser of the package tokenizers; the latter may be
        None."""
        from tokenizers import Regex, normalizers, pre_tokenizers

        steps: list[Any] = [
            pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns
        ]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return pre_tokenizers.Sequence(steps), normalizers.NFC() if self.nfc else None


_LLAMA3 = PreTokenizer((THREE_DIGITS,), ignore_merges=True, add_bos=True)
_CL100K = PreTokenizer((THREE_DIGITS,))
_QWEN2 = PreTokenizer((_ONE_DIGIT,), nfc=True)
_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_PRE_TOKENIZERS = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "falcon3": _LLAMA3,
    "smaug-bpe": _CL100K,
    "dbrx": _CL100K,
    "chatglm-bpe": _CL100K,
    "glm4": _CL100K,
    "qwen2": _QWEN2,
    "deepseek-r1-qwen": PreTokenizer((_ONE_DIGIT,)),
    "smollm": _DIGITS,
    "refact": _DIGITS,
    "starcoder": _DIGITS,
    "gpt-2": PreTokenizer((_GPT2,)),
    "gpt-4o": PreTokenizer((_GPT4O,)),
    "tekken": PreTokenizer((TEKKEN,), ignore_merges=True, add_bos=True),
    "seed-coder": PreTokenizer((_SEED,)),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}


def pre_tokenizer(name: Any) -> PreTokenizer:
    """The one that `tokenizer.ggml.pre` names. Raises `ConfigError` for a name that is not known,
    and for none: files from before 2024 do not say how their texts are split."""
    if name not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise ConfigError(f"tokenizer.ggml.pre={shown(name)} is not supported; supported: {known}")
    return _PRE_TOKENIZERS[name]
