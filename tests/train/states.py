"""Random training states, their checkpoints in a folder, and ways to damage them."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from swiftkv_jax.model.mesh import MODEL, make_mesh
from swiftkv_jax.model.params import SwiftKV
from swiftkv_jax.train.run.checkpointing import Resume, RunCheckpoints
from swiftkv_jax.train.run.step import TrainState

FINGERPRINT = {"seed": 0, "data": "0badc0de", "mesh_free": [1, 2]}


def state_at(step: int, mesh: tuple[int, int] = (1, 1)) -> TrainState:
    """Random leaves that depend on the step, heads over the mesh's model axis."""
    rng = np.random.default_rng(step)

    def leaf(*shape: int) -> jax.Array:
        spec = PartitionSpec(None, MODEL) if len(shape) == 3 else PartitionSpec()
        return jax.device_put(
            rng.normal(size=shape).astype(np.float32), NamedSharding(make_mesh(mesh), spec)
        )

    delta = SwiftKV(norm=leaf(16), q=leaf(4, 8, 64), k=leaf(2, 8, 64), v=leaf(2, 8, 64))
    return TrainState(jnp.int32(step), delta, {"mu": jax.tree.map(lambda x: x * x, delta)})


def shapes_and_shardings(mesh: tuple[int, int] = (1, 1)):
    state = state_at(0, mesh)
    return jax.eval_shape(lambda: state), jax.tree.map(lambda leaf: leaf.sharding, state)


def open_run(
    folder: Path, *, keep: int = 10, resume: Resume = "auto", fingerprint=FINGERPRINT
) -> RunCheckpoints:
    return RunCheckpoints(folder, fingerprint, keep=keep, resume=resume)


def save_steps(
    folder: Path, *steps: int, keep: int = 10, scores: dict[int, float] | None = None
) -> None:
    checkpoints = open_run(folder, keep=keep)
    checkpoints.restore(*shapes_and_shardings())
    for step in steps:
        checkpoints.save(state_at(step), score=(scores or {}).get(step))
    checkpoints.close()


def restore(
    folder: Path, *, resume: Resume = "auto", mesh: tuple[int, int] = (1, 1)
) -> TrainState | None:
    checkpoints = open_run(folder, resume=resume)
    try:
        return checkpoints.restore(*shapes_and_shardings(mesh))
    finally:
        checkpoints.close()


def there(folder: Path, kind: str = "checkpoints") -> list[str]:
    return sorted(path.name for path in (folder / kind).iterdir())


def assert_is(state: TrainState | None, step: int) -> None:
    assert state is not None
    jax.tree.map(np.testing.assert_array_equal, state, state_at(step))


def data_file(folder: Path, step: int) -> Path:
    """The file that holds the arrays."""
    return max(
        (folder / "checkpoints" / str(step)).rglob("ocdbt.process_0/d/*"),
        key=lambda file: file.stat().st_size,
    )


def flip_a_bit(folder: Path, step: int) -> None:
    """In the middle of the arrays, which noise keeps from being compressed: what is read there is
    another number."""
    with data_file(folder, step).open("r+b") as file:
        file.seek(file.seek(0, os.SEEK_END) // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


def truncate(folder: Path, step: int) -> None:
    os.truncate(data_file(folder, step), 40)


def lose_metadata(folder: Path, step: int) -> None:
    (folder / "checkpoints" / str(step) / "_CHECKPOINT_METADATA").unlink()
