"""The choice of an implementation: what the device's kernels take, and what is refused by name with
the reason."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from swiftkv_jax.pallas_kernels import (
    AttentionOperands,
    AttentionSpec,
    choice,
    choose,
    decode_attention,
    device,
    hopper,
    prefill_attention,
    tpu,
)
from swiftkv_jax.pallas_kernels.device import HEAD_DIMS, Device, cuda_unsupported_reason
from swiftkv_jax.pallas_kernels.hopper.decode_tuning import Tuning, fit
from swiftkv_jax.pallas_kernels.hopper.prefill import fit as fit_prefill
from swiftkv_jax.pallas_kernels.score_options import ScoreOptions
from swiftkv_jax.pallas_kernels.tpu.schedule import fit as fit_tpu
from tests.pallas_kernels.interpreted import device as kind_of
from tests.pallas_kernels.interpreted import under
from tests.pallas_kernels.small_operands import (
    B,
    H,
    K,
    N,
    S,
    T,
    decode_operands,
    prefill_operands,
    zeros,
)

parametrize = pytest.mark.parametrize
DEVICE = {"hopper": "H100", "tpu": "v5e", "cudnn": "A100"}


def prefill(**changes):
    return prefill_attention(**prefill_operands(**changes))


def decode(**changes):
    return decode_attention(**decode_operands(**changes))


def like(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def spec(op: Any = "prefill", head_dim=128, dtype="bfloat16", **options: Any) -> AttentionSpec:
    """Of small operands row by row."""
    q = like(B, T, N, head_dim, dtype=dtype)
    return AttentionSpec(op, q, like(B, K, S, head_dim, dtype=dtype), **options)


CAPPED = {"score_options": ScoreOptions(30.0)}


@pytest.fixture
def cudnn(monkeypatch):
    monkeypatch.setattr(choice, "cudnn_version", lambda: 92000)


def kernels_in(call, *operands, **options) -> set[str]:
    """The device kernels in the program of `call`."""
    jaxpr = str(jax.make_jaxpr(lambda: call(*operands, **options))())
    return set(re.findall(r"name=(hopper|tpu)_", jaxpr))


# What the device's kernels take -------------------------------------------------


@parametrize("op", ["prefill", "decode"])
@parametrize(
    ("machine", "changes", "chosen"),
    [
        ("H100", {}, "hopper"),
        ("H200", {"head_dim": 64}, "hopper"),
        ("GH200", {"head_dim": 256}, "hopper"),
        ("H100", {"dtype": "float32"}, "xla"),
        ("H100", {"dtype": "float16"}, "hopper"),
        ("H100", {"head_dim": 72}, "xla"),
        ("H100", {"window": 4}, "hopper"),
        ("H100", {"window": "array"}, "xla"),
        ("H100", CAPPED, "xla"),
        ("H100", {"return_lse": True}, "hopper"),
        ("H100", {"kv_lengths": True}, "hopper"),
        ("B200", {}, "xla"),  # without cuDNN
        ("v5e", {}, "tpu"),
        ("v5e", {"head_dim": 80, "dtype": "float32"}, "tpu"),
        ("v5e", {"dtype": "float16"}, "xla"),
        ("v5e", {"head_dim": 32}, "xla"),
        ("v5e", {"window": 4, "kv_lengths": True, "return_lse": True}, "tpu"),
        ("v5e", {"window": "array"}, "xla"),
        ("v5e", CAPPED, "xla"),
    ],
)
def test_none_chooses(machine, changes, chosen, op):
    found = choose(kind_of(machine), spec(op, **changes))
    assert found.implementation == chosen
    assert (found.reason is None) == (chosen != "xla") == (found.tuning is not None)


@parametrize("call", [prefill, decode])
def test_the_op_runs_what_is_chosen(call):
    for machine, chosen in (("H100", "hopper"), ("v5e", "tpu")):
        for options, expected in (
            ({}, {chosen}),
            ({"window": 4, "return_lse": True}, {chosen}),
            ({"window": S}, {chosen}),
            ({"window": jnp.asarray(4)}, set()),
            ({"score_cap": 30.0}, set()),
        ):
            with under(machine):
                assert kernels_in(call, **options) == expected
    with jax.default_device(jax.devices("cpu")[0]):
        assert kernels_in(call) == set()


POOL = like(9, 8, 64, 128)
TABLE = like(1, 8, dtype="int32")
LIMITS: dict[str, tuple[str, AttentionSpec, str]] = {
    "65 queries a head": (
        "hopper",
        AttentionSpec("decode", like(1, 65, 8, 128), like(1, 8, 128, 128)),
        r"65 with q\.shape=\(1, 65, 8, 128\)",
    ),
    "pages of 100 to decode": (
        "hopper",
        AttentionSpec("decode", like(1, 1, 8, 128), like(9, 8, 100, 128), TABLE),
        "multiple of 64 positions, got 100",
    ),
    "pages of 96": (
        "hopper",
        AttentionSpec("prefill", like(1, 128, 8, 128), like(9, 8, 96, 128), TABLE),
        "pages of a multiple of 64 positions, got 96",
    ),
    "pages of 64 to decode on a TPU": (
        "tpu",
        AttentionSpec("decode", like(1, 1, 8, 128), POOL, TABLE),
        "multiple of 128 positions, got 64",
    ),
    "pages of 64 on a TPU": (
        "tpu",
        AttentionSpec("prefill", like(1, 128, 8, 128), POOL, TABLE),
        "pages of a multiple of 128 positions, got 64",
    ),
    "too many queries for VMEM": (
        "tpu",
        AttentionSpec("decode", like(8, 2048, 8, 128), like(8, 8, 4096, 128)),
        "bytes of VMEM",
    ),
    "too long a schedule": (
        "tpu",
        AttentionSpec("prefill", like(64, 2**17, 8, 128), like(64, 8, 2**17, 128)),
        "pairs of blocks",
    ),
    "a table of 2**18 entries": (
        "tpu",
        AttentionSpec(
            "prefill", like(64, 8, 8, 128), like(9, 8, 128, 128), like(64, 4096, dtype="int32")
        ),
        "a page_table of 262144 entries",
    ),
}


@parametrize("name", LIMITS)
def test_the_limits_of_a_kernel(name):
    """Shapes beyond them go to XLA unless the kernel was asked for by name."""
    implementation, beyond, message = LIMITS[name]
    kind = kind_of(DEVICE[implementation])
    found = choose(kind, beyond)
    assert found.implementation == "xla" and re.search(message, found.reason or "")
    with pytest.raises(NotImplementedError, match=f"='{implementation}'.*{message}"):
        choose(kind, beyond, implementation)


@parametrize("head_dim", HEAD_DIMS)
@parametrize("page", [64, 128, 192, 256, 640])
def test_hopper_takes_pages_of_64(page, head_dim):
    """Tiles longer than a page are cut, and still cover it; those of prefill with as many keys in
    the ring."""
    for dtype in ("bfloat16", "float8_e4m3fn", "int8"):
        k = like(9, 8, page, head_dim, dtype=dtype)
        found = choose(kind_of("H100"), AttentionSpec("decode", like(1, 1, 8, head_dim), k, TABLE))
        assert found.implementation == "hopper"
        assert page % fit(found.tuning, head_dim, 1, k.dtype.itemsize, page).block_kv == 0
    q, k = like(20, 128, 32, head_dim), like(9, 8, page, head_dim)
    found = choose(kind_of("H100"), AttentionSpec("prefill", q, k, TABLE))
    fitted = fit_prefill(found.tuning, page)
    assert page % fitted.block_kv == 0
    assert fitted.stages * fitted.block_kv == found.tuning.stages * found.tuning.block_kv


@parametrize("pages", [1, 2, 5, 64, 1024])
@parametrize("page", [128, 256, 384, 640, 1024, 4096])
def test_blocks_on_a_tpu_are_whole_pages_or_parts(page, pages):
    """A step's keys are whole pages, of which each chunk has some, or an even part of one page;
    never more than without pages."""
    tuning = tpu.prefill.Tuning()
    fitted = fit_tpu(tuning, page, pages)
    assert fitted.block_kv % fitted.block_kv_compute == 0
    assert fitted.block_kv <= min(tuning.block_kv, page * pages)
    assert fitted.block_kv_compute <= tuning.block_kv_compute
    assert fitted.block_kv_compute % page == 0 or page % fitted.block_kv == 0


def test_no_room_for_two_stages_is_named():
    """Not by the complaint of a tuning with one stage."""
    wide = AttentionSpec("decode", like(1, 1, 1, 256), like(1, 1, 4096, 256))
    tuning, message = Tuning(block_kv=128, stages=2), "two stages of block_kv=128"
    with pytest.raises(NotImplementedError, match=message):
        choose(kind_of("H100"), wide, "hopper", tuning=tuning)
    with pytest.raises(NotImplementedError, match=f"{message} with head_dim=256"):
        fit(tuning, 256, 1, 2)


# What is refused ----------------------------------------------------------------

REFUSED = {
    "hopper on an A100": ("A100", "hopper", {}, "needs a Hopper GPU, this is gpu .NVIDIA A100"),
    "hopper on a TPU": ("v5e", "hopper", {}, "needs a Hopper GPU, this is tpu"),
    "tpu on a GPU": ("H100", "tpu", {}, "needs a TPU, this is gpu"),
    "cudnn on a TPU": ("v5e", "cudnn", {}, "needs an NVIDIA GPU"),
    "float32 on hopper": (
        *("H100", "hopper", {"dtype": "float32"}),
        "takes bfloat16 or float16, got q.dtype=dtype.'float32'",
    ),
    "float16 on a TPU": ("v5e", "tpu", {"dtype": "float16"}, "takes bfloat16 or float32"),
    "head dim on hopper": (
        *("H100", "hopper", {"head_dim": 72}),
        r"takes head dims \(64, 80, 96, 128, 256\), got q.shape=\(2, 6, 4, 72\)",
    ),
    "head dim on a TPU": ("v5e", "tpu", {"head_dim": 32}, "takes head dims"),
    "cap on hopper": ("H100", "hopper", CAPPED, "has no score_cap"),
    "cap on a TPU": ("v5e", "tpu", CAPPED | {"window": 4}, "has no score_cap"),
    "traced window on hopper": (
        *("H100", "hopper", {"window": "array"}),
        "takes a window that is an int, got an array",
    ),
    "window by cuDNN": ("A100", "cudnn", {"window": 4}, "has no window"),
    "traced window by cuDNN": ("A100", "cudnn", {"window": "array"}, "has no window"),
    "part by cuDNN": ("A100", "cudnn", {"kv_lengths": True}, "has no kv_lengths"),
    "log-sum-exps by cuDNN": ("A100", "cudnn", {"return_lse": True}, "has no return_lse"),
}


@parametrize("op", ["prefill", "decode"])
@parametrize("name", REFUSED)
def test_a_name_is_obeyed_or_refused(name, op, cudnn):
    machine, implementation, changes, message = REFUSED[name]
    with pytest.raises(NotImplementedError, match=f"='{implementation}' {message}"):
        choose(kind_of(machine), spec(op, **changes), implementation)
    if implementation == "cudnn" and machine == "A100":
        assert choose(kind_of(machine), spec(op, **changes)).implementation == "xla"


@parametrize("call", [prefill, decode])
def test_the_op_refuses_what_is_refused(call):
    with under("v5e"), pytest.raises(NotImplementedError, match="needs a Hopper GPU"):
        call(implementation="hopper")
    cpu = jax.default_device(jax.devices("cpu")[0])
    for implementation in ("hopper", "tpu", "cudnn"):
        with cpu, pytest.raises(NotImplementedError, match="this is cpu"):
            call(implementation=implementation)


def test_an_unknown_name_is_refused_with_the_known_ones():
    message = "'flash' is not available; available: 'xla', 'hopper', 'tpu'"
    with pytest.raises(NotImplementedError, match=message):
        choose(kind_of("H100"), spec(), "flash")


@parametrize("kind", ["NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA H800", "NVIDIA H20"])
def test_names_of_hopper(kind):
    assert Device("gpu", kind).is_hopper


@parametrize(
    ("version", "supported"),
    [(None, True), (12060, True), (12080, False), (12090, False), (12091, True), (13000, True)],
)
def test_versions_of_cuda_that_miscompile_causal_masks_are_refused(version, supported, monkeypatch):
    assert (cuda_unsupported_reason(version) is None) == supported
    monkeypatch.setattr(device, "cuda_runtime_version", lambda: version)
    chosen = "hopper" if supported else "xla"
    assert choose(kind_of("H100"), spec()).implementation == chosen
    if not supported:
        with pytest.raises(NotImplementedError, match="miscompile it and .*; this is 12"):
            choose(kind_of("H100"), spec(), "hopper")


# Tunings ----------------------------------------------------------------------


def traced(implementation: str, call, **options) -> str:
    """The program of `call` on the device of `implementation`."""
    with under(DEVICE[implementation]):
        jaxpr = jax.make_jaxpr(lambda: call(implementation=implementation, **options))()
    return str(jaxpr)


@parametrize(
    ("implementation", "call", "tuning"),
    [
        ("hopper", prefill, hopper.prefill.Tuning(block_kv=64)),
        ("hopper", decode, hopper.decode.Tuning(stages=2)),
        ("tpu", prefill, tpu.prefill.Tuning(block_kv=256, block_kv_compute=256)),
        ("tpu", decode, tpu.decode.Tuning(buffers=2)),
    ],
)
def test_a_tuning_replaces_the_table(implementation, call, tuning):
    usual = traced(implementation, call)
    op = "prefill" if call is prefill else "decode"
    entry = choose(kind_of(DEVICE[implementation]), spec(op, head_dim=H)).tuning
    assert traced(implementation, call, tuning=entry) == usual
    assert traced(implementation, call, tuning=tuning) != usual


@parametrize(
    ("implementation", "tuning"),
    [
        ("hopper", hopper.backward.Tuning(dq_block_kv=64)),
        ("tpu", tpu.backward.Tuning(block_kv=256, block_kv_compute=256)),
    ],
)
def test_a_backward_tuning_is_that_of_the_gradient_alone(implementation, tuning):
    def gradient(**options):
        def loss(q, k, v):
            return prefill(q=q, k=k, v=v, **options).astype(jnp.float32).sum()

        return jax.grad(loss)(zeros(B, S, N, H), zeros(B, K, S, H), zeros(B, K, S, H))

    forward = traced(implementation, prefill, q=zeros(B, S, N, H))
    usual = traced(implementation, gradient)
    assert traced(implementation, gradient, backward_tuning=tuning) != usual
    assert traced(implementation, prefill, q=zeros(B, S, N, H), backward_tuning=tuning) == forward


@parametrize(
    ("implementation", "options", "message"),
    [
        (None, {"tuning": Tuning()}, "tuning goes with implementation='hopper' or 'tpu'"),
        ("xla", {"backward_tuning": Tuning()}, "backward_tuning goes with.*got implement.*'xla'"),
        ("hopper", {"tuning": Tuning()}, "tuning must be a Tuning of the hopper prefill kernel"),
        ("tpu", {"backward_tuning": Tuning()}, "must be a Tuning of the tpu backward kernel"),
    ],
)
def test_a_tuning_of_another_kernel_is_refused(implementation, options, message):
    kind = kind_of(DEVICE.get(implementation, "H100"))
    with pytest.raises(ValueError, match=message):
        choose(kind, spec(), implementation, **options)


def test_a_tuning_that_does_not_fit_is_refused_with_the_reason():
    tuning = hopper.prefill.Tuning(block_q=128, block_kv=256)
    with pytest.raises(NotImplementedError, match="needs .* registers"):
        choose(kind_of("H100"), spec(), "hopper", tuning=tuning)


def test_the_gradient_of_wide_heads_refuses_blocks_that_do_not_fit():
    with pytest.raises(ValueError, match="dkv_warpgroups=3 must be 2 with head_dim=256"):
        hopper.backward.Tuning(dkv_warpgroups=3).check(256)


# Operands ---------------------------------------------------------------------


def test_a_spec_is_hashable_and_knows_no_values():
    kv = zeros(B, K, S, H, dtype=jnp.int8)
    table = jnp.zeros((B, 3), int)
    operands = AttentionOperands(zeros(B, T, N, H), kv, kv, page_table=table)
    found = AttentionSpec.of("prefill", operands, jnp.int32(3), score_options=ScoreOptions(2.0))
    assert hash(found) == hash(dataclasses.replace(found))
    assert (found.window, found.score_options.score_cap, found.packed, found.kv_lengths) == (
        *("array", 2.0, False, False),
    )
    assert found.page_table is not None and found.page_table.shape == (B, 3)
    assert operands.keys == 3 * S
