"""A model's tokenizer is that of its tokenizer.json, or of its SentencePiece file, on every way in
and out of this package."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.numpy import save_file
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

import swiftkv_jax as skv
from swiftkv_jax.checkpoints.auxiliary import end_tokens, load_tokenizer, read_auxiliary_files
from swiftkv_jax.checkpoints.gguf.tokenizer import TEKKEN, THREE_DIGITS
from swiftkv_jax.infer.text import TextStream
from swiftkv_jax.train.data.prepare import tokenizer_fingerprint
from tests import tiny

LINES = [
    "def main(argv):\n    for word in argv:\n\tprint(word, 'naïve café, 東京 🙂')\n",
    " leading and  double  spaces, and trailing ",
    " ",
    "",
    "\n\n    return x  # ▁",
    "<s>begins</s> and follows</s>it",
    "a<|im_start|>user\nhi<|im_end|>",
]
SPECIAL = ["<unk>", "<s>", "</s>"]


def template(begin: str) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(single=f"{begin} $A", special_tokens=[(begin, 1)])


def sentencepiece_style(before: str) -> Tokenizer:
    """As Llama's and Mistral's files: a space before the first part of a text, before each part, or
    before none, by a pre-tokenizer or by a normalizer."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if before == "normalizer":
        steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        tokenizer.normalizer = normalizers.Sequence(steps)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace("▁", before, split=False)
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    parts += [] if before == "never" else [decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=330, special_tokens=[*SPECIAL, *bytes_], show_progress=False
    )
    tokenizer.train_from_iterator([line for line in LINES if "<" not in line], trainer)
    state = json.loads(tokenizer.to_str())
    # Bytes are pieces of the vocabulary, not added tokens.
    state["added_tokens"] = state["added_tokens"][: len(SPECIAL)]
    return Tokenizer.from_str(json.dumps(state))


def byte_level() -> Tokenizer:
    """As Llama 3's, Qwen's and DeepSeek's files."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(LINES, trainer)
    tokenizer.add_tokens([AddedToken("<|im_start|>", special=True), "<|im_end|>"])
    return tokenizer


BACKENDS = {
    "first": lambda: sentencepiece_style("first"),
    "never": lambda: sentencepiece_style("never"),
    "always": lambda: sentencepiece_style("always"),
    "normalizer": lambda: sentencepiece_style("normalizer"),
    "bytes": byte_level,
}


@pytest.fixture(scope="module")
def backends() -> dict[str, Tokenizer]:
    return {name: make() for name, make in BACKENDS.items()}


def write(folder: Path, tokenizer: Tokenizer, model_type: str = "llama", **settings) -> Path:
    """A directory with the files that `load_tokenizer` reads. None leaves a setting out."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"} | settings
    fields = {name: value for name, value in fields.items() if value is not None}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    hf = tiny.hf_config(
        model_type=model_type,
        vocab_size=max(tokenizer.get_vocab_size(), 1),
        num_key_value_layers=None,
        key_value_group_size=None,
    )
    hf |= {"sliding_window": None} if model_type == "mistral" else {}
    del hf["swiftkv"]
    (folder / "config.json").write_text(json.dumps(hf))
    return folder


def read(folder: Path):
    return load_tokenizer(folder, read_auxiliary_files(folder)[1])


def ids(tokenizer, text: str, special: bool = True) -> list[int]:
    return tokenizer(text, add_special_tokens=special)["input_ids"]


