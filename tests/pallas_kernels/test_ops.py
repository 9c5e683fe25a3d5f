"""The choice of an implementation, the tunings that it runs with, and the gradients that there are
not."""

import contextlib
import re

import jax
import jax.numpy as jnp
import pytest

from swiftkv_jax.pallas_kernels import choice, decode_attention, hopper, ops, prefill_attention, tpu
from swiftkv_jax.pallas_kernels.device import HEAD_DIMS, cuda_unsupported_reason, is_hopper
from swiftkv_jax.pallas_kernels.hopper.decode_tuning import Tuning, fit, unsupported_reason
from tests.pallas_kernels.interpreted import under
from tests.pallas_kernels.small_operands import (
    SCALE,
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


def prefill(**changes):
    return prefill_attention(**prefill_operands(**changes))


def decode(**changes):
    return decode_attention(**decode_operands(**changes))


INT8 = {"k": zeros(B, K, S, H, dtype=jnp.int8), "v": zeros(B, K, S, H, dtype=jnp.int8)}
# Choice -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "shape", "dtype", "chosen"),
    [
        ("H100", (B, T, N, 128), "bfloat16", "hopper"),
        ("H200", (B, T, N, 64), "bfloat16", "hopper"),
        ("GH200", (B, T, N, 256), "bfloat16", "hopper"),
        ("H100", (B, T, N, 128), "float32", "xla"),
        ("H100", (B, T, N, 128), "float16", "hopper"),
        ("H100", (B, T, N, 72), "bfloat16", "xla"),
        ("A100", (B, T, N, 128), "bfloat16", "xla"),
        ("B200", (B, T, N, 128), "bfloat16", "xla"),
        ("v5e", (B, T, N, 128), "bfloat16", "tpu"),
        ("v5e", (B, T, N, 80), "float32", "tpu"),
        ("v5e", (B, T, N, 128), "float16", "xla"),
        ("v5e", (B, T, N, 32), "bfloat16", "xla"),
    ],
)
def test_none_chooses(device, shape, dtype, chosen):
    with under(device):
        for op in ("prefill", "decode"):
            q = jax.ShapeDtypeStruct(shape, dtype)
            k = jax.ShapeDtypeStruct((B, K, S, shape[3]), dtype)
            assert (
                ops.choose_implementation(
                    op, None, q, k, segment_ids=jnp.ones((B, T)) if op == "prefill" else None
                )
                == chosen
            )


RESTRICTED = {  # window, score_cap -> what the refusals of device kernels and of cuDNN name
    "a window": (4, None, None, "has no window"),
    "a traced window": (jnp.asarray(4), None, "takes a window that is an int", "has no window"),
    "a cap": (None, 30.0, "has no score_cap", "has no score_cap"),
    "a window and a cap": (4, 30.0, "has no score_cap", "has no score_cap"),
    "a window as long as the row": (S, None, None, None),
}


@pytest.mark.parametrize("call", ["prefill", "decode"])
@pytest.mark.parametrize("name", RESTRICTED)
def test_windows_and_caps(name, call):
    window, cap, of_kernels, of_cudnn = RESTRICTED[name]
    options = {"window": window, "score_cap": cap}
    op = prefill if call == "prefill" else decode

    for device, implementation in (("H100", "hopper"), ("v5e", "tpu"), ("H100", "cudnn")):
        refusal = of_cudnn if implementation == "cudnn" else of_kernels
        with under(device):
            if implementation != "cudnn":
                jaxpr = str(jax.make_jaxpr(lambda: op(**options))())
                found = set(re.findall(r"name=(hopper|tpu)_", jaxpr))
                assert found == ({implementation} if refusal is None else set())
            if refusal is not None:
                with pytest.raises(NotImplementedError, match=f"='{implementation}' {refusal}"):
                    op(**options, implementation=implementation)


def like(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


TABLE = like(1, 8, dtype=jnp.int32)
LIMITS = {  # what a kernel cannot do -> device, op, q, k, page table, what the refusal names
    "65 queries a head": (
        "hopper",
        "decode",
        like(1, 65, 8, 128),
        like(1, 8, 128, 128),
        None,
        r"65 with q\.shape=\(1, 65, 8, 128\)",
    ),
    "pages of 100": (
        "hopper",
        "decode",
        like(1, 1, 8, 128),
        like(9, 8, 100, 128),
        TABLE,
        "multiple of 64 positions, got 100",
    ),
    "pages of 64 on a TPU": (
        "tpu",
        "decode",
        like(1, 1, 8, 128),
        like(9, 8, 64, 128),
        TABLE,
        "multiple of 128 positions, got 64",
    ),
    "too many queries for VMEM": (
        "tpu",
        "decode",
        like(8, 2048, 8, 128),
        like(8, 8, 4096, 128),
        None,
        "bytes of VMEM",
    ),
    "too long a schedule": (
        "tpu",
        "prefill",
        like(64, 2**17, 8, 128),
        like(64, 8, 2**17, 128),
        None,
        "pairs of blocks",
    ),
}


@pytest.mark.parametrize("name", LIMITS)
def test_the_limits_of_a_kernel(name):
    """Shapes beyond them go to XLA unless the kernel was asked for by name."""
    implementation, op, q, k, table, message = LIMITS[name]
    with under({"hopper": "H100", "tpu": "v5e"}[implementation]):
        assert ops.choose_implementation(op, None, q, k, page_table=table) == "xla"
        with pytest.raises(
            NotImplementedError, match=f"implementation='{implementation}'.*{message}"
        ):
            ops.choose_implementation(op, implementation, q, k, page_table=table)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "int8"])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("page", [64, 128, 192, 256])
