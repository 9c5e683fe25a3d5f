"""Text that a grammar forces comes out as that text, whatever added tokens it spells, with
tokenizers of bytes and of SentencePiece."""

import json
import re
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from swiftkv_jax.errors import UsageError
from swiftkv_jax.infer import GrammarCompiler, StructuredOutputs
from swiftkv_jax.infer.structured.grammar_tokenizer import hide_token_names

ADDED = [
    AddedToken("<tool_call>", special=False, normalized=False),
    AddedToken("</tool_call>", special=True),
    AddedToken("[INST]", special=True),
    AddedToken("covid", special=False, lstrip=True, rstrip=True),
    AddedToken("é", special=False),
]
LETTERS = [chr(code) for code in range(33, 127)]
MERGES = [("t", "h"), ("th", "e"), ("<", "t"), ("<", "|"), ("i", "m"), ('"', "<"), ("e", "n")]


def byte_level() -> Any:
    """As Qwen's: bytes, added tokens after the vocabulary, NFC."""
    vocab = {one: index for index, one in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {"".join(pair): len(vocab) + at for at, pair in enumerate(MERGES)}
    backend = Tokenizer(models.BPE(vocab, MERGES))
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    backend.decoder = decoders.ByteLevel()
    return backend


def sentence_piece() -> Any:
    """As Llama 2's: control tokens in the vocabulary, bytes for what is not in it."""
    names = ["<unk>", "<|im_end|>", "<s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁"]
    names += [*LETTERS, *("".join(pair) for pair in MERGES), "<s"]
    vocab = {name: index for index, name in enumerate(names)}
    merges = [*MERGES, ("<", "s"), ("<s", ">")]
    backend = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    spaces = normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence(list(spaces))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    backend.add_special_tokens(["<unk>", "<s>"])
    return backend


def made(backend: Any) -> tuple[Any, GrammarCompiler, int]:
    backend.add_special_tokens(["<|im_end|>"])
    backend.add_tokens(ADDED)
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    # A vocabulary that is padded, as most are.
    compiler = GrammarCompiler(tokenizer, vocab_size=len(tokenizer) + 5, eos_token_ids=[end])
    return tokenizer, compiler, end


@pytest.fixture(scope="module", params=[byte_level, sentence_piece])
def model(request):
    return made(request.param())


def walk(model, outputs: StructuredOutputs | str, seed: int = 0) -> tuple[str, list[int]]:
    """(a random output, its tokens). Ends as soon as it may."""
    tokenizer, compiler, end = model
    compiled = compiler.compile if isinstance(outputs, StructuredOutputs) else None
    matcher = compiled(outputs) if compiled else compiler.compile_grammar(outputs)
    rng, ids = np.random.default_rng(seed), []
    mask = np.zeros((1, -(-(len(tokenizer) + 5) // 32)), np.uint32)
    while not matcher.is_ended and len(ids) < 400:
        matcher.fill_masks([matcher], mask)
        assert not matcher.error, tokenizer.decode(ids)
        possible = np.flatnonzero(np.unpackbits(mask.view(np.uint8)[0], bitorder="little"))
        if end in possible:
            break
        ids.append(int(rng.choice(possible)))
        matcher.accept(ids[-1])
    assert not matcher.error, tokenizer.decode(ids)
    backend = tokenizer.backend_tokenizer
    return backend.decode(ids, skip_special_tokens=True), ids


TEXTS = [
    "<|im_end|>",
    "a <|im_end|> b",
    "<tool_call>",
    "a<tool_call>b</tool_call>",
    "[INST] the",
    "the covid  is",
    "<s>the</s><unk>",
    "e\u0301te\u0301 caf\u00e9",  # what NFC changes, and what it makes
    "世界 😀 नमस्ते",
    "a▁b  c",
    "<0x41><think>",
    '"\\"',
]


@pytest.mark.parametrize("text", TEXTS)
def test_forced_text_comes_out_as_it_is(model, text):
    quoted = json.dumps(text)
    forms: list[tuple[StructuredOutputs, Any]] = [
        (StructuredOutputs(json={"const": text}), text),
        (StructuredOutputs(json={"enum": [text]}), text),
        (StructuredOutputs(json={"enum": [{"a": [text]}]}), {"a": [text]}),
        (
            StructuredOutputs(
                json={
                    "type": "object",
                    "properties": {text: {"const": 1}},
                    "required": [text],
                    "additionalProperties": False,
                }
            ),
            {text: 1},
        ),
        (StructuredOutputs(json={"type": "string", "pattern": f"^{re.escape(text)}$"}), text),
        (
            StructuredOutputs(
                json={
                    "type": "object",
                    "patternProperties": {f"^{re.escape(text)}$": {"const": 2}},
                    "minProperties": 1,
                    "additionalProperties": False,
                }
            ),
            {text: 2},
        ),
    ]
    control = set(model[0].added_tokens_decoder) - {model[0].convert_tokens_to_ids("covid")}
    for outputs, value in forms:
        written, ids = walk(model, outputs)
        assert json.loads(written) == value, written
        assert not control & set(ids)
    for outputs in (
        StructuredOutputs(regex=re.escape(text)),
        StructuredOutputs(choice=[text]),
        StructuredOutputs(grammar=f"start: {quoted}"),
    ):
        assert walk(model, outputs)[0] == text


def test_an_enum_may_still_be_chosen_from(model):
    texts = ["a <|im_end|>", "b", "<tool_call>"]
    found = {walk(model, StructuredOutputs(json={"enum": texts}), seed)[0] for seed in range(40)}
    assert found == {json.dumps(text) for text in texts}


def test_grammars_name_tokens_as_the_tokenizer_does(model):
    """Outside texts, expressions and comments, and by themselves or in a list of grammars."""
    lark = 'start: <tool_call> "<tool_call>" /<tool_call>/ <s>? // <tool_call>'
    for grammar in (lark, json.dumps({"grammars": [{"lark_grammar": lark}]})):
        if "<s>" in model[0].get_vocab():
            text, ids = walk(model, grammar)
        else:
            with pytest.raises(UsageError, match='unknown special token: "<s>"'):
                walk(model, grammar)
            text, ids = walk(model, grammar.replace("<s>?", ""))
        named = model[0].convert_tokens_to_ids("<tool_call>")
        assert text == "<tool_call>" * 3 and ids[0] == named and named not in ids[1:]
    assert hide_token_names('start: <[5]> "a<b>" # <c>') == 'start: <[5]> "a<b>" # <c>'
