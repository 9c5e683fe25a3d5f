"""Prefill through cuDNN: where it is chosen, and how chunks are put together from calls of it, with
XLA's attention in its place. cuDNN itself runs on GPUs alone (`make test-gpu`)."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swiftkv_jax.pallas_kernels import AttentionSpec, choice, choose, cudnn, prefill_attention
from swiftkv_jax.pallas_kernels import device as devices
from swiftkv_jax.pallas_kernels.device import Device
from swiftkv_jax.pallas_kernels.selfcheck import Case, Row, compare, difference, draw, expected_of
from tests.pallas_kernels.cases import CHUNKS, PREFILL, case_of
from tests.pallas_kernels.cudnn_stand_in import attend
from tests.pallas_kernels.interpreted import device, on_hardware, under

parametrize = pytest.mark.parametrize
SIZES = {"one call": (2048, 256, 8192), "many": (96, 96, 50), "of two sizes": (300, 100, 50)}
"""Most queries of a call, those of a short one, and most context."""
SHORT = {"pages of 7", "ragged rows at different offsets"}


def combinations(names) -> list:
    """(name, sizes) of each combination. All but the most telling are `long`."""
    return [
        pytest.param(
            name, sizes, marks=[] if name in SHORT and sizes == "many" else pytest.mark.long
        )
        for name in names
        for sizes in SIZES
    ]


def check(case: Case, sizes: str, attend=attend):
    """The chunk of `case`, put together from calls of `attend`, is the reference's."""
    drawn = draw(dataclasses.replace(case, return_lse=False))
    operands = jax.tree.map(jnp.asarray, drawn.operands)
    found = jax.jit(functools.partial(chunk, sizes=sizes, attend=attend))(operands)
    case = dataclasses.replace(case, return_lse=False)
    assert difference([found], *expected_of(case, drawn)).right


def chunk(operands, *, sizes, attend=attend):
    queries, few, context = SIZES[sizes]
    most = {"most_queries": queries, "few_queries": few, "most_context": context}
    return cudnn.chunk(operands, attend=attend, **most)


# Chunks -----------------------------------------------------------------------

ROWS = [name for name in PREFILL if any(row.position for row in PREFILL[name].rows)]


@parametrize(("name", "sizes"), combinations([*CHUNKS, *ROWS]))
def test_chunks(name, sizes):
    check(case_of(name, "float32"), sizes)


@parametrize("cache_format", ["float8_e4m3fn", "int8"])
def test_formats_of_a_cache(cache_format):
    check(case_of("of one prompt", cache_format), "many")


# Rows of 4 queries: of prompt a from position 8 on, the last with 1 query; an idle one; of prompt b
# from 0 on, where the second has only 3, then from 8 on; of a again, where b would go on.
PICTURE = {
    "offset": [8, 12, 16, 0, 0, 4, 8, 12],
    "lengths": [4, 4, 1, 0, 4, 3, 4, 4],
    # Pages of 8: the first is that of both. What stands for those that no query sees is anything.
    "table": ["st-", "st.", "stu", "...", "s--", "s..", "sv-", "st-"],
}


@parametrize(
    ("most", "size", "following"),
    [
        (4, [3, 2, 1, 1, 2, 1, 1, 1], [0, 1, 2, 4, 4, 5, 6, 7, 8]),
        (2, [2, 2, 1, 1, 2, 1, 1, 1], [0, 1, 2, 4, 4, 5, 6, 7, 8]),
        (1, [1, 1, 1, 1, 1, 1, 1, 1], [0, 1, 2, 4, 4, 5, 6, 7, 8]),
    ],
)
def test_a_call_takes_the_rows_that_continue_a_prompt(most, size, following):
    offset, lengths = (jnp.asarray(PICTURE[name]) for name in ("offset", "lengths"))
    table = jnp.asarray([[*map(ord, pages)] for pages in PICTURE["table"]])
    found = cudnn._calls(4, 8, offset, lengths, table, most)
    assert [array.tolist() for array in found] == [size, following]