@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen3", "phi3"])
@pytest.mark.parametrize("kind", [None, "LlamaTokenizer", "GemmaTokenizerFast", "Qwen2Tokenizer"])
def test_ids_are_those_of_the_file(tmp_path, backends, name, model_type, kind):
    """With and without the tokens around a text, and back: one by one, and all at once."""
    backend = Tokenizer.from_str(backends[name].to_str())
    if kind != "Qwen2Tokenizer":
        backend.post_processor = template("<s>")
    folder = write(tmp_path, backend, model_type, tokenizer_class=kind)
    tokenizer, expected = read(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    for text in LINES:
        for special in (True, False):
            found = ids(tokenizer, text, special)
            assert found == expected.encode(text, add_special_tokens=special).ids, text
        whole = expected.decode(found)
        assert tokenizer.decode(found, skip_special_tokens=True) == whole
        # "▁" is a space to SentencePiece, and a `Metaspace` adds none before one.
        if "<" not in text and not (text.startswith(" ") and name in ("first", "always")):
            assert whole == (text if name == "bytes" else text.replace("▁", " "))
        stream = TextStream(tokenizer)
        assert "".join(stream.push([token]) for token in found) + stream.finish() == whole


@pytest.mark.parametrize(
    ("name", "kind", "around", "bos", "eos", "first", "last"),
    [
        # DeepSeek-R1-Distill-Qwen: the file adds nothing, the setting says it does
        ("bytes", "LlamaTokenizerFast", "", True, False, True, False),
        ("bytes", "PreTrainedTokenizerFast", "", True, None, True, False),
        ("bytes", None, "", True, True, True, True),
        ("first", "LlamaTokenizer", "", True, False, True, False),
        # both say so: once
        ("first", "LlamaTokenizer", "<s>", True, False, True, False),
        ("bytes", "PreTrainedTokenizerFast", "<s>", True, True, True, True),
        # nothing is said: the file's
        ("first", "LlamaTokenizer", "<s>", None, None, True, False),
        ("first", "LlamaTokenizer", "", None, None, False, False),
        # Llama's and Gemma's classes go by the setting alone
        ("first", "LlamaTokenizer", "<s>", False, None, False, False),
        ("first", "LlamaTokenizerFast", "<s>", False, True, False, True),
        ("never", "GemmaTokenizer", "<s>", False, False, False, False),
        ("never", "GemmaTokenizer", "<s>", None, True, True, True),
        # others by the file
        ("bytes", "PreTrainedTokenizerFast", "<s>", False, False, True, False),
        ("bytes", "Qwen2Tokenizer", "", False, None, False, False),
    ],
)
def test_the_flags_of_bos_and_eos(tmp_path, backends, name, kind, around, bos, eos, first, last):
    backend = Tokenizer.from_str(backends[name].to_str())
    backend.post_processor = template(around) if around else backend.post_processor
    write(tmp_path, backend, tokenizer_class=kind, add_bos_token=bos, add_eos_token=eos)
    tokenizer = read(tmp_path)
    for text in LINES[:4]:
        bare = backend.encode(text, add_special_tokens=False).ids
        assert ids(tokenizer, text) == [1] * first + bare + [2] * last
        assert ids(tokenizer, text, special=False) == bare


def test_a_flag_without_its_token_adds_nothing(tmp_path, backends):
    """Qwen has no token that begins a text."""
    write(tmp_path, backends["bytes"], bos_token=None, add_bos_token=True, add_eos_token=False)
    assert ids(read(tmp_path), "a b") == backends["bytes"].encode("a b").ids


@pytest.mark.short("bytes-settings1")
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("never", {"tokenizer_class": "LlamaTokenizer"}),
        ("bytes", {"tokenizer_class": "LlamaTokenizerFast", "add_bos_token": True}),
    ],
)
def test_copies_and_students_have_the_tokenizer_of_their_base(tmp_path, backends, name, settings):
    """A mistral without a window becomes a llama, and a student has a type that transformers does
    not know."""
    settings = settings | {"chat_template": "{{ messages }}"}
    folder = write(tmp_path / "base", backends[name], "mistral", **settings)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    (folder / "chat_template.jinja").write_text("{{ bos_token }}")
    hf = json.loads((folder / "config.json").read_text())
    save_file(tiny.tensors_for({"num_key_value_layers": None, **hf}), folder / "model.safetensors")
    base = skv.load(folder)
    student = skv.add_swiftkv(base, num_key_value_layers=2)
    skv.save(base, tmp_path / "orbax")
    skv.save_hf(base, tmp_path / "hf")
    skv.save_hf(student, tmp_path / "delta", format="delta")
    skv.save(student, tmp_path / "student")
    assert json.loads((tmp_path / "hf" / "config.json").read_text())["model_type"] == "llama"
    assert base.eos_token_ids == student.eos_token_ids == (2,)  # no config states one
    begin = [1] if "add_bos_token" in settings else []
    for copy in ("base", "orbax", "hf", "delta", "student"):
        tokenizer = read(tmp_path / copy)
        for text in LINES:
            bare = backends[name].encode(text, add_special_tokens=False).ids
            assert ids(tokenizer, text) == begin + bare, copy
        assert tokenizer.chat_template == {"default": "{{ bos_token }}", "tool_use": "{{ tools }}"}
        assert tokenizer.name_or_path == str(tmp_path / copy)
        assert tokenizer_fingerprint(tokenizer) == tokenizer_fingerprint(base.tokenizer)
    assert ids(skv.load(tmp_path / "student").tokenizer, " a") == ids(base.tokenizer, " a")
    for copy in ("orbax", "hf"):
        contents = skv.load(tmp_path / copy).auxiliary_files.contents
        assert contents == base.auxiliary_files.contents, "files of what was not changed"
    changed = dataclasses.replace(base, eos_token_ids=(2, 1))
    for number, template in enumerate(("{{ 1 }}", {"default": "{{ 1 }}", "rag": "{{ 2 }}"}, None)):
        changed.tokenizer.chat_template = template
        skv.save(changed, tmp_path / f"orbax {number}")
        skv.save_hf(changed, tmp_path / f"hf {number}")
        for again in (skv.load(tmp_path / f"{kind} {number}") for kind in ("orbax", "hf")):
            assert again.tokenizer.chat_template == template
            assert again.eos_token_ids == (2, 1)


