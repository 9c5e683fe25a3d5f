"""The table of tunings: complete, valid, and looked up as it says."""

import dataclasses
import json

import pytest

from swiftkv_jax.pallas_kernels import hopper, tpu, tuning
from swiftkv_jax.pallas_kernels.device import HEAD_DIMS
from swiftkv_jax.pallas_kernels.hopper import decode_tuning
from tests.pallas_kernels.interpreted import under

CLASSES = {
    f"{name}.{op}": getattr(kernels, op.split(".")[0]).Tuning
    for name, kernels in (("hopper", hopper), ("tpu", tpu))
    for op in ("prefill", "prefill.packed", "backward", "decode")
}


@pytest.mark.parametrize(
    "entry",
    tuning.read_table(),
    ids=lambda entry: "-".join(str(entry[field]) for field in list(entry)[:4]),
)
def test_entries_are_valid(entry):
    """Each constructs its dataclass, which rejects nonsense, and says what it rests on."""
    CLASSES[entry["kernel"]](**entry["tuning"])
    assert entry["basis"]


@pytest.mark.parametrize("kernel", CLASSES)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_table_is_complete(kernel, head_dim):
    formats = ["bfloat16", "float8_e4m3fn", "int8"] if kernel.endswith("decode") else ["bfloat16"]
    for dtype in formats:
        for device in ("H100", "H200") if kernel.startswith("hopper") else ("v5e",):
            with under(device):
                assert dataclasses.is_dataclass(
                    tuning.tuning_for(CLASSES[kernel], kernel, head_dim, dtype)
                )


@pytest.mark.parametrize(
    ("operands", "block"),
    [
        ((8, 128, 16, 128, 2), (256, 8)),  # two pages
        ((8, 128, 16, 128, 1), (512, 8)),
        ((8, 384, 16, 128, 1), (384, 8)),  # one; two do not fit
        ((8, 768, 16, 128, 1), (384, 8)),  # half of one: 512 positions would not divide it
        ((1, 128, 3, 128, 2), (384, 1)),  # no more than a row has
        ((8, 1152, None, 128, 1), (512, 8)),  # of rows without pages
        ((1, 256, None, 128, 1), (256, 1)),
        ((64, 128, 16, 128, 2), (128, 16)),  # heads in groups
    ],
)
def test_blocks_of_decode_on_tpus(operands, block):
    """Of 512 KiB: positions and heads, by heads, positions of a page or row, pages of a row, head
    dim and bytes of an element."""
    assert tpu.decode.Tuning(block_bytes=2**19).block(*operands) == block


def test_the_first_entry_that_fits_is_taken(tmp_path, monkeypatch):
    def entry(device, head_dim, dtype, block):
        return {
            "kernel": "k",
            "device": device,
            "head_dim": head_dim,
            "dtype": dtype,
            "tuning": {"block": block},
            "basis": "-",
        }

    table = tmp_path / "tuning.json"
    table.write_text(
        json.dumps(
            [
                entry("NVIDIA H200", 64, "int8", 1),
                entry("NVIDIA H200", 64, "any", 2),
                entry("any", 64, "any", 3),
            ]
        )
    )
    entries = tuning.read_table(table)
    monkeypatch.setattr(tuning, "read_table", lambda: entries)
    with under("H200"):
        assert tuning.tuning_for(dict, "k", 64, "int8") == {"block": 1}
        assert tuning.tuning_for(dict, "k", 64, "bfloat16") == {"block": 2}
    with under("H100"):
        assert tuning.tuning_for(dict, "k", 64, "int8") == {"block": 3}
        with pytest.raises(
            NotImplementedError,
            match="k has no tuning for head_dim=128 and int8 keys on NVIDIA H100",
        ):
            tuning.tuning_for(dict, "k", 128, "int8")


def test_a_damaged_table_is_named(tmp_path):
    table = tmp_path / "tuning.json"
    table.write_text('[{"kernel": "k"}]')
    with pytest.raises(ValueError, match=r"tuning.json: an entry has the fields \['kernel'\]"):
        tuning.read_table(table)


def test_stages_of_decode_have_barriers():
    """Two for each stage, and a group holds 32: not the 24 stages that short pages would give."""
    tuning = decode_tuning.Tuning(block_kv=256, stages=6)
    fitted = decode_tuning.fit(tuning, 64, 4, 1, page=64)
    assert fitted == decode_tuning.Tuning(block_kv=64, stages=16)
    with pytest.raises(ValueError, match="self.stages=17 must be at most 16: .*two barriers"):
        decode_tuning.Tuning(block_kv=64, stages=17)
