"""Tokenizers from the metadata of GGUF files: how texts are split, by name; SentencePiece's scores;
what goes around a text; templates."""

import json

import numpy as np
import pytest
from tokenizers import Tokenizer, pre_tokenizers

from swiftkv_jax import ConfigError
from swiftkv_jax.checkpoints.gguf.tokenizer import end_tokens, pre_tokenizer, tokenizer_files
from tests.checkpoints import gguf_files
from tests.checkpoints.gguf_files import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED

SPECIAL = {"<s>": CONTROL, "</s>": CONTROL, "<|eot_id|>": CONTROL}


def metadata(pre="gpt-2", merges=("a b",), special=SPECIAL, **keys):
    found = gguf_files.byte_pairs(pre, list(merges), special, **keys)
    return {
        name: np.array(value) if name.endswith(("token_type", "scores")) else value
        for name, value in found.items()
    }


def read(found) -> tuple[Tokenizer, dict, dict]:
    files = tokenizer_files(found, 64, end_tokens(found))
    settings, generation = (
        json.loads(files[f"{name}_config.json"]) for name in ("tokenizer", "generation")
    )
    return Tokenizer.from_str(files["tokenizer.json"].decode()), settings, generation


def split(pre: str, text: str) -> list[str]:
    tokenizer, _, _ = read(metadata(pre))
    parts = tokenizer.pre_tokenizer.pre_tokenize_str(text)
    return [text[start:stop] for _, (start, stop) in parts]


@pytest.mark.parametrize(
    "pre, text, parts",
    [
        ("gpt-2", "Don't 12345  x", ["Don", "'t", " 12345", " ", " x"]),
        ("gpt-2", "I'M\n\nhere", ["I", "'", "M", "\n", "\n", "here"]),
        ("smollm", "a 123", ["a", " ", "1", "2", "3"]),
        ("refact", "a 123", ["a", " ", "1", "2", "3"]),
        ("llama-bpe", "I'M 12345\n\n  x", ["I", "'M", " ", "123", "45", "\n\n", " ", " x"]),
        ("dbrx", "a.b 1234", ["a", ".b", " ", "123", "4"]),
        ("qwen2", "I'M 123();\n", ["I", "'M", " ", "1", "2", "3", "();\n"]),
        ("tekken", "camelCase 12//\n", ["camel", "Case", " ", "1", "2", "//\n"]),
        ("gpt-4o", "camelCase's 1234", ["camel", "Case's", " ", "123", "4"]),
        ("seed-coder", "ab 12.\n", ["ab", " ", "1", "2", ".", "\n"]),
        ("default", "a+b 1234", ["a", "+", "b", " ", "123", "4"]),
    ],
)
def test_a_text_is_split_as_the_name_says(pre, text, parts):
    assert split(pre, text) == parts