def test_special_and_added_tokens_are_those_of_tokenizer_config(tmp_path, backends):
    """Tokens that tokenizer.json lacks follow in the order of their ids; one that it has stays as
    it is there."""
    size = backends["bytes"].get_vocab_size()
    write(
        tmp_path,
        backends["bytes"],
        bos_token={"__type": "AddedToken", "content": "<s>", "normalized": True},
        pad_token="<pad>",
        image_token="<image>",
        extra_special_tokens=["<|im_start|>", "<extra>"],
        added_tokens_decoder={
            str(size + 1): {"content": "<two>", "special": True},
            str(size): {"content": "<one>", "lstrip": True},
            "1": {"content": "<s>", "rstrip": True},
        },
    )
    tokenizer = read(tmp_path)
    assert (tokenizer.bos_token, tokenizer.pad_token) == ("<s>", "<pad>")
    assert tokenizer.special_tokens_map["image_token"] == "<image>"
    added = {token.content: i for i, token in tokenizer.added_tokens_decoder.items()}
    assert (added["<one>"], added["<two>"]) == (size, size + 1)
    assert ids(tokenizer, "<s> a  <one><two>") == [
        *backends["bytes"].encode("<s> a").ids,
        size,
        size + 1,
    ]
    assert {"<pad>", "<image>", "<extra>"} <= added.keys() and "<|im_end|>" in added
    decoded = tokenizer.decode([size, size + 1, added["<pad>"]], skip_special_tokens=True)
    assert decoded == "<one>"


@pytest.mark.parametrize(
    ("stated", "own", "expected"),
    [((), 2, (2,)), ((1, 2), 2, (1, 2)), ((1,), None, (1,)), ((1,), 61, (1,))],
)
def test_the_tokenizers_end_token_is_one_that_the_model_has(stated, own, expected):
    assert end_tokens(stated, SimpleNamespace(eos_token_id=own), vocab_size=61) == expected
    assert end_tokens(stated, None, vocab_size=61) == stated


