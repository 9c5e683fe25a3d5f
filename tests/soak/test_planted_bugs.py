"""The interpreter is worth something: with one wait or fence left out, a kernel races, stops or
goes wrong, and with a statement changed, a wrong work list or a wrong order of tiles it goes wrong;
and it is noticed.

That is a property of the kernels and of JAX's interpreters, to be looked at again when either
changes: some minutes.
"""

import subprocess
import sys

import pytest

from tests.pallas_kernels.planted import EDITS, PLANS, TILES, edited, statements

FREE = "pl.when(n >= ring.stages)(lambda: plgpu.barrier_wait(ring.free.at[ring.slot(n)]))"
PLANTED = {
    "hopper.prefill": [
        "plgpu.barrier_wait(q_ready.at[warpgroup])",
        "plgpu.barrier_wait(v_ready.at[slot(i - 1)])",
        "plgpu.commit_smem()",
    ],
    "hopper.prefill_tiles": [FREE],
    "hopper.prefill.persistent": [
        "pl.when(done > 0)(lambda w=consumer: plgpu.barrier_wait(q_free.at[w]))",
        "plgpu.wait_smem_to_gmem(0, wait_read_only=True)",
    ],
    "hopper.prefill_tiles.multicast": [FREE],
    "hopper.prefill_tiles.both": [FREE],
    "hopper.decode": [
        "plgpu.barrier_wait(full.at[k_slot])",
        "plgpu.barrier_wait(free.at[slot])",
    ],
    "hopper.decode_combine": ["plgpu.commit_smem()"],
    "hopper.backward_dq": ["plgpu.barrier_wait(kv_full.at[k_stage])"],
    "hopper.backward_dkv": ["plgpu.barrier_wait(do_full.at[stage])"],
    "tpu.decode": ["pltpu.make_async_copy(part, part, copied.at[slot]).wait()"],
}
CASES = [(kernel, statement) for kernel, planted in PLANTED.items() for statement in planted]


def run(kernel: str, statement: str) -> int:
    """The exit status; a run that hangs is killed and counts as noticed."""
    command = [sys.executable, "-m", "tests.pallas_kernels.planted", kernel, statement]
    try:
        return subprocess.run(command, capture_output=True, timeout=90).returncode
    except subprocess.TimeoutExpired:
        return -9


@pytest.mark.parametrize(("kernel", "statement"), CASES)
def test_it_is_noticed(kernel, statement):
    assert statement in statements(kernel)
    assert run(kernel, statement) != 0


@pytest.mark.parametrize("mistake", PLANS)
def test_a_wrong_plan_is_noticed(mistake):
    assert run("hopper.decode", mistake) == 1


@pytest.mark.parametrize(
    ("kernel", "mistake"),
    [
        (f"hopper.prefill.{variant}", mistake)
        for mistake in TILES
        for variant in ("multicast" if "thread block" in mistake else "persistent", "both")
    ],
)
def test_a_wrong_order_of_tiles_is_noticed(kernel, mistake):
    assert run(kernel, mistake) == 1


@pytest.mark.parametrize("mistake", EDITS)
def test_a_changed_statement_is_noticed(mistake):
    assert edited(mistake)
    assert run(EDITS[mistake][0], mistake) == 1


@pytest.mark.parametrize("kernel", [*PLANTED, "hopper.prefill.part", "tpu.prefill.part"])
def test_the_kernel_as_it_is_passes(kernel):
    """Or the test above would pass for nothing."""
    assert run(kernel, "") == 0
