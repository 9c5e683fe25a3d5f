"""What the two ops refuse, and how they choose."""

import contextlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from swiftkv_jax.pallas_kernels import decode_attention, ops, prefill_attention
from swiftkv_jax.pallas_kernels.device import is_hopper
from swiftkv_jax.pallas_kernels.hopper.decode_tuning import Tuning, fit, unsupported_reason

B, T, N, K, S, H = 2, 6, 4, 2, 8, 64
SCALE = jnp.ones((B, K, S))


def zeros(*shape, dtype=jnp.bfloat16):
    return jnp.zeros(shape, dtype)


def prefill(**changes):
    arguments: dict[str, Any] = {
        "q": zeros(B, T, N, H),
        "k": zeros(B, K, S, H),
        "v": zeros(B, K, S, H),
    } | changes
    return prefill_attention(**arguments)


def decode(**changes):
    arguments: dict[str, Any] = {
        "q": zeros(B, 1, N, H),
        "k": zeros(B, K, S, H),
        "v": zeros(B, K, S, H),
    }
    return decode_attention(**{**arguments, "length": jnp.asarray([8, 3]), **changes})


def both(**arrays):
    return {"prefill": (prefill, arrays), "decode": (decode, arrays)}


INT8 = {"k": zeros(B, K, S, H, dtype=jnp.int8), "v": zeros(B, K, S, H, dtype=jnp.int8)}
WRONG = {  # name -> (call, arguments that are wrong, what the message names)
    "k and v differ in shape": (both(v=zeros(B, K, 5, H)), r"v\.shape=\(2, 2, 5, 64\)"),
    "k and v differ in dtype": (both(v=zeros(B, K, S, H, dtype=jnp.float32)), "v.dtype=dtype"),
    "rows differ": (both(k=zeros(3, K, S, H), v=zeros(3, K, S, H)), r"k\.shape=\(3, 2, 8, 64\)"),
    "head dims differ": (both(q=zeros(B, T, N, 80)), r"q\.shape=\(2, 6, 4, 80\)"),
    "q without heads": (both(q=zeros(B, T, H)), "q must be B T N H"),
    "k without heads": (both(k=zeros(B, S, H), v=zeros(B, S, H)), "k, v B K S H"),
    "heads do not divide": (both(q=zeros(B, T, 3, H)), r"query heads.*q\.shape=\(2, 6, 3, 64\)"),
    "integer q": (both(q=zeros(B, T, N, H, dtype=jnp.int32)), "q must be bfloat16"),
    "keys wider than q": (
        both(k=zeros(B, K, S, H, dtype=jnp.float32), v=zeros(B, K, S, H, dtype=jnp.float32)),
        "k.dtype=dtype",
    ),
    "int8 without scales": (both(**INT8), "k_scale goes with"),
    "scales without int8": (both(k_scale=SCALE, v_scale=SCALE), "k_scale goes with"),
    "one scale missing": (both(**INT8, k_scale=SCALE), "v_scale goes with"),
    "scales of another shape": (
        both(**INT8, k_scale=SCALE, v_scale=SCALE[..., None]),
        "v_scale must be float32 and B K S",
    ),
    "scales in half": (
        both(**INT8, k_scale=SCALE.astype(jnp.bfloat16), v_scale=SCALE),
        "k_scale.*bfloat16",
    ),
    "offset beyond the keys": (
        {"prefill": (prefill, {"q_offset": 3})},
        "q_offset must be from 0 to 2",
    ),
    "negative offset": (
        {"prefill": (prefill, {"q_offset": jnp.asarray([0, -1])})},
        "q_offset.*got -1",
    ),
    "offsets of other rows": (
        {"prefill": (prefill, {"q_offset": jnp.zeros(3, int)})},
        "q_offset must be a scalar or one a row",
    ),
    "more queries than keys": (both(q=zeros(B, 9, N, H)), "8 keys and q.shape=.2, 9, 4, 64"),
    "lengths beyond the queries": (
        {"prefill": (prefill, {"lengths": jnp.asarray([7, 1])})},
        "lengths must be from 0 to 6",
    ),
    "lengths not one a row": (
        {"prefill": (prefill, {"lengths": jnp.asarray([7])})},
        "lengths must be one integer a row",
    ),
    "length beyond the cache": (
        {"decode": (decode, {"length": jnp.asarray([1, 9])})},
        "length must be from 0 to 8",
    ),
    "length not one a row": (
        {"decode": (decode, {"length": jnp.asarray([6])})},
        "length must be one integer a row",
    ),
    "length for all": (
        {"decode": (decode, {"length": jnp.asarray(6)})},
        "length must be one integer a row",
    ),
    "fractional length": (
        {"decode": (decode, {"length": jnp.asarray([1.0, 2.0])})},
        "length must be integers, got value.dtype=dtype.'float32'",
    ),
    "block table of other rows": (
        {"decode": (decode, {"page_table": jnp.zeros((3, 2), int)})},
        "page_table must be B P",
    ),
    "fractional block table": (
        {"decode": (decode, {"page_table": jnp.zeros((B, 1))})},
        "page_table must be integers",
    ),
    "fractional offset": (
        {"prefill": (prefill, {"q_offset": 1.0})},
        "q_offset must be integers.*float32",
    ),
    "offset true": ({"prefill": (prefill, {"q_offset": True})}, "q_offset must be integers.*bool"),
    "NumPy offset beyond the keys": (
        {"prefill": (prefill, {"q_offset": np.int64(3)})},
        "q_offset must be from 0 to 2",
    ),
    "lengths true": (
        {"prefill": (prefill, {"lengths": jnp.ones(B, bool)})},
        "lengths must be integers.*bool",
    ),
    "a list beyond the cache": (
        {"decode": (decode, {"length": [1, 9]})},
        "length must be from 0 to 8",
    ),
    "fractional segments": (
        {"prefill": (prefill, {"segment_ids": jnp.ones((B, T))})},
        "segment_ids must be integers",
    ),
    "no rows": (
        both(q=zeros(0, T, N, H), k=zeros(0, K, S, H), v=zeros(0, K, S, H)),
        r"no axis.*q\.shape=\(0, 6, 4, 64\)",
    ),
    "no queries": (both(q=zeros(B, 0, N, H)), "no axis of q, k and v may be empty"),
    "no key/value heads": (
        both(k=zeros(B, 0, S, H), v=zeros(B, 0, S, H)),
        "no axis of q, k and v may be empty",
    ),
    "no blocks": (
        {"decode": (decode, {"page_table": jnp.zeros((B, 0), int)})},
        r"page_table must be B P.*\(2, 0\)",
    ),
    "double q": (
        both(q=np.zeros((B, T, N, H))),
        "q must be bfloat16, float16 or float32, got q.dtype=dtype.'float64'",
    ),
    "q of no type": (both(q=None), "q must be an array, got None"),
    "segments and an offset": (
        {"prefill": (prefill, {"segment_ids": jnp.ones((B, T), int), "q_offset": 1})},
        r"segment_ids need.*q_offset=1",
    ),
    "segments and a cache": (
        {"prefill": (prefill, {"segment_ids": jnp.ones((B, T), int)})},
        r"segment_ids need.*k\.shape",
    ),
    "segments of other rows": (
        {"prefill": (prefill, {"segment_ids": jnp.ones((1, T), int)})},
        "segment_ids must be B T",
    ),
}