def test_older_files_of_tokens(tmp_path, backends):
    """special_tokens_map.json and added_tokens.json, where tokenizer_config.json lists none."""
    size = backends["bytes"].get_vocab_size()
    write(tmp_path, backends["bytes"], eos_token="<unk>")
    tokens = {"eos_token": {"content": "</s>", "lstrip": False}, "pad_token": "<pad>"}
    (tmp_path / "special_tokens_map.json").write_text(json.dumps(tokens))
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<pad>": size + 1, "<one>": size}))
    tokenizer = read(tmp_path)
    assert (tokenizer.eos_token, tokenizer.pad_token_id) == ("</s>", size + 1)
    assert ids(tokenizer, "<one>") == [size]


def test_a_tokenizer_file_alone(tmp_path, backends):
    """config.json says which tokens begin and end a text."""
    folder = write(tmp_path, backends["first"])
    (folder / "tokenizer_config.json").unlink()
    hf = json.loads((folder / "config.json").read_text())
    hf |= {"bos_token_id": 1, "eos_token_id": [2, 0]}
    (folder / "config.json").write_text(json.dumps(hf))
    tokenizer = read(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == ("<s>", "</s>", None)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, None),
        ({"chat_template": "one"}, "one"),
        (
            {"chat_template": [{"name": "default", "template": "one"}]},
            "one",
        ),
        (
            {
                "chat_template": [
                    {"name": "default", "template": "one"},
                    {"name": "rag", "template": "two"},
                ]
            },
            {"default": "one", "rag": "two"},
        ),
    ],
)
def test_chat_templates(tmp_path, backends, settings, expected):
    folder = write(tmp_path, backends["bytes"], **settings)
    assert read(folder).chat_template == expected
    (folder / "chat_template.json").write_text('{"chat_template": "processor"}')
    assert read(folder).chat_template == (expected or "processor")
    (folder / "chat_template.jinja").write_text("file")
    assert read(folder).chat_template == "file"


def split_as(pattern: str, backend: Tokenizer) -> Tokenizer:
    tokenizer = Tokenizer.from_str(backend.to_str())
    steps = [
        pre_tokenizers.Split(Regex(pattern), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return tokenizer


@pytest.mark.parametrize(
    ("model_type", "tekken", "corrected", "warnings"),
    [("mistral", True, True, 0), ("mistral", False, False, 1), ("llama", True, False, 0)],
)
def test_mistrals_texts_are_split_as_tekken_does(
    tmp_path, backends, caplog, model_type, tekken, corrected, warnings
):
    """Files of Mistral Small 3.1 have Llama 3's pattern. Exports are written from the contents."""
    wrong, right = (split_as(pattern, backends["bytes"]) for pattern in (THREE_DIGITS, TEKKEN))
    write(tmp_path, wrong, model_type)
    if tekken:
        (tmp_path / "tekken.json").write_text("{}")
    text = "'main"
    assert wrong.encode(text).ids != right.encode(text).ids
    contents = read_auxiliary_files(tmp_path)[1].contents
    expected = right if corrected else wrong
    assert Tokenizer.from_str(contents["tokenizer.json"].decode()).to_str() == expected.to_str()
    assert ids(read(tmp_path), text) == expected.encode(text).ids
    assert caplog.text.count("as Llama 3 does") == warnings


def test_no_truncation_and_no_padding(tmp_path, backends):
    """Some files were saved with those of a training run."""
    backend = Tokenizer.from_str(backends["bytes"].to_str())
    backend.enable_truncation(2)
    backend.enable_padding(length=4)
    write(tmp_path, backend, add_bos_token=True)
    bare = backends["bytes"].encode("a b c d").ids
    assert read(tmp_path).backend_tokenizer.encode("a b c d").ids == [1, *bare]
