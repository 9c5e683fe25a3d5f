"""GGUF files: what is read is what a Hugging Face directory of the same model holds."""

import json
import sys

import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import quants
from safetensors.numpy import load_file, save_file

import swiftkv_jax as skv
from swiftkv_jax import ConfigError, checkpoints
from swiftkv_jax.__main__ import main
from swiftkv_jax.checkpoints import open_any
from swiftkv_jax.checkpoints.auxiliary import load_tokenizer
from swiftkv_jax.checkpoints.gguf import file
from swiftkv_jax.cli import model_loading
from swiftkv_jax.cli.model_options import ModelOptions
from tests import tiny
from tests.checkpoints import gguf_files
from tests.checkpoints.gguf_files import CONTROL, NONE, UNUSED, USER_DEFINED
from tests.checkpoints.hf_models import assert_same, message

LLAMA = tiny.hf_config(
    model_type="llama", num_key_value_layers=0, rope_theta=5e5, hidden_size=64, head_dim=16
)
DRY = "--num-key-value-layers 3 --max-steps 4 --max-length 64".split()
TOKENIZER = gguf_files.byte_pairs(
    "llama-bpe",
    ["h e", "l l", "he ll", "Ġ w"],
    {"<s>": CONTROL, "<|eot_id|>": CONTROL, "<think>": USER_DEFINED, "[PAD0]": UNUSED},
    bos_token_id=260,
    eos_token_id=261,
)


def tensors(**fields) -> dict[str, np.ndarray]:
    hf = LLAMA | fields
    return tiny.tensors_for({**hf, "num_key_value_layers": hf["num_hidden_layers"]})


def hf_folder(path, stored, **fields):
    path.mkdir()
    ours = ("swiftkv", "num_key_value_layers", "key_value_group_size")
    hf = {name: value for name, value in (LLAMA | fields).items() if name not in ours}
    (path / "config.json").write_text(json.dumps(hf))
    save_file(stored, path / "model.safetensors", {"format": "pt"})
    return path