@pytest.mark.parametrize(
    ("name", "op"), [(name, op) for name, (calls, _) in WRONG.items() for op in calls]
)
def test_wrong_arguments(name, op):
    calls, message = WRONG[name]
    call, arguments = calls[op]
    with pytest.raises(ValueError, match=message):
        call(**arguments)


@pytest.mark.parametrize("call", [prefill, decode])
def test_good_arguments(call):
    """What the tests above start from is accepted."""
    assert call().dtype == jnp.bfloat16
    assert call(**INT8, k_scale=SCALE, v_scale=SCALE).dtype == jnp.bfloat16


def test_lists_and_numpy_integers():
    """Nor must they be JAX arrays. A NumPy integer is as static as one of Python: with it segments
    are allowed."""
    assert (decode(length=[8, 3]) == decode(length=np.asarray([8, 3], np.uint8))).all()
    q, ids = zeros(B, S, N, H), [[1] * S] * B
    assert prefill(q=q, segment_ids=ids, q_offset=np.int64(0), lengths=[S, 1]).shape == q.shape


def test_the_room_is_checked_inside_jit():
    """Shapes are known there, whatever the offset is."""
    with pytest.raises(ValueError, match="at least as many keys as queries, got 8 keys"):
        jax.eval_shape(lambda offset: prefill(q=zeros(B, 9, N, H), q_offset=offset), jnp.int32(0))