@parametrize(
    ("name", "sizes", "calls"),
    [
        ("of one prompt", "one call", [(384, 326)]),  # its three rows, the last of which has 70
        # Three rows of 70 queries, but the last of 33, and 130, 60 and 0 positions before them.
        (
            "of two prompts, an idle row first",
            "many",
            [(70, 70)] * 2 + [(70, 33)] + [(50, 50)] * 3 + [(50, 30), (50, 10)],
        ),
        # Two of them, then the last alone in a smaller call.
        ("of one prompt", "of two sizes", [(256, 256), (128, 70)] + [(50, 50)] * 5 + [(50, 6)]),
        (
            "pages of 64, up to the last position",  # 280 and 216 positions before two rows of 64
            "many",
            [(64, 40), (64, 64)] + [(50, 50)] * 9 + [(50, 30), (50, 16)],
        ),
    ],
)
def test_calls(name, sizes, calls):
    """No more than are needed: (keys of an operand, those that are seen) of each call."""
    made = []

    def counted(q, k, v, queries, keys, *, causal):
        jax.debug.callback(lambda seen: made.append((k.shape[1], int(seen[0]))), keys)
        return attend(q, k, v, queries, keys, causal=causal)

    check(case_of(name, "float32"), sizes, counted)
    jax.effects_barrier()
    assert sorted(made) == sorted(calls)


def test_idle_rows_alone():
    operands = draw(case_of("of one prompt", "float32")).operands
    operands = dataclasses.replace(operands, lengths=jnp.zeros(3, jnp.int32))
    assert not np.any(chunk(jax.tree.map(jnp.asarray, operands), sizes="many"))


def test_logarithms_need_float32():
    """Why `attend` is not `jax.nn.dot_product_attention`: rounded to bfloat16, they make other
    weights."""

    def rounded(*operands, **options):
        out, lse = attend(*operands, **options)
        return out, lse.astype(jnp.bfloat16).astype(jnp.float32)

    case = Case("prefill", (Row(600, 16),), 16, 2, 1, 640, 64, page_size=128)
    check(case, "many")
    with pytest.raises(AssertionError):
        check(case, "many", rounded)


# Choice -----------------------------------------------------------------------


def like(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def spec(op: Any = "prefill", head_dim=128, dtype="bfloat16", cache=None, paged=True, packed=False):
    """A chunk of an engine, or a step of decoding."""
    table = like(16, 64, dtype="int32") if paged else None
    q = like(16, 128 if op == "prefill" else 1, 32, head_dim, dtype=dtype)
    return AttentionSpec(op, q, like(4096, 8, 128, head_dim, dtype=cache or dtype), table, packed)


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(choice, "cudnn_version", lambda: 92000)


CHOSEN: dict[str, tuple[str, dict[str, Any], str]] = {  # device, changes of the operands -> chosen
    "A100": ("A100", {}, "cudnn"),
    "B200": ("B200", {}, "cudnn"),
    "float16": ("A100", {"dtype": "float16"}, "cudnn"),
    "FP8 cache": ("A100", {"cache": "float8_e4m3fn"}, "cudnn"),
    "odd head dim": ("A100", {"head_dim": 72}, "cudnn"),
    "float32": ("A100", {"dtype": "float32"}, "xla"),
    "wide heads": ("A100", {"head_dim": 256}, "xla"),
    "no multiple of 8": ("A100", {"head_dim": 100}, "xla"),
    "decode": ("A100", {"op": "decode"}, "xla"),
    "decode of rows, which it takes by name": ("A100", {"op": "decode", "paged": False}, "xla"),
    "what a Hopper kernel refuses": ("H100", {"head_dim": 72}, "xla"),
}


@parametrize("name", CHOSEN)
def test_none_chooses(name, installed):
    machine, changes, chosen = CHOSEN[name]
    assert choose(device(machine), spec(**changes)).implementation == chosen


def test_none_does_not_choose_what_is_not_installed(monkeypatch):
    monkeypatch.setattr(choice, "cudnn_version", lambda: None)
    reason = "needs cuDNN, which JAX does not find"
    assert choose(device("A100"), spec()) == ("xla", None, reason)
    with pytest.raises(NotImplementedError, match=reason):
        choose(device("A100"), spec(), "cudnn")


@parametrize(
    ("kind", "name"),
    [
        ("NVIDIA L40S", "cudnn"),
        ("NVIDIA GeForce RTX 5090", "cudnn"),
        ("NVIDIA RTX 6000 Ada Generation", "cudnn"),
        ("NVIDIA RTX A6000", "cudnn"),
        ("NVIDIA GeForce RTX 2080 Ti", None),
        ("NVIDIA TITAN RTX", None),
        ("NVIDIA T1000 8GB", None),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "cudnn"),
        ("NVIDIA GB200", "cudnn"),
        ("Tesla T4", None),
        ("AMD Instinct MI300X", None),
    ],
)
def test_kinds_of_gpus(kind, name):
    assert Device("gpu", kind).kernels == name


