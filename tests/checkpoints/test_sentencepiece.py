"""A tokenizer.model without a tokenizer.json: the ids of SentencePiece."""

import json
from pathlib import Path
from typing import Any

import pytest

import swiftkv_jax as skv
from swiftkv_jax.checkpoints.auxiliary import load_tokenizer, read_auxiliary_files
from tests import tiny


def read(folder: Path):
    return load_tokenizer(folder, read_auxiliary_files(folder)[1])


def model_file(tmp_path: Path, pieces: list[tuple[str, int]], **normalizer) -> Path:
    """A directory whose tokenizer is a tokenizer.model of byte pairs: (piece, its type)."""
    from transformers.convert_slow_tokenizer import import_protobuf

    messages: Any = import_protobuf()
    proto = messages.ModelProto()
    for rank, (text, kind) in enumerate(pieces):
        proto.pieces.add(piece=text, type=kind, score=-rank)
    spec = proto.trainer_spec
    spec.model_type, spec.byte_fallback = 2, True
    spec.unk_id, spec.bos_id, spec.eos_id, spec.pad_id = 0, 1, 2, -1
    for name, value in ({"remove_extra_whitespaces": False} | normalizer).items():
        setattr(proto.normalizer_spec, name, value)
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "config.json").write_text(json.dumps(tiny.hf_config()))
    (tmp_path / "tokenizer.model").write_bytes(proto.SerializeToString())
    return tmp_path


NORMAL, UNKNOWN, CONTROL, DEFINED, BYTE = 1, 2, 3, 4, 6
PIECES = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL), ("<tool>", DEFINED)]
PIECES += [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
FIRST = len(PIECES)
PIECES += [(text, NORMAL) for text in ("▁a", "bc", "▁", "a", "b", "c", "▁▁")]
SPACE_A, BC, SPACE, A, B, C, SPACES = range(FIRST, FIRST + 7)


def ids(tokenizer, text: str, special: bool = True) -> list[int]:
    return tokenizer(text, add_special_tokens=special)["input_ids"]


def byte(text: str) -> list[int]:
    return [4 + value for value in text.encode()]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a", [SPACE_A]),
        (" a", [SPACE, SPACE_A]),  # the best pair goes first
        ("abc", [SPACE_A, BC]),
        ("ab a", [SPACE_A, B, SPACE_A]),
        ("   ", [SPACES, SPACES]),  # with the one before the text
        ("  ", [SPACES, SPACE]),
        ("é\n", [SPACE, *byte("é\n")]),
        ("a</s>a", [SPACE_A, 2, SPACE_A]),
        ("a<tool>c", [SPACE_A, 3, SPACE, C]),
    ],
)
def test_a_sentencepiece_model_alone(tmp_path, text, expected):
    """Without tokenizer.json, the package sentencepiece and settings: its own ids, after BOS."""
    tokenizer = read(model_file(tmp_path, PIECES))
    assert ids(tokenizer, text) == [1, *expected]
    assert tokenizer.decode(ids(tokenizer, text), skip_special_tokens=True) in (
        text,
        text.replace("</s>", " ").replace("<tool>", "<tool> "),
    )
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.unk_token) == (
        "<s>",
        "</s>",
        "<unk>",
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"legacy": False}, [1, SPACE_A, 2, A]),  # no space after a special token
        ({"add_bos_token": False, "legacy": True}, [SPACE_A, 2, SPACE_A]),
        ({"add_prefix_space": False}, [1, A, 2, A]),
        ({"tokenizer_class": "LlamaTokenizer", "add_eos_token": True}, [1, SPACE_A, 2, SPACE_A, 2]),
        ({"tokenizer_class": "Ernie4_5_Tokenizer"}, [SPACE_A, 2, SPACE_A]),
    ],
)
def test_settings_of_a_sentencepiece_model(tmp_path, settings, expected):
    folder = model_file(tmp_path, PIECES)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    assert ids(read(folder), "a</s>a") == expected


def test_spaces_of_a_sentencepiece_model(tmp_path):
    plain = read(model_file(tmp_path / "plain", PIECES, add_dummy_prefix=False))
    assert ids(plain, "  a  ", special=False) == [SPACE, SPACE_A, SPACES]
    assert plain.decode([SPACE_A, A]) == " aa"
    tidy = read(model_file(tmp_path / "tidy", PIECES, remove_extra_whitespaces=True))
    assert ids(tidy, "  a   a ", special=False) == [SPACE_A, SPACE_A]


def test_a_model_file_of_another_format(tmp_path):
    """tiktoken's has the same name in Llama 3's original folder."""
    folder = model_file(tmp_path, PIECES)
    (folder / "tokenizer.model").write_bytes(b"IQ== 0\nIg== 1\n")
    with pytest.raises(skv.errors.CheckpointError, match=r"tokenizer\.model: .*tokenizer\.json"):
        read(folder)