def test_hopper_takes_pages_of_64(page, head_dim, dtype):
    """Tiles longer than a page are cut, and still cover it."""
    q, k = like(1, 1, 8, head_dim), like(9, 8, page, head_dim, dtype=jnp.dtype(dtype))
    with under("H100"):
        assert ops.choose_implementation("decode", None, q, k, page_table=TABLE) == "hopper"
        tuning = ops.find_tuning("hopper", "decode", q, k)
    assert page % fit(tuning, head_dim, 1, k.dtype.itemsize, page).block_kv == 0


def test_no_room_for_two_stages_is_named():
    """Not by the complaint of a tuning with one stage."""
    q, k, tuning = like(1, 1, 1, 256), like(1, 1, 4096, 256), Tuning(block_kv=128, stages=2)
    assert "two stages of block_kv=128" in str(unsupported_reason(q, k, None, tuning))
    with pytest.raises(NotImplementedError, match="two stages of block_kv=128 with head_dim=256"):
        fit(tuning, 256, 1, 2)


@contextlib.contextmanager
def on_the_cpu():
    """Also on a machine with an accelerator."""
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.mark.parametrize("call", [prefill, decode])
def test_none_is_xla_on_a_cpu(call):
    with on_the_cpu():
        assert not re.search("name=(hopper|tpu)_", str(jax.make_jaxpr(call)()))


REFUSED = {  # device, implementation, arguments -> what the message names
    "hopper on an A100": ("A100", "hopper", {}, "needs a Hopper GPU, this is gpu .NVIDIA A100"),
    "hopper on a TPU": ("v5e", "hopper", {}, "needs a Hopper GPU, this is tpu"),
    "tpu on a GPU": ("H100", "tpu", {}, "needs a TPU, this is gpu"),
    "cudnn on a TPU": ("v5e", "cudnn", {}, "needs an NVIDIA GPU"),
    "float32 on hopper": (
        "H100",
        "hopper",
        {"dtype": jnp.float32},
        "takes bfloat16 or float16, got q.dtype=dtype.'float32'",
    ),
    "float16 on a TPU": ("v5e", "tpu", {"dtype": jnp.float16}, "takes bfloat16 or float32"),
    "head dim on hopper": (
        "H100",
        "hopper",
        {"head_dim": 72},
        r"takes head dims \(64, 80, 96, 128, 256\), got q.shape=\(2, 6, 4, 72\)",
    ),
    "head dim on a TPU": ("v5e", "tpu", {"head_dim": 32}, "takes head dims"),
}


@pytest.mark.parametrize("op", ["prefill", "decode"])
@pytest.mark.parametrize("name", REFUSED)
def test_a_name_is_obeyed_or_refused(name, op):
    device, implementation, sizes, message = REFUSED[name]
    dtype, head_dim = sizes.get("dtype", jnp.bfloat16), sizes.get("head_dim", H)
    arrays = {
        "q": zeros(B, T, N, head_dim, dtype=dtype),
        "k": zeros(B, K, S, head_dim, dtype=dtype),
    }
    with under(device), pytest.raises(NotImplementedError, match=message):
        (prefill if op == "prefill" else decode)(
            **arrays, v=arrays["k"], implementation=implementation
        )


def test_an_unknown_name_is_refused_with_the_known_ones():
    q, k = like(B, T, N, H), like(B, K, S, H)
    with pytest.raises(
        NotImplementedError, match="'flash' is not available; available: 'xla', 'hopper', 'tpu'"
    ):
        ops.choose_implementation("prefill", "flash", q, k)


@pytest.mark.parametrize("implementation", ["hopper", "tpu", "cudnn"])
def test_no_device_kernel_on_a_cpu(implementation):
    for op in (prefill, decode):
        with on_the_cpu(), pytest.raises(NotImplementedError, match="this is cpu"):
            op(implementation=implementation)


@pytest.mark.parametrize(
    "kind", ["NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA H800", "NVIDIA H20"]
)
def test_names_of_hopper(kind):
    assert is_hopper("gpu", kind)


