"""Checkpoints of a run: restored onto any mesh, past damage, never into another run."""

import json
import random
import re

import jax
import pytest

from swiftkv_jax.errors import CheckpointError, UsageError
from tests.train.states import (
    FINGERPRINT,
    assert_is,
    data_file,
    flip_a_bit,
    lose_metadata,
    open_run,
    restore,
    save_steps,
    shapes_and_shardings,
    state_at,
    there,
    truncate,
)

# Restoring --------------------------------------------------------------------


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
    assert checkpoints.best_step() is None, "none has a score"
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
    with pytest.raises(UsageError, match="`resume`=must: no checkpoint in"):
        open_run(tmp_path, resume="must")
    assert restore(tmp_path, resume="never") is None
    save_steps(tmp_path, 1)
    assert_is(restore(tmp_path, resume="must"), 1)
    with pytest.raises(UsageError, match="`resume`=never: .* holds checkpoints"):
        open_run(tmp_path, resume="never")


def test_a_step_by_number_sets_later_ones_aside_and_writes_them_again(tmp_path):
    save_steps(tmp_path, 1, 2, 3)
    assert_is(restore(tmp_path, resume=1), 1)
    assert there(tmp_path) == ["1"] and there(tmp_path, "checkpoints-replaced") == ["2", "3"]
    save_steps(tmp_path, 2)
    assert_is(restore(tmp_path, resume=1), 1)
    assert there(tmp_path, "checkpoints-replaced") == ["2", "2-2", "3"]


def test_a_step_by_number_of_a_finished_run_is_refused(tmp_path):
    """The export would be that of the last step still."""
    save_steps(tmp_path, 1, 2)
    (tmp_path / "model").mkdir()
    with pytest.raises(
        UsageError, match="`resume`=1: .* holds the model of a finished run; remove"
    ):
        restore(tmp_path, resume=1)
    assert there(tmp_path) == ["1", "2"]


def test_a_step_by_number_that_is_not_there(tmp_path):
    with pytest.raises(
        UsageError, match="`resume`=2: no checkpoint of that step in .*; there is none"
    ):
        open_run(tmp_path, resume=2)
    save_steps(tmp_path, 1, 3)
    with pytest.raises(
        UsageError, match="`resume`=2: no checkpoint of that step in .*; there are 1, 3"
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
def test_damage_falls_back_with_a_warning_that_names_the_leaf(damage, what, tmp_path, log):
    save_steps(tmp_path, 1, 2, 3)
    damage(tmp_path, 3)
    assert_is(restore(tmp_path, resume="must"), 2)
    assert there(tmp_path) == ["1", "2"] and there(tmp_path, "checkpoints-damaged") == ["3"]
    warnings = [record.getMessage() for record in log.records if record.name.startswith("swift")]
    assert len(warnings) == 1
    aside = tmp_path / "checkpoints-damaged" / "3"
    assert re.fullmatch(
        rf".*checkpoints/3: {what}.*; moved to {aside}, using step 2 instead", warnings[0]
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


def test_the_metadata_is_plain_json(tmp_path):
    """What other programs may read: fingerprint, score, and a digest per leaf."""
    save_steps(tmp_path, 1, scores={1: 0.25})
    metadata = json.loads((tmp_path / "checkpoints" / "1" / "_CHECKPOINT_METADATA").read_text())[
        "custom_metadata"
    ]
    assert metadata["fingerprint"] == FINGERPRINT and metadata["score"] == 0.25
    assert {"step", "delta.norm", "delta.q", "opt_state.mu.v"} < metadata["digests"].keys()