def test_values_are_not_checked_inside_jit():
    """There they are not known; all that is promised is a result of the right shape."""
    assert jax.jit(lambda offset: prefill(q_offset=offset))(jnp.int32(7)).shape == (B, T, N, H)


# Choice -----------------------------------------------------------------------

DEVICES = {
    "H100": AbstractDevice(device_kind="NVIDIA H100 80GB HBM3", platform="gpu", num_cores=132),
    "H200": AbstractDevice(device_kind="NVIDIA H200", platform="gpu", num_cores=132),
    "GH200": AbstractDevice(device_kind="NVIDIA GH200 480GB", platform="gpu", num_cores=132),
    "A100": AbstractDevice(device_kind="NVIDIA A100-SXM4-80GB", platform="gpu", num_cores=108),
    "B200": AbstractDevice(device_kind="NVIDIA B200", platform="gpu", num_cores=148),
    "v5e": AbstractDevice(device_kind="TPU v5 lite", platform="tpu", num_cores=1),
}


def under(device: str):
    return jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=DEVICES[device]))


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
                    op,
                    None,
                    q,
                    k,
                    segment_ids=jnp.ones((B, T)) if op == "prefill" else None,
                    offset=True,
                )
                == chosen
            )


def like(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


TABLE = like(1, 8, dtype=jnp.int32)
LIMITS = {  # what a kernel cannot do -> device, op, q, k, block table, what the refusal names
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
@pytest.mark.parametrize("head_dim", ops.HEAD_DIMS)
@pytest.mark.parametrize("page", [64, 128, 192, 256])
def test_hopper_takes_pages_of_64(page, head_dim, dtype):
    """Tiles longer than a page are cut, and still cover it."""
    q, k = like(1, 1, 8, head_dim), like(9, 8, page, head_dim, dtype=jnp.dtype(dtype))
    with under("H100"):
        assert ops.choose_implementation("decode", None, q, k, page_table=TABLE) == "hopper"
        tuning = ops.find_tuning("hopper", "decode", q, k.dtype)
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
    "unknown": ("H100", "flash", {}, "available: 'xla', 'hopper', 'tpu', 'cudnn'"),
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


@pytest.mark.parametrize("implementation", ["hopper", "tpu", "cudnn"])
def test_no_device_kernel_on_a_cpu(implementation):
    for op in (prefill, decode):
        with on_the_cpu(), pytest.raises(NotImplementedError, match="this is cpu"):
            op(implementation=implementation)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"segment_ids": jnp.ones((B, S), int), "q": zeros(B, S, N, H)}, "takes no segment_ids"),
        ({"q_offset": jnp.int32(0)}, "takes no q_offset"),
    ],
)
def test_what_cudnn_refuses(arguments, message):
    with under("A100"), pytest.raises(NotImplementedError, match=message):
        prefill(implementation="cudnn", **arguments)


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
    "kind", ["NVIDIA H100 PCIe", "NVIDIA H200 NVL", "NVIDIA H800", "NVIDIA H20"]
)
def test_names_of_hopper(kind):
    assert is_hopper("gpu", kind)
