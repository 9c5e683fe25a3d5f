"""The command: what was measured or trained is kept, and bad arguments are refused."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

import swiftkv_jax as skv
from benchmarks.quality import __main__ as command
from benchmarks.quality import bench, scores, students
from benchmarks.quality.generation import find_prompts, parsed_blocks
from swiftkv_jax.checkpoints import open_any
from swiftkv_jax.errors import UsageError
from swiftkv_jax.model.batch import Batch
from swiftkv_jax.model.mesh import make_mesh
from swiftkv_jax.train.__main__ import main as train
from swiftkv_jax.train.data.loader import batches
from swiftkv_jax.train.recipe import DEMO, Recipe
from swiftkv_jax.train.run.batch_sharder import BatchSharder
from swiftkv_jax.train.run.setup import check_trainable, cut_model, load_data, load_model
from swiftkv_jax.train.run.start import initialize_delta
from swiftkv_jax.train.run.step import (
    init_state,
    make_optimizer,
    make_train_step,
    micro_batch_sharding,
)


@pytest.fixture(scope="module")
def training_text(tmp_path_factory) -> Path:
    file = tmp_path_factory.mktemp("data") / "code.txt"
    file.write_text("def f(x):\n    return x + 1\n\n\nclass A:\n    pass\n\n" * 40)
    return file


@pytest.mark.long
def test_interrupted_and_continued(tmp_path, monkeypatch, texts, training_text):
    """What was measured is not measured again, and the result is rewritten after every student."""
    monkeypatch.setattr(bench, "DEMO", dataclasses.replace(DEMO, batch_size=2))
    teacher = tmp_path / "t0"
    (teacher / "corpus").mkdir(parents=True)
    (teacher / "llama").symlink_to(DEMO.model)
    for name, lines in ("train", [training_text.read_text()]), ("held-out", dict(texts).values()):
        file = teacher / "corpus" / f"{name}.jsonl"
        file.write_text("".join(json.dumps({"text": text}) + "\n" for text in lines))
    output, made, make = tmp_path / "result.json", list[str](), students.make
    flags = "--cuts 75,50 --groups 2 --starts authors --steps 0 --rows 2 --no-generation --mesh 1x1"
    arguments = [
        *flags.split(),
        "--teacher",
        str(teacher),
        "--folder",
        str(tmp_path / "kept"),
        "--output",
        str(output),
    ]

    def interrupted(arm, *rest):
        if arm.num_key_value_layers == 4 and not made[1:]:
            made.append("interrupted")
            raise KeyboardInterrupt
        made.append(arm.name(0, 0))
        return make(arm, *rest)

    monkeypatch.setattr(students, "make", interrupted)
    assert command.main(arguments) == 130
    first = json.loads(output.read_text())
    assert [row["num_key_value_layers"] for row in first["rows"]] == [6]
    assert command.main(arguments) == 0
    assert made == ["6-2-authors-0", "interrupted", "4-2-authors-0"]
    second = json.loads(output.read_text())
    assert second["rows"][:1] == first["rows"] and second["date"] == first["date"]
    costs = [row["all"]["above"]["value"] for row in second["rows"]]
    assert len(costs) == 2 and 0 < costs[0] < costs[1]

    monkeypatch.setattr(scores, "run_teacher", None)  # not needed any more
    assert command.main([*arguments, "--check"]) == 0 and len(made) == 3
    assert json.loads(output.read_text())["rows"] == second["rows"]


@pytest.mark.parametrize(
    "flags, expected",
    [
        ("--cuts half", "--cuts 'half'"),
        ("--groups 0", "--groups '0'"),
        ("--groups 3 --cuts 50", "--groups 3"),
        ("--starts mean", "--starts 'mean'"),
        ("--starts leader --groups 1", "--starts leader"),
        ("--steps x", "--steps 'x'"),
        ("--seeds 0", "--seeds 0"),
        ("--rows 0", "--rows 0"),
        ("--mesh 2", "--mesh '2'"),
        ("--train-own", "--generated-kv"),
        ("--train-own --generated-kv own --groups 1", "--train-own"),
    ],
)
def test_bad_arguments_are_one_line(flags, expected, capsys, tmp_path):
    folder = tmp_path / "kept"
    assert command.main([*flags.split(), "--folder", str(folder)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and expected in error and error.count("\n") == 1
    assert not folder.exists()


@pytest.mark.parametrize(
    ("arm", "best", "tried"),
    [
        (students.Arm(4, 2, "authors", 64), 0.2, [0.1, 0.2, 0.3]),
        (students.Arm(4, 2, "closed-form", 64), 2.0, [1.0, 2.0, 3.0]),
        (students.Arm(4, 1, "closed-form", 64, "own"), 3.0, [1.0, 2.0, 3.0, 4.0]),
        (students.Arm(4, 2, "closed-form", 0), DEMO.learning_rate, [DEMO.learning_rate]),
    ],
)
def test_learning_rates_are_tried_upwards(arm, best, tried, monkeypatch):
    """Of either recipe, up to the first that is worse than the one before it; the other seeds are
    trained at the best. What is trained for own keys and values is compared with them."""
    measured = []

    def cell(bench, arm, rate, seed):
        measured.append((rate, seed))
        losses = {
            "boundary": ("all", abs(rate - 2) * abs(rate - 0.2)),
            "own": ("answers", abs(rate - 3)),
        }
        modes = {mode: {name: {"nll": [loss]}} for mode, (name, loss) in losses.items()}
        return {"learning_rate": rate, "seed": seed, "modes": modes}

    measuring = object.__new__(bench.Bench)
    monkeypatch.setattr(bench.Bench, "_cell", cell)
    vars(measuring).update(
        _rates=(0.1, 0.2, 0.3, 0.4), _package_rates=(1.0, 2.0, 3.0, 4.0), _recipe=DEMO
    )
    *_, (cells, all_tried) = measuring.cells_of(arm, 2)
    assert [one["learning_rate"] for one in all_tried] == tried
    assert {one["learning_rate"] for one in cells} == {best}
    assert measured[len(tried) :] == ([(best, 1)] if arm.steps else [])


def demo_recipe(arm: students.Arm, training_text: Path, folder: Path) -> Recipe:
    """On few rows of 32 tokens."""
    return dataclasses.replace(
        arm.recipe(dataclasses.replace(DEMO, dtype="float32"), DEMO.learning_rate, 0),
        data=(str(training_text),),
        eval_data=None,
        output_dir=folder,
        max_length=32,
        batch_size=4,
    )


def test_what_was_trained_is_kept(tmp_path, training_text, tokenizer, monkeypatch):
    """Another recipe does not get it."""
    arm, mesh, file = students.Arm(4, 4, "leader", 3), make_mesh("1x1"), tmp_path / "x" / "y.npz"
    recipe = demo_recipe(arm, training_text, tmp_path)
    data, _ = load_data(recipe, tokenizer)

    def twice(recipe, model, data, mesh, loss):
        heads = tuple((number % 2, 1 - number % 2) for number in range(4))
        config = dataclasses.replace(model.config, shared_kv_heads=heads)
        mix = jnp.ones((4, 2, 32, 32))
        delta = jax.tree.map(lambda leaf: 2 * leaf, dataclasses.replace(model.swiftkv, mix=mix))
        return dataclasses.replace(model, config=config, swiftkv=delta)

    monkeypatch.setattr(students, "train", twice)
    trained = students.make(arm, recipe, data, mesh, file)
    monkeypatch.setattr(students, "train", None)
    read = students.make(arm, recipe, data, mesh, file)
    assert read.config == trained.config and students.is_finite(read)
    jax.tree.map(np.testing.assert_array_equal, read.swiftkv, trained.swiftkv)
    with pytest.raises(UsageError, match="another recipe"):
        students.make(arm, dataclasses.replace(recipe, seed=1), data, mesh, file)


def test_one_program_trains_at_every_learning_rate(tmp_path, training_text, tokenizer):
    """As the optimiser of the recipe does at its rate."""
    arm, mesh = students.Arm(6, 2, "leader", 2), make_mesh("1x1")
    recipe = demo_recipe(arm, training_text, tmp_path)
    (data, _), config = load_data(recipe, tokenizer), open_any(recipe.model).config
    model = load_model(recipe, cut_model(recipe, config), mesh)
    model, _ = initialize_delta(recipe, model, data, mesh)
    students._program.cache_clear()
    low, high = (
        students.train(dataclasses.replace(recipe, learning_rate=rate), model, data, mesh)
        for rate in (1e-3, 4e-3)
    )
    assert low.swiftkv is not None and high.swiftkv is not None and model.swiftkv is not None
    assert students._program.cache_info().misses == 1

    recipe = dataclasses.replace(recipe, learning_rate=4e-3)
    optimizer = make_optimizer(recipe, arm.steps)
    step = make_train_step(model.config, recipe, optimizer, mesh)
    state = init_state(model.config, optimizer, mesh, model.swiftkv)
    sharder = BatchSharder(micro_batch_sharding(mesh), (1, recipe.batch_size))
    reading = batches(data, 4, positions=sharder.positions, seed=recipe.seed, stop=arm.steps)
    for local in reading:
        state, _ = step(state, model.llama, sharder.shard(local.batch))
    np.testing.assert_allclose(high.swiftkv.q, state.delta.q, rtol=1e-5, atol=1e-7)
    assert not np.allclose(low.swiftkv.q, high.swiftkv.q, atol=1e-4)


def test_groups_trained_for_own_start_scaled(tmp_path, training_text, tokenizer, monkeypatch):
    """In the usual order they are trained for the boundary and scaled then. `swiftkv train` refuses
    the other one."""
    arm, mesh = students.Arm(6, 2, "closed-form", 1, "own", trains_own=True), make_mesh("1x1")
    recipe = demo_recipe(arm, training_text, tmp_path)
    data, _ = load_data(recipe, tokenizer)
    started, train = [], students.train

    def recorded(recipe, model, *rest):
        started.append(jax.tree.map(np.asarray, model))
        return train(recipe, model, *rest)

    monkeypatch.setattr(students, "train", recorded)
    trained = students.make(arm, recipe, data, mesh, tmp_path / "trained.npz")
    usual = dataclasses.replace(arm, trains_own=False)
    scaled = students.make(usual, recipe, data, mesh, tmp_path / "scaled.npz")
    first, second = started
    assert trained.config == scaled.config == first.config and first.config.has_two_caches
    assert not second.config.has_two_caches
    assert not np.array_equal(first.swiftkv.q, second.swiftkv.q), "scaled"
    assert students.is_finite(trained) and trained.swiftkv is not None
    assert not np.array_equal(trained.swiftkv.q, first.swiftkv.q), "trained"
    with pytest.raises(UsageError, match="keep-delta"):
        check_trainable(first.config)


def test_blocks_are_generated_in_every_mode(tmp_path, training_text, tokenizer):
    """Also where layers share a cache, unless they have a sliding window."""
    arm = students.Arm(6, 2, "authors", 0)
    recipe = demo_recipe(arm, training_text, tmp_path)
    data, _ = load_data(recipe, tokenizer)
    model = students.make(arm, recipe, data, make_mesh("1x1"), tmp_path / "none.npz")
    assert bench.served_modes(model) == scores.MODES
    prompts = find_prompts([("text", training_text.read_text())], tokenizer, count=1)
    assert len(parsed_blocks(model, prompts, scores.MODES[-1], new_tokens=2)) == 1

    windows = tuple(dataclasses.replace(kind, window=16) for kind in model.config.layer_kinds)
    for group, modes in (1, scores.MODES), (2, scores.MODES[:1]):
        config = dataclasses.replace(model.config, layer_kinds=windows, key_value_group_size=group)
        assert bench.served_modes(dataclasses.replace(model, config=config)) == modes


def test_cross_entropy_needs_no_teacher(tmp_path, training_text, tokenizer):
    """Its loss is that of the student's logits on the text, and falls."""
    arm, mesh = students.Arm(6, 2, "leader", 1, loss="cross-entropy"), make_mesh("1x1")
    recipe = demo_recipe(arm, training_text, tmp_path)
    data, _ = load_data(recipe, tokenizer)
    untrained = dataclasses.replace(arm, steps=0)
    model = students.make(untrained, recipe, data, mesh, tmp_path / "none.npz")
    tokens = np.array(tokenizer(training_text.read_text())["input_ids"][:64]).reshape(2, 32)

    def loss_of(model) -> float:
        log_p = jax.nn.log_softmax(skv.logits(model, tokens)[:, :-1])
        return -float(jnp.take_along_axis(log_p, tokens[:, 1:, None], -1).mean())

    batch = Batch(
        tokens=tokens.astype(np.int32),
        positions=np.broadcast_to(np.arange(32, dtype=np.int32), tokens.shape),
        segment_ids=np.ones(tokens.shape, np.int32),
        loss_mask=np.broadcast_to(np.float32(np.arange(32) < 31), tokens.shape),
    )
    optimizer = optax.sgd(0.1)
    step = students.make_cross_entropy_step(model.config, recipe, optimizer, mesh)
    assert model.swiftkv is not None
    state = init_state(model.config, optimizer, mesh, model.swiftkv)
    llama = dataclasses.replace(model.llama, upper_qkv=None)  # the teacher cannot run
    losses = [loss_of(model)]
    for _ in range(3):
        state, metrics = step(state, llama, jax.tree.map(lambda field: field[None], batch))
        assert float(metrics["loss"]) == pytest.approx(losses[-1], rel=1e-5)
        losses.append(loss_of(dataclasses.replace(model, swiftkv=state.delta)))
    assert losses == sorted(losses, reverse=True)


