"""Metadata of GGUF files: what is read, and what is refused with the name of the key."""

import json

import pytest

import swiftkv_jax as skv
from swiftkv_jax import CheckpointError, ConfigError
from swiftkv_jax.__main__ import main
from swiftkv_jax.checkpoints import open_any
from swiftkv_jax.infer.commands.sampling_options import checkpoint_params
from tests.checkpoints import gguf_files
from tests.checkpoints.gguf_files import NONE
from tests.checkpoints.hf_models import message
from tests.checkpoints.test_gguf import LLAMA, TOKENIZER, Type, llama_file, tensors


@pytest.mark.parametrize(
    "keys, text",
    [
        (
            {"attention.magic": 2.0},
            "unknown metadata llama.attention.magic=2.0: it could change the model; if it changes "
            "nothing, remove it by `gguf-new-metadata --remove-metadata llama.attention.magic IN "
            "OUT`",
        ),
        ({"vocab_size": 9}, "llama.vocab_size=9, but token_embd.weight has 61 rows: the file is"),
        ({"expert_count": 8}, "llama.expert_count=8 is not supported; supported: 0"),
        ({"rope.scaling.type": "ntk", "rope.scaling.factor": 2.0}, "llama.rope.scaling.type='ntk'"),
        ({"attention.head_count_kv": [2, 2, 1, 2, 2, 2]}, "llama.attention.head_count_kv=[2, 2, 1"),
        ({"attention.value_length": 8}, "llama.attention.value_length=8 is not supported"),
        ({"general.type": "adapter"}, "general.type='adapter': not a model"),
        ({"general.type": "mmproj"}, "general.type='mmproj': not a model"),
        ({"tokenizer.ggml.model": "t5"}, "tokenizer.ggml.model='t5' is not supported"),
        ({"tokenizer.ggml.pre": "viking"}, "tokenizer.ggml.pre='viking' is not supported"),
        (
            {"tokenizer.ggml.precompiled_charsmap": [1]},
            "unknown metadata tokenizer.ggml.precompiled_charsmap=array([1], dtype=int32): it "
            "could change token ids; if it changes nothing, remove it by `gguf-new-metadata "
            "--remove-metadata tokenizer.ggml.precompiled_charsmap IN OUT`",
        ),
        ({"general.sampling.temp": "hot"}, "general.sampling.temp='hot' must be a number"),
    ],
)
def test_metadata_that_is_not_implemented(tmp_path, keys, text):
    path = llama_file(tmp_path / "a.gguf", tensors(), TOKENIZER | keys)
    assert message(path, ConfigError).startswith(text)


def test_the_epsilon_is_required(tmp_path):
    """As llama.cpp does: a default would be a guess."""
    key = "attention.layer_norm_rms_epsilon"
    keys = gguf_files.common(LLAMA)
    del keys[key]
    found = gguf_files.converted(LLAMA, tensors(), permute=True)
    path = gguf_files.write(tmp_path / "a.gguf", "llama", keys, found)
    assert message(path, ConfigError) == f"missing: llama.{key}"


SAMPLING = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "penalty_repeat": 1.1}


def test_recommended_sampling(tmp_path):
    """What a file recommends is what a generation_config.json with the same numbers sets."""
    keys = {f"general.sampling.{name}": value for name, value in SAMPLING.items()}
    model = skv.load(llama_file(tmp_path / "a.gguf", tensors(), TOKENIZER | keys))
    wanted = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05}
    wanted["repetition_penalty"] = 1.1
    file = json.loads(model.auxiliary_files.contents["generation_config.json"])
    assert file == {**wanted, "do_sample": True, "bos_token_id": 260, "eos_token_id": [261]}
    assert checkpoint_params(model) == wanted
    greedy = open_any(
        llama_file(tmp_path / "b.gguf", tensors(), TOKENIZER | {"general.sampling.temp": 0.0})
    )
    file = json.loads(greedy.auxiliary_files.contents["generation_config.json"])
    assert (file["temperature"], file["do_sample"]) == (0.0, False)


@pytest.mark.parametrize(
    "text, what",
    [
        (b"hello", "tokenizer.ggml.tokens is not UTF-8: b'h\\xffllo'"),
        (b"smollm", "tokenizer.ggml.pre is not UTF-8: b's\\xffollm'"),
        (b"rope.freq_base", "the name of a key is not UTF-8: b'llama.r\\xffpe.freq_base'"),
        (b"blk.0.attn_q.weight", "the name of a tensor is not UTF-8: b'b\\xffk.0.attn_q.weight'"),
        (b"caff model", None),
    ],
)
def test_text_that_is_not_utf_8(tmp_path, text, what):
    """The key is named; what only describes the model is read nevertheless."""
    merges = ["h e", "l l", "he ll", "hell o"]
    keys = gguf_files.byte_pairs("smollm", merges, NONE) | {"general.name": "caff model"}
    path = llama_file(tmp_path / "a.gguf", tensors(), keys)
    content = path.read_bytes()
    assert text in content
    path.write_bytes(content.replace(text, text[:1] + b"\xff" + text[2:]))
    if what is None:
        assert open_any(path).config.vocab_size == 61
    else:
        assert message(path, CheckpointError) == (
            f"{what}; convert the model again, or get another file of it"
        )


def test_inspect_says_how_a_file_is_stored(tmp_path, capsys):
    types = {f"blk.{layer}.attn_q.weight": Type.Q8_0 for layer in range(2)}
    path = llama_file(tmp_path / "a.gguf", tensors(), types=types)
    assert main(["convert", "inspect", str(path)]) == 0
    lines = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    count = len(gguf_files.converted(LLAMA, tensors(), permute=True))
    assert lines["quantization"] == f"GGUF: F32 x {count - 2}, Q8_0 x 2"
    assert lines["file"] == f"bytes             {path.stat().st_size:,}"
