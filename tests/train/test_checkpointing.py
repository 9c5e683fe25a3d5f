"""Checkpoints of a run: back onto any mesh, past damage and full disks, never into another run."""

import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from swiftkv_jax.errors import CheckpointError, UsageError
from swiftkv_jax.mesh import MODEL, make_mesh
from swiftkv_jax.params import SwiftKV
from swiftkv_jax.train.checkpointing import Resume, RunCheckpoints
from swiftkv_jax.train.step import TrainState

ROOT = Path(__file__).parent.parent.parent
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


# Restoring --------------------------------------------------------------------


def test_a_new_run_starts_from_nothing(tmp_path):
    assert restore(tmp_path) is None


def test_any_mesh_continues_what_any_other_saved(tmp_path):
    checkpoints = open_run(tmp_path)
    assert checkpoints.restore(*shapes_and_shardings((4, 1))) is None
    checkpoints.save(state_at(1, (4, 1)))
    checkpoints.close()
    for mesh in (2, 2), (1, 1), (1, 8):
        state = restore(tmp_path, mesh=mesh)
        assert_is(state, 1)
        assert state is not None and state.delta.q.sharding.is_equivalent_to(
            state_at(1, mesh).delta.q.sharding, 3
        )


def test_saving_does_not_wait_and_does_not_see_later_changes(tmp_path):
    checkpoints = open_run(tmp_path)
    checkpoints.restore(*shapes_and_shardings())
    state = state_at(1)
    checkpoints.save(state)
    jax.tree.map(lambda leaf: leaf.delete(), state)  # as a donated state is
    checkpoints.save(state_at(2))
    checkpoints.save(state_at(2))
    checkpoints.close()
    assert there(tmp_path) == ["1", "2"]
    assert_is(restore(tmp_path, resume=1), 1)


def test_another_run_is_refused_by_every_difference_and_never_skipped(tmp_path):
    save_steps(tmp_path, 1)
    other = open_run(tmp_path, fingerprint={"seed": 1, "data": "0badc0de", "learning_rate": 0.1})
    differences = (
        r"learning_rate was None and is now 0.1; mesh_free was \[1, 2\] and is now "
        r"None; seed was 0 and is now 1"
    )
    with pytest.raises(
        CheckpointError, match=rf"checkpoints/1 belongs to another run \({differences}\)"
    ):
        other.restore(*shapes_and_shardings())
    other.close()
    assert there(tmp_path) == ["1"]


def test_a_tuple_in_the_fingerprint_is_the_list_it_becomes(tmp_path):
    save_steps(tmp_path, 1)
    checkpoints = open_run(tmp_path, fingerprint=FINGERPRINT | {"mesh_free": (1, 2)})
    assert_is(checkpoints.restore(*shapes_and_shardings()), 1)
    checkpoints.close()


def test_a_state_with_other_leaves_is_not_taken_for_damage(tmp_path):
    save_steps(tmp_path, 1)
    shapes, shardings = (
        tree.replace(opt_state={"nu": tree.opt_state["mu"]}) for tree in shapes_and_shardings()
    )
    checkpoints = open_run(tmp_path)
    with pytest.raises(
        CheckpointError,
        match=r"another version of this program \(it differs in opt_state.mu.k, .*opt_state.nu.v\)",
    ):
        checkpoints.restore(shapes, shardings)
    checkpoints.close()
    assert there(tmp_path) == ["1"]


# --resume ---------------------------------------------------------------------


def test_must_and_never(tmp_path):
    with pytest.raises(UsageError, match="--resume must: no checkpoint in"):
        open_run(tmp_path, resume="must")
    assert restore(tmp_path, resume="never") is None
    save_steps(tmp_path, 1)
    assert_is(restore(tmp_path, resume="must"), 1)
    with pytest.raises(UsageError, match="--resume never: .* holds checkpoints"):
        open_run(tmp_path, resume="never")


def test_a_step_by_number_sets_later_ones_aside_and_writes_them_again(tmp_path):
    save_steps(tmp_path, 1, 2, 3)
    assert_is(restore(tmp_path, resume=1), 1)
    assert there(tmp_path) == ["1"] and there(tmp_path, "checkpoints-replaced") == ["2", "3"]
    save_steps(tmp_path, 2)
    assert_is(restore(tmp_path, resume=1), 1)
    assert there(tmp_path, "checkpoints-replaced") == ["2", "2-2", "3"]