@pytest.mark.parametrize(
    "names, digits", [(["gpt-2"], False), (["smollm", "refact", "starcoder"], True)]
)
def test_texts_are_split_as_in_the_models_own_files(names, digits):
    """The tokenizer.json of GPT-2 names a step of the library's own instead of a pattern, those of
    SmolLM and StarCoder one more for single digits."""
    steps = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    theirs = pre_tokenizers.Sequence([*steps, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    random = np.random.default_rng(0)
    alphabet = np.array([*"aZéß日ا٣¾1209 \t\r\n\u00a0\u3000'stremvld.,;!/(<$#_🙂\u0301\u200d"])
    for name in names:
        ours = pre_tokenizer(name).build()[0]
        for length in random.integers(1, 40, 400):
            text = "".join(random.choice(alphabet, length))
            assert ours.pre_tokenize_str(text) == theirs.pre_tokenize_str(text), text


def test_normalisation_and_merges():
    """NFC is Qwen's; a whole part that is a token is one where the name says so."""
    assert read(metadata("qwen2"))[0].normalizer.normalize_str("e\u0301") == "\u00e9"
    assert read(metadata("gpt-2"))[0].normalizer is None
    merges = ["b c", "a b", "ab c"]
    assert read(metadata("llama-bpe", merges))[0].encode("abc").tokens == ["abc"]
    assert read(metadata("dbrx", merges))[0].encode("abc").tokens == ["a", "bc"]


@pytest.mark.parametrize(
    "pre, keys, ids",
    [
        ("llama-bpe", {}, [257, 256]),
        ("llama-bpe", {"add_bos_token": False}, [256]),
        ("dbrx", {}, [256]),
        ("dbrx", {"add_bos_token": True, "add_eos_token": True}, [257, 256, 258]),
        ("dbrx", {"add_bos_token": True, "bos_token_id": 999}, [256]),
    ],
)
def test_what_goes_around_a_text(pre, keys, ids):
    tokenizer, settings, _ = read(
        metadata(pre, **{"bos_token_id": 257, "eos_token_id": 258} | keys)
    )
    assert tokenizer.encode("ab").ids == ids
    assert settings["add_bos_token"] is (257 in ids)
    assert tokenizer.encode("ab", add_special_tokens=False).ids == [256]


def test_end_tokens():
    """Those that keys name, and the known ones that end a turn, if they are special."""
    assert end_tokens(metadata(eos_token_id=258)) == (258, 259)
    assert end_tokens(metadata(eos_token_id=258, eot_token_id=257)) == (258, 257, 259)
    assert end_tokens(metadata(special={"<|im_end|>": NORMAL})) == ()
    _, settings, generation = read(metadata(eos_token_id=258, padding_token_id=257))
    assert generation == {"eos_token_id": [258, 259]}
    assert (settings["eos_token"], settings["pad_token"]) == ("</s>", "<s>")


def test_templates():
    template = {"tokenizer.chat_template": "one"}
    assert read(metadata() | template)[1]["chat_template"] == "one"
    named = template | {
        "tokenizer.chat_templates": ["tool_use"],
        "tokenizer.chat_template.tool_use": "two",
    }
    assert read(metadata() | named)[1]["chat_template"] == [
        {"name": "default", "template": "one"},
        {"name": "tool_use", "template": "two"},
    ]
    assert "chat_template" not in read(metadata())[1]


# SentencePiece ----------------------------------------------------------------

TOKENS = {
    "<unk>": (UNKNOWN, 0.0),
    "<s>": (CONTROL, 0.0),
    "</s>": (CONTROL, 0.0),
    **{f"<0x{byte:02X}>": (BYTE, 0.0) for byte in range(256)},
    "▁": (NORMAL, -9.0),
    "a": (NORMAL, -10.0),
    "b": (NORMAL, -11.0),
    "c": (NORMAL, -12.0),
    "bc": (NORMAL, -1.0),
    "ab": (NORMAL, -2.0),
    "▁a": (NORMAL, -3.0),
    "<think>": (USER_DEFINED, 0.0),
    "[PAD]": (UNUSED, -10000.0),
}
IDS = {text: i for i, text in enumerate(TOKENS)}


def pieces(**keys):
    types, scores = zip(*TOKENS.values(), strict=True)
    found = {
        "model": "llama",
        "tokens": list(TOKENS),
        "token_type": np.array(types),
        "scores": np.array(scores, np.float32),
    } | keys
    return {f"tokenizer.ggml.{name}": value for name, value in found.items()}


def test_scores_decide():
    """The neighbours with the highest score join first; a space goes before every part; bytes
    stand for what is no piece; a text begins with <s>."""
    tokenizer, settings, _ = read(pieces())
    assert tokenizer.encode("abc").tokens == ["<s>", "▁a", "bc"]
    assert tokenizer.encode("b<think>ab").tokens == ["<s>", "▁", "b", "<think>", "▁", "ab"]
    assert tokenizer.encode("é", add_special_tokens=False).tokens == ["▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.encode("a<unk>").ids[-1] == IDS["<unk>"]
    assert tokenizer.decode(tokenizer.encode("abc é").ids) == "abc é"
    assert (settings["bos_token"], settings["eos_token"]) == ("<s>", "</s>")


def test_without_a_space_and_bos():
    tokenizer, _, _ = read(pieces(add_space_prefix=False, add_bos_token=False, add_eos_token=True))
    assert tokenizer.encode("abc a").tokens == ["a", "bc", "▁a", "</s>"]


def test_special_tokens_of_phi3_take_the_spaces_after_them():
    found = pieces(add_bos_token=False) | {"general.architecture": "phi3"}
    taken, others = read(found)[0], read(pieces(add_bos_token=False))[0]
    assert taken.encode("<think>  \na").ids == [IDS["<think>"], IDS["▁a"]]
    spaces = [IDS[text] for text in ("▁", "▁", "▁", "<0x0A>", "a")]
    assert others.encode("<think>  \na").ids == [IDS["<think>"], *spaces]
    assert taken.encode("<s> a").ids == [IDS["<s>"], IDS["▁"], IDS["▁a"]]


@pytest.mark.parametrize(
    "found, text",
    [
        (metadata(pre="bloom"), "tokenizer.ggml.pre='bloom' is not supported; supported: llama"),
        (metadata() | {"tokenizer.ggml.pre": None}, "tokenizer.ggml.pre=None is not supported"),
        (metadata(add_space_prefix=True), "add_space_prefix=True is not supported for byte pairs"),
        (metadata() | {"tokenizer.ggml.merges": ["a z z"]}, "merges: 'a z z' makes no token"),
        (metadata() | {"tokenizer.ggml.merges": []}, "missing: tokenizer.ggml.merges"),
        (metadata() | {"tokenizer.ggml.token_type": np.ones(3)}, "must be lists of equal length"),
        (metadata() | {"tokenizer.ggml.trim": 1}, "unknown metadata tokenizer.ggml.trim=1"),
        (pieces(scores=np.ones(3)), "tokenizer.ggml.scores must have a number for each token"),
        (pieces(remove_extra_whitespaces=True), "unknown metadata tokenizer.ggml.remove_extra"),
    ],
)
def test_what_is_refused(found, text):
    with pytest.raises(ConfigError) as error:
        tokenizer_files(found, 64, ())
    assert text in str(error.value) and "\n" not in str(error.value)


def test_a_file_without_a_tokenizer():
    assert tokenizer_files({"tokenizer.ggml.model": "none"}, 64, ()) == {}
    assert tokenizer_files({}, 64, ()) == {}