def test_hopper_under_a_cuda_that_miscompiles_its_kernels(monkeypatch):
    for version, name in ((13000, "hopper"), (12080, "cudnn")):
        monkeypatch.setattr(devices, "cuda_runtime_version", lambda version=version: version)
        assert Device("gpu", "NVIDIA H100 80GB HBM3").kernels == name


@parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 256}, "multiples of 8 up to 128 here"),
        ({"dtype": "float32"}, "takes bfloat16 or float16"),
        ({"cache": "float16"}, "takes operands of one dtype"),
        ({"packed": True}, "takes no segment_ids"),
        ({"op": "decode"}, "takes no page_table in decode"),
    ],
)
def test_a_name_is_refused_with_the_reason(changes, message, installed):
    with pytest.raises(NotImplementedError, match=message):
        choose(device("A100"), spec(**changes), "cudnn")


def test_no_gradient_of_a_chunk(installed):
    q, kv = like(2, 6, 4, 64), like(2, 2, 64, 64)

    def loss(q, k, v):
        out = prefill_attention(q, k, v, q_offset=jnp.int32(1), implementation="cudnn")
        return out.astype(jnp.float32).sum()

    with under("A100"), pytest.raises(NotImplementedError, match="no gradient with q_offset"):
        jax.eval_shape(jax.grad(loss), q, kv, kv)


def test_the_stand_in_is_exact_on_gpus():
    """They would round float32 operands to TF32, far beyond the tolerance of float32."""
    q, kv, lengths = like(2, 6, 4, 64), like(2, 8, 2, 64), like(2, dtype="int32")
    call = functools.partial(attend, causal=True)
    traced = str(jax.make_jaxpr(call)(q, kv, kv, lengths, lengths))
    products = traced.count("dot_general[")
    assert products and traced.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") == products


# On hardware ------------------------------------------------------------------

hardware = pytest.mark.skipif(not on_hardware("cudnn"), reason="needs an NVIDIA GPU: make test-gpu")


@pytest.mark.hardware
@hardware
@parametrize("name", ["whole rows", "several blocks", "ragged rows"])
def test_whole_rows(name):
    assert compare(case_of(name, "bfloat16"), "cudnn").right


@pytest.mark.hardware
@hardware
@parametrize("sizes", SIZES)
@parametrize("name", CHUNKS)
def test_chunks_by_cudnn(name, sizes):
    check(case_of(name, "bfloat16"), sizes, cudnn.attend)


@pytest.mark.hardware
@hardware
def test_a_part_by_cudnn_is_that_of_xla():
    """Its output and its logarithms, whose base and mask the parts are joined by."""
    operands = draw(Case("prefill", (Row(),), 300, 8, 2, 300, 128)).operands
    q, k, v = (jnp.asarray(x) for x in (operands.q, operands.k, operands.v))
    k, v = (x.swapaxes(1, 2) for x in (k, v))
    for causal, queries, keys in ((True, 201, 201), (False, 201, 77)):
        lengths = jnp.asarray([queries], jnp.int32), jnp.asarray([keys], jnp.int32)
        found, wanted = (
            [part[:, :queries] for part in one(q, k, v, *lengths, causal=causal)]
            for one in (cudnn.attend, attend)
        )
        np.testing.assert_allclose(np.float32(found[0]), np.float32(wanted[0]), atol=1.5e-2)
        np.testing.assert_allclose(found[1], wanted[1], atol=2e-3)