def test_a_step_by_number_that_is_not_there(tmp_path):
    with pytest.raises(
        UsageError, match="--resume 2: no checkpoint of that step in .*; there is none"
    ):
        open_run(tmp_path, resume=2)
    save_steps(tmp_path, 1, 3)
    with pytest.raises(
        UsageError, match="--resume 2: no checkpoint of that step in .*; there are 1, 3"
    ):
        open_run(tmp_path, resume=2)


def test_a_step_by_number_that_is_damaged(tmp_path):
    save_steps(tmp_path, 1, 2, 3)
    flip_a_bit(tmp_path, 2)
    with pytest.raises(CheckpointError, match="checkpoints/2: .* damaged"):
        restore(tmp_path, resume=2)
    assert there(tmp_path) == ["1", "2", "3"]


# Damage -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (
            flip_a_bit,
            r"(delta|opt_state\.mu)\.[a-z]+ (is damaged: its digest is not the one|cannot be read)",
        ),
        (truncate, r"(delta|opt_state\.mu)\.[a-z]+ cannot be read \(.+\)"),
        (lose_metadata, r"its metadata cannot be read"),
    ],
)
@pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning"
)  # Orbax drops tasks that fail
def test_damage_falls_back_with_a_warning_that_names_the_leaf(damage, what, tmp_path, capfd):
    save_steps(tmp_path, 1, 2, 3)
    damage(tmp_path, 3)
    assert_is(restore(tmp_path, resume="must"), 2)
    assert there(tmp_path) == ["1", "2"] and there(tmp_path, "checkpoints-damaged") == ["3"]
    warnings = [line for line in capfd.readouterr().err.splitlines() if line.startswith("warning:")]
    assert len(warnings) == 1
    aside = tmp_path / "checkpoints-damaged" / "3"
    assert re.fullmatch(
        rf"warning: .*checkpoints/3: {what}.*; moved to {aside}, using step 2 instead", warnings[0]
    )


def test_one_flipped_bit_anywhere_is_noticed(tmp_path):
    """Whatever a state is restored from, it is what was saved."""
    save_steps(tmp_path, 1)
    file = data_file(tmp_path, 1)
    content = file.read_bytes()
    for position in random.Random(0).sample(range(len(content)), 8):
        file.write_bytes(
            content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]
        )
        try:
            state = restore(tmp_path)
        except CheckpointError:
            continue
        assert_is(state, 1)  # a byte that carries nothing


def test_all_damaged_is_an_error_that_names_the_newest(tmp_path):
    save_steps(tmp_path, 1, 2)
    flip_a_bit(tmp_path, 1)
    flip_a_bit(tmp_path, 2)
    with pytest.raises(
        CheckpointError,
        match="checkpoints/2: .* damaged: .*; no other checkpoint of this run is intact",
    ):
        restore(tmp_path)
    assert there(tmp_path) == ["1", "2"], "nothing is moved when there is nothing to go back to"


def test_an_older_damaged_one_is_no_obstacle(tmp_path):
    save_steps(tmp_path, 1, 2)
    lose_metadata(tmp_path, 1)
    assert_is(restore(tmp_path), 2)


# Retention --------------------------------------------------------------------


def test_the_newest_and_the_best_are_kept(tmp_path):
    save_steps(tmp_path, 1, 2, 3, 4, 5, keep=2, scores={1: 0.5, 2: 0.2, 3: 0.3, 5: 0.4})
    assert there(tmp_path) == ["2", "4", "5"]


def test_the_best_is_known_and_kept_in_a_continued_run(tmp_path):
    save_steps(tmp_path, 1, 2, keep=1, scores={1: 0.2, 2: 0.3})
    checkpoints = open_run(tmp_path, keep=1)
    checkpoints.restore(*shapes_and_shardings())
    assert checkpoints.best_step() == 1
    checkpoints.save(state_at(3), score=0.2)
    assert checkpoints.best_step() == 3, "the newest of equals"
    checkpoints.save(state_at(4), score=0.9)
    assert_is(checkpoints.load(3, *shapes_and_shardings()), 3)
    checkpoints.close()
    assert there(tmp_path) == ["3", "4"]


def test_without_scores_none_is_best(tmp_path):
    checkpoints = open_run(tmp_path)
    checkpoints.restore(*shapes_and_shardings())
    checkpoints.save(state_at(1))
    assert checkpoints.best_step() is None
    checkpoints.close()