@pytest.mark.long
@pytest.mark.parametrize(("group", "generated_kv"), [(2, "boundary"), (1, "own")])
def test_training_is_that_of_the_command(group, generated_kv, tmp_path, training_text, tokenizer):
    """The same delta as `swiftkv train` exports."""
    flags = {
        "data": training_text,
        "output-dir": tmp_path,
        "max-length": 32,
        "batch-size": 4,
        "max-steps": 3,
        "key-value-group-size": group,
        "generated-kv": generated_kv,
    }
    assert train([part for name, value in flags.items() for part in (f"--{name}", str(value))]) == 0
    exported = load_file(tmp_path / "model" / "model.safetensors")
    arm = students.Arm(4, group, "closed-form", 3, generated_kv)
    recipe = demo_recipe(arm, training_text, tmp_path)
    data, _ = load_data(recipe, tokenizer)
    trained = students.make(arm, recipe, data, make_mesh("1x1"), tmp_path / "delta.npz")
    assert trained.swiftkv is not None
    for layer in range(4, 8):
        name = f"model.layers.{layer}.self_attn.q_proj_swiftkv.weight"
        ours = np.asarray(trained.swiftkv.q[layer - 4].astype(jnp.bfloat16))
        np.testing.assert_array_equal(ours.reshape(exported[name].shape), exported[name])
