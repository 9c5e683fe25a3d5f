"""A training state that cannot be read: one error, and nothing left behind."""

import gc
import os
import warnings

import jax
import jax.numpy as jnp
import pytest

from swiftkv_jax.checkpoints.states import STATE, DamagedError, read_leaf


@pytest.mark.long
def test_failed_reads_leave_no_unfinished_tasks(tmp_path):
    """Orbax's, which warn when they are collected: some reads in a hundred left one."""
    from orbax.checkpoint import v1 as ocp

    ocp.save_checkpointables(str(tmp_path / "state"), {STATE: {"q": jnp.arange(1000.0)}})
    for file in (tmp_path / "state" / STATE / "d").iterdir():
        os.truncate(file, file.stat().st_size // 2)
    where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    shape = jax.ShapeDtypeStruct((1000,), jnp.float32, sharding=where)
    gc.freeze()  # what other tests have left takes seconds to look through
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(200):
            with pytest.raises(DamagedError, match="q cannot be read"):
                read_leaf(tmp_path / "state", "q", shape, expected=0)
        gc.collect()
    gc.unfreeze()
    assert [str(warning.message) for warning in caught] == []