# Processes that die -----------------------------------------------------------


def child(folder: Path, code: str) -> list[str]:
    """A command that runs `code` with this module's names and `folder`."""
    lines = [
        "import importlib.util, os, resource, sys, jax",
        "jax.config.update('jax_num_cpu_devices', 1)",
    ]
    lines += [f"spec = importlib.util.spec_from_file_location('recovery_test', {__file__!r})"]
    lines += [
        "here = importlib.util.module_from_spec(spec); sys.modules['recovery_test'] = here; "
        "spec.loader.exec_module(here)"
    ]
    return [
        sys.executable,
        "-c",
        "\n".join([*lines, f"folder = here.Path({str(folder)!r})", textwrap.dedent(code)]),
    ]


def test_a_full_disk_is_one_line_and_leaves_what_was_there(tmp_path):
    """Files may not grow beyond 4 KB, so the second save fails in the background: `close` says
    so."""
    code = """
        from swiftkv_jax import cli
        def main():
            checkpoints = here.open_run(folder, keep=1)
            checkpoints.restore(*here.shapes_and_shardings())
            checkpoints.save(here.state_at(1))
            assert checkpoints.load(1, *here.shapes_and_shardings())
            resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
            checkpoints.save(here.state_at(2))
            checkpoints.close()
            return 0
        sys.exit(cli.run(main))
    """
    run = subprocess.run(
        child(tmp_path, code), cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 1, run.stderr
    reported = [line for line in run.stderr.splitlines() if line]
    assert len(reported) == 1 and reported[0].startswith(
        f"error: checkpoint {tmp_path}/checkpoints/2 could not be saved ("
    )
    assert "File too large" in reported[0] and reported[0].endswith(
        "; the newest complete one is 1"
    )
    assert_is(restore(tmp_path, resume="must"), 1)


def test_a_save_that_failed_is_told_by_the_next_one(tmp_path):
    checkpoints = open_run(tmp_path)
    checkpoints.restore(*shapes_and_shardings())
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limit[1]))
        checkpoints.save(state_at(1))
        with pytest.raises(
            OSError, match="checkpoints/1 could not be saved .*; there is no older one"
        ):
            checkpoints.save(state_at(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    checkpoints.close()
    assert restore(tmp_path) is None
    save_steps(tmp_path, 1)
    assert_is(restore(tmp_path), 1)


def test_killed_while_saving(tmp_path):
    """kill -9 at three random moments of a process that saves all the time: the newest complete
    step is intact."""
    code = """
        state = here.restore(folder)
        checkpoints = here.open_run(folder, keep=2)
        checkpoints.restore(*here.shapes_and_shardings())
        step = 0 if state is None else int(state.step)
        while True:
            step += 1
            checkpoints.save(here.state_at(step))
    """
    moments, before = random.Random(1), 0
    for _ in range(3):
        with subprocess.Popen(
            child(tmp_path, code), cwd=ROOT, stderr=subprocess.PIPE, text=True
        ) as process:
            while not any(step > before for step in saved(tmp_path)) and process.poll() is None:
                time.sleep(0.01)
            time.sleep(moments.uniform(0, 0.2))
            process.send_signal(signal.SIGKILL)
            _, stderr = process.communicate()
        assert process.returncode == -signal.SIGKILL, stderr
        newest = max(saved(tmp_path))
        assert newest > before
        assert_is(restore(tmp_path, resume="must"), newest)
        assert all(name.isdecimal() for name in there(tmp_path)), (
            "what the killed process left is still there"
        )
        assert not (tmp_path / "checkpoints-damaged").exists()
        before = newest


def saved(folder: Path) -> list[int]:
    return (
        [int(name) for name in there(folder) if name.isdecimal()]
        if (folder / "checkpoints").exists()
        else []
    )


def test_the_metadata_is_plain_json(tmp_path):
    """What other programs may read: fingerprint, score, and a digest per leaf."""
    save_steps(tmp_path, 1, scores={1: 0.25})
    metadata = json.loads((tmp_path / "checkpoints" / "1" / "_CHECKPOINT_METADATA").read_text())[
        "custom_metadata"
    ]
    assert metadata["fingerprint"] == FINGERPRINT and metadata["score"] == 0.25
    assert {"step", "delta.norm", "delta.q", "opt_state.mu.v"} < metadata["digests"].keys()
