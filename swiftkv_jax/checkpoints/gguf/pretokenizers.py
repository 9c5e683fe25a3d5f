"""How a byte-pair tokenizer of a GGUF file splits a text before its merges: the patterns that
`tokenizer.ggml.pre` names, as the models' tokenizer.json files have them."""

from __future__ import annotations

import dataclasses
from typing import Any

from ...errors import ConfigError
from ..families.fields import shown

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_THREE_DIGITS = rf"{_WORDS}|\p{{N}}{{1,3}}|{_TAIL}"
_ONE_DIGIT = rf"{_WORDS}|\p{{N}}|{_TAIL}"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"
_PATHS = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}|{_PATHS}"
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
    """Whether texts are normalised to NFC."""
    ignore_merges: bool = False
    """Whether a part that is a token is that token, whatever the merges make of it."""
    add_bos: bool = False
    """Whether a text begins with the token that begins texts, where the file does not say so."""

    def build(self) -> tuple[Any, Any]:
        """The pre-tokenizer and the normaliser of the package tokenizers; the latter may be
        None."""
        from tokenizers import Regex, normalizers, pre_tokenizers

        steps: list[Any] = [
            pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns
        ]
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        return pre_tokenizers.Sequence(steps), normalizers.NFC() if self.nfc else None


_LLAMA3 = PreTokenizer((_THREE_DIGITS,), ignore_merges=True, add_bos=True)
_CL100K = PreTokenizer((_THREE_DIGITS,))
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
    "tekken": PreTokenizer((_TEKKEN,), ignore_merges=True, add_bos=True),
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