def llama_file(path, stored, keys=NONE, more=NONE, types=NONE, **options):
    """A GGUF file of the tensors `stored`; `keys` and the tensors `more` go beside or over its
    own."""
    keys = gguf_files.common(LLAMA) | {"vocab_size": 61, "rope.dimension_count": 16, **keys}
    found = gguf_files.converted(LLAMA, stored, permute=True) | {**more}
    return gguf_files.write(path, "llama", keys, found, types, **options)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The same Llama as `hf/` and `llama.gguf`."""
    folder, stored = tmp_path_factory.mktemp("gguf"), tensors(attention_bias=True)
    hf_folder(folder / "hf", stored, attention_bias=True)
    llama_file(folder / "llama.gguf", stored)
    return folder


# Llama ------------------------------------------------------------------------


def test_a_llama_is_the_one_of_the_directory(folder):
    """Rows of q and k are put back, biases too; numbers of 32 bits are those of the config.json."""
    ours = skv.load(folder / "llama.gguf", dtype="float32")
    theirs = skv.load(folder / "hf", dtype="float32")
    assert_same(ours, theirs)
    assert ours.config.norm_eps == 1e-5 and ours.config.ropes[0].theta == 5e5


def test_its_tokenizer_and_end_tokens(tmp_path):
    """Special tokens are matched as a whole, a text begins as llama-bpe says, and numbers that
    only fill rows are no tokens."""
    model = skv.load(llama_file(tmp_path / "a.gguf", tensors(), TOKENIZER))
    assert model.tokenizer.encode("hell<think> w<|eot_id|>[") == [260, 258, 262, 259, 261, 58]
    assert model.tokenizer.decode([258, 259, 262]) == "hell w<think>"
    assert model.eos_token_ids == (261,) and len(model.tokenizer) == 263
    skv.save_hf(model, tmp_path / "hf")
    again = skv.load(tmp_path / "hf")
    assert again.tokenizer.encode("hell<think> w") == [260, 258, 262, 259]
    assert again.eos_token_ids == (261,)


def test_a_split_model_and_a_mesh(folder):
    """Parts of matrices are read where they belong."""
    config = open_any(folder / "hf").config.cut(2, 2)
    one = checkpoints.load(folder / "llama.gguf", config=config)
    assert_same(one, checkpoints.load(folder / "hf", config=config))
    mesh = skv.make_mesh((2, 2))
    ours, theirs = (skv.load(folder / name, mesh=mesh) for name in ("llama.gguf", "hf"))
    assert_same(ours, theirs)
    assert ours.llama.lower_qkv.q.sharding == theirs.llama.lower_qkv.q.sharding


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_values_are_decoded_to_the_dtype(tmp_path, dtype):
    stored = tensors()
    types = {"blk.0.ffn_down.weight": Type.BF16, "token_embd.weight": Type.Q8_0}
    path = llama_file(tmp_path / "a.gguf", stored, types=types)
    model = skv.load(path, dtype=dtype)
    embed = stored["model.embed_tokens.weight"]
    wanted = quants.dequantize(quants.quantize(embed, Type.Q8_0), Type.Q8_0)
    np.testing.assert_array_equal(np.asarray(model.llama.embed), wanted.astype(model.dtype))
    assert model.dtype == dtype
    assert open_any(path).dtypes["embed"] == np.float32
    assert model_loading._dtype(ModelOptions(path, dtype="auto")) is None  # nobody's choice


def test_files_of_16_bits_keep_them(tmp_path):
    stored = tensors()
    types = {
        name: Type.BF16
        for name in gguf_files.converted(LLAMA, stored)
        if name.endswith("weight") and "norm" not in name
    }
    opened = open_any(llama_file(tmp_path / "a.gguf", stored, types=types))
    assert opened.dtypes["embed"] == jax.numpy.bfloat16
    assert opened.dtypes["final_norm"] == np.float32
    assert model_loading._dtype(ModelOptions(tmp_path / "a.gguf", dtype="auto")) == "bfloat16"


def test_llama3_scaling_from_its_divisors(tmp_path):
    stored = tensors()
    frequencies = 1 / 5e5 ** (np.arange(0, 16, 2) / 16)
    smooth = np.clip((8192 * frequencies / (2 * np.pi) - 1) / 3, 0, 1)
    assert 0 < smooth[4] < 1
    more = {"rope_freqs.weight": 1 / ((1 - smooth) / 32 + smooth)}
    ours = skv.load(llama_file(tmp_path / "a.gguf", stored, more=more))
    scaling = {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    theirs = skv.load(hf_folder(tmp_path / "hf", stored, rope_scaling=scaling))
    assert_same(ours, theirs)
    more["rope_freqs.weight"][4] *= 1.01
    path = llama_file(tmp_path / "b.gguf", stored, more=more)
    assert message(path, ConfigError).startswith("rope_freqs.weight: these divisors of frequencies")


@pytest.mark.parametrize(
    "keys, scaling",
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"factor": 4.0}),
        ({"rope.scale_linear": 2.0, "rope.scaling.type": "linear"}, {"factor": 2.0}),
        (
            {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": 4.0,
                "rope.scaling.original_context_length": 32,
                "rope.scaling.yarn_beta_fast": 16.0,
                "rope.scaling.finetuned": True,
            },
            {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "beta_fast": 16.0,
            },
        ),
    ],
)
def test_scalings_that_keys_say(tmp_path, keys, scaling):
    stored = tensors()
    ours = open_any(llama_file(tmp_path / "a.gguf", stored, keys))
    scaling = {"rope_type": "linear"} | scaling
    theirs = open_any(hf_folder(tmp_path / "hf", stored, rope_scaling=scaling))
    assert ours.config == theirs.config and ours.config.ropes[0].scaling is not None


def test_a_window_of_llama_is_mistrals(tmp_path):
    path = llama_file(tmp_path / "a.gguf", tensors(), {"attention.sliding_window": 8})
    config = open_any(path).config
    assert config.family == "mistral" and config.layer_kinds[0].window == 8


# Block formats ----------------------------------------------------------------

BLOCKS = "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS MXFP4 F16 BF16".split()


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_format_is_what_the_library_decodes(name, tmp_path, monkeypatch):
    """In parts of rows and of columns, and in chunks."""
    type_ = Type[name]
    block, size = gguf_files.GGML_QUANT_SIZES[type_]
    rows = np.random.default_rng(0).integers(0, 256, (40, 512 // block * size), np.uint8)
    path = tmp_path / "a.gguf"
    writer = gguf_files.GGUFWriter(path, "llama")
    writer.add_tensor("w", rows.view(np.float16) if name == "F16" else rows, raw_dtype=type_)
    gguf_files.finish(writer)
    stored = file.read_gguf(path).tensors["w"]
    assert stored.shape == (40, 512) and stored.type_name == name
    with np.errstate(all="ignore"):  # some scales are not finite
        wanted = quants.dequantize(rows, type_).reshape(40, 512)
    tensor = file.GgufTensor("w", stored)
    for chunk in (4 * 2**20, 7 * 512):
        monkeypatch.setattr(file, "_CHUNK_ELEMENTS", chunk)
        for part in ((slice(0, 40), slice(0, 512)), (slice(9, 31), slice(100, 300))):
            out = np.empty([axis.stop - axis.start for axis in part], np.float32)
            tensor.read_into(out, part)
            np.testing.assert_array_equal(out, wanted[part])


# Files and folders ------------------------------------------------------------


def test_a_folder_with_one(folder, tmp_path):
    (tmp_path / "llama.gguf").symlink_to(folder / "llama.gguf")
    (tmp_path / "mmproj-llama.gguf").write_bytes(b"GGUF")
    (tmp_path / "config.json").write_text("{}")
    assert open_any(tmp_path).path == tmp_path / "llama.gguf"
    assert checkpoints.kind_of(tmp_path) == "GGUF"
    (tmp_path / "other.gguf").symlink_to(folder / "llama.gguf")
    assert message(tmp_path) == "2 GGUF files; name one of them: llama.gguf, other.gguf"


def test_a_file_by_another_name(folder, tmp_path):
    (tmp_path / "blob").symlink_to(folder / "llama.gguf")
    assert checkpoints.kind_of(tmp_path / "blob") == "GGUF"


def test_parts_are_joined(folder, tmp_path):
    stored = tensors(attention_bias=True)
    llama_file(tmp_path / "m.gguf", stored, split_max_tensors=40, small_first_shard=True)
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) == 4 and parts[0].name == "m-00001-of-00004.gguf"
    whole = skv.load(folder / "llama.gguf")
    for path in (tmp_path, parts[0], parts[2]):
        assert_same(skv.load(path), whole)
    parts[1].rename(tmp_path / "kept")
    assert message(parts[0]) == "one of 4 parts; missing: m-00002-of-00004.gguf"
    (tmp_path / "kept").rename(parts[1])
    renamed = parts[3].rename(tmp_path / "renamed.gguf")
    assert message(renamed).startswith("says that it is part 4 of 4, its name that it is 1 of 1")


def test_conversions(folder, tmp_path, capsys):
    """To Orbax and to a Hugging Face directory, which give the same model."""
    path = str(folder / "llama.gguf")
    assert main(["convert", "hf2orbax", path, str(tmp_path / "orbax")]) == 0
    assert main(["convert", "orbax2hf", path, str(tmp_path / "hf")]) == 0
    for name in ("orbax", "hf"):
        assert_same(skv.load(tmp_path / name), skv.load(path))
    ours, theirs = (load_file(p / "model.safetensors") for p in (tmp_path / "hf", folder / "hf"))
    assert ours.keys() == theirs.keys()
    assert all((ours[name] == theirs[name]).all() for name in ours)
    capsys.readouterr()
    assert main(["convert", "inspect", path]) == 0
    assert capsys.readouterr().out.startswith("kind                   GGUF\n")


def test_a_plan_of_training(folder, capsys):
    """What needs no weights reads none."""
    path = str(folder / "llama.gguf")
    assert main(["train", "--dry-run", "--model", path, *DRY]) == 0
    plan = capsys.readouterr().out
    assert main(["train", "--dry-run", "--model", str(folder / "hf"), *DRY]) == 0
    assert capsys.readouterr().out == plan


def test_the_tokenizer_is_the_files_own(folder, tmp_path):
    """In a folder with a tokenizer.json of another model, too."""
    llama_file(tmp_path / "a.gguf", tensors(), TOKENIZER)
    (tmp_path / "tokenizer.json").write_text("{}")
    _, files, ends = checkpoints.auxiliary_files_of(tmp_path)
    assert load_tokenizer(tmp_path, files).encode("hell") == [260, 258] and ends == (261,)
    assert checkpoints.auxiliary_files_of(folder / "hf")[0] == open_any(folder / "hf").config


# Refused ----------------------------------------------------------------------


def test_without_the_package(tmp_path, monkeypatch):
    path = llama_file(tmp_path / "a.gguf", tensors())
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert message(path).startswith(
        "reading GGUF needs the package gguf: pip install 'swiftkv-jax[gguf]'"
    )


def test_damaged_files(folder, tmp_path):
    path = tmp_path / "a.gguf"
    content = (folder / "llama.gguf").read_bytes()
    again = "; copy or download it again"

    def say(content: bytes) -> str:
        path.write_bytes(content)
        return message(path).removeprefix("not a complete GGUF file (").removesuffix(again)

    assert say(b"nothing") == "begins with b'noth', not b'GGUF')"
    assert say(content[:3]) == "begins with b'GGU', not b'GGUF')"
    assert say(content[:10]).startswith("unpack_from requires a buffer")
    assert say(content[:200]).startswith("it ends within its header, at byte ")
    assert say(content[:-40]) == "it ends within output.weight)"
    assert say(b"") == "begins with b'', not b'GGUF')"
    swapped = content[:4] + content[4:8][::-1] + content[8:]
    assert say(swapped).startswith("big-endian GGUF is not supported; gguf-convert-endian")
    assert say(content[:4] + b"\1" + content[5:]) == (
        "version 1 of GGUF is not supported; supported: 2 and 3"
    )
    many_keys = content[:16] + b"\xff" * 8 + content[24:]
    assert say(many_keys).startswith("it ends within its header, at byte ")


def test_a_file_beside_a_config_that_is_cut_off(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "model-Q4_K_M.gguf").touch()
    assert message(tmp_path).startswith("/model-Q4_K_M.gguf: not a complete GGUF file")


def test_every_truncation_is_one_line(folder, tmp_path):
    content = (folder / "llama.gguf").read_bytes()
    for size in range(0, 2500, 97):
        (tmp_path / "a.gguf").write_bytes(content[:size])
        assert message(tmp_path / "a.gguf").startswith("not a complete GGUF file (")


def test_an_architecture_that_is_not_known(tmp_path, capsys):
    path = gguf_files.write(tmp_path / "a.gguf", "rwkv7", {}, {"a": np.zeros(2)})
    assert main(["convert", "inspect", str(path)]) == 4
    assert "general.architecture='rwkv7' is not supported; supported: llama" in (
        capsys.readouterr().err
    )


def test_tensors_that_differ_are_named_as_in_the_file(tmp_path):
    stored = tensors()
    del stored["model.layers.1.mlp.up_proj.weight"]
    stored["model.layers.2.mlp.up_proj.weight"] = np.zeros((48, 32))
    more = {"blk.0.attn_rot_embd.weight": np.zeros(4)}
    path = llama_file(tmp_path / "a.gguf", stored, more=more)
    assert message(path) == (
        "missing: blk.1.ffn_up.weight; unexpected: blk.0.attn_rot_embd.weight; "
        "wrong shape: blk.2.ffn_up.weight [48, 32], expected [48, 64]"
    )


@pytest.mark.parametrize(
    "type_, text",
    [
        (Type.I32, "output_norm.weight is stored as I32, which the package gguf does not decode"),
        (Type.F64, "output_norm.weight is stored as F64, which the package gguf does not decode"),
        (99, "output_norm.weight has type 99, which the installed version of the package gguf"),
    ],
)
def test_types_that_are_not_decoded(folder, tmp_path, type_, text):
    content = (folder / "llama.gguf").read_bytes()
    at = content.index(b"output_norm.weight") + len("output_norm.weight") + 4 + 8
    path = tmp_path / "a.gguf"
    path.write_bytes(content[:at] + int(type_).to_bytes(4, "little") + content[at + 4 :])
    assert message(path).startswith(text)