# Tunings ----------------------------------------------------------------------

DEVICE = {"hopper": "H100", "tpu": "v5e"}


def traced(implementation: str, call, **options) -> str:
    """The program of `call` on the device of `implementation`."""
    with under(DEVICE[implementation]):
        jaxpr = jax.make_jaxpr(lambda: call(implementation=implementation, **options))()
    return str(jaxpr)


@pytest.mark.parametrize(
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
    with under(DEVICE[implementation]):
        entry = ops.find_tuning(implementation, op, zeros(B, T, N, H), zeros(B, K, S, H))
    assert traced(implementation, call, tuning=entry) == usual
    assert traced(implementation, call, tuning=tuning) != usual


@pytest.mark.parametrize(
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
    assert traced(implementation, gradient, backward_tuning=tuning) != traced(
        implementation, gradient
    )
    assert traced(implementation, prefill, q=zeros(B, S, N, H), backward_tuning=tuning) == forward


@pytest.mark.parametrize(
    ("implementation", "options", "message"),
    [
        (None, {"tuning": Tuning()}, "tuning goes with implementation='hopper' or 'tpu'"),
        ("xla", {"backward_tuning": Tuning()}, "backward_tuning goes with.*got implement.*'xla'"),
        ("hopper", {"tuning": Tuning()}, "tuning must be a Tuning of the hopper prefill kernel"),
        ("tpu", {"backward_tuning": Tuning()}, "must be a Tuning of the tpu backward kernel"),
    ],
)
def test_a_tuning_of_another_kernel_is_refused(implementation, options, message):
    with under(DEVICE.get(implementation, "H100")), pytest.raises(ValueError, match=message):
        prefill(implementation=implementation, **options)


def test_a_tuning_that_does_not_fit_is_refused_with_the_reason():
    tuning = hopper.prefill.Tuning(block_q=128, block_kv=256)
    with under("H100"), pytest.raises(NotImplementedError, match="needs .* registers"):
        prefill(implementation="hopper", tuning=tuning)


# Gradients --------------------------------------------------------------------


@pytest.mark.parametrize("implementation", ["hopper", "tpu"])
def test_no_gradient_of_a_chunk(implementation):
    """A gradient that does not exist is refused by name, not by a trace through a kernel."""
    with (
        under({"hopper": "H100", "tpu": "v5e"}[implementation]),
        pytest.raises(NotImplementedError, match="no gradient with q_offset"),
    ):
        jax.eval_shape(
            jax.grad(
                lambda q: (
                    prefill(q=q, q_offset=jnp.int32(1), implementation=implementation)
                    .astype(jnp.float32)
                    .sum()
                )
            ),
            zeros(B, T, N, H),
        )


@pytest.mark.parametrize("implementation", ["hopper", "tpu"])
def test_no_gradient_of_decode(implementation):
    with (
        under({"hopper": "H100", "tpu": "v5e"}[implementation]),
        pytest.raises(NotImplementedError, match="no gradient of decode"),
    ):
        jax.eval_shape(
            jax.grad(
                lambda q: decode(q=q, implementation=implementation).astype(jnp.float32).sum()
            ),
            zeros(B, 1, N, H),
        )


SCALED = INT8 | {"k_scale": SCALE, "v_scale": SCALE}


@pytest.mark.parametrize(
    ("call", "arguments"),
    [(prefill, SCALED), (decode, SCALED), (decode, {"page_table": jnp.asarray([[0], [1]])})],
)
@pytest.mark.parametrize("device", ["H100", "v5e", "A100"])
def test_no_gradient_of_scaled_or_paged_keys(device, call, arguments):
    """Not even where everything fits in one block, which JAX could differentiate."""
    name = "xla" if device == "A100" or "page_table" in arguments else None
    with (
        under(device),
        pytest.raises(NotImplementedError, match="scaled or paged keys and values has no gradient"),
    ):
        jax.eval_shape(
            jax.grad(
                lambda q: call(q=q, implementation=name, **arguments).astype(jnp.float32).sum()
            ),
            zeros(B, 1, N, H),
        )


@pytest.mark.parametrize(
    ("version", "supported"),
    [(None, True), (12060, True), (12080, False), (12090, False), (12091, True), (13000, True)],
)
def test_versions_of_cuda_that_miscompile_causal_masks_are_refused(version, supported, monkeypatch):
    assert (cuda_unsupported_reason(version) is None) == supported
    monkeypatch.setattr(choice, "cuda_runtime_version", lambda: version)
    q, k = zeros(B, T, N, 128), zeros(B, K, S, 128)
    with under("H100"):
        assert ops.choose_implementation("prefill", None, q, k) == (
            "hopper" if supported else "xla"
        )
        if not supported:
            with pytest.raises(NotImplementedError, match="miscompile it and .*; this is 12"):
                ops.choose_implementation("prefill", "hopper", q, k)
