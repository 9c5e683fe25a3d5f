"""The public functions, held to what the authors' own PyTorch model computed for two small
checkpoints."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import swiftkv_jax as skv
from swiftkv_jax import demo
from swiftkv_jax.checkpoints.auxiliary import load_tokenizer, read_auxiliary_files
from swiftkv_jax.checkpoints.safetensors_io import read_header
from swiftkv_jax.infer import Engine
from swiftkv_jax.model.mesh import MeshShape

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = ("llama-init-4of8-group1", "llama-trained-4of8-group2-tied")


@pytest.fixture(scope="module", params=NAMES)
def recorded(request):
    """(model, recorded arrays)"""
    reference = load_file(FIXTURES / f"{request.param}.reference.safetensors")
    return skv.load(FIXTURES / request.param), reference


def tokens_of(reference):
    return jnp.asarray(reference["input_ids"], jnp.int32)


def test_logits(recorded):
    model, reference = recorded
    assert model.dtype == jnp.float32, "float32 is the default on a CPU"
    for swiftkv, name in (
        (False, "teacher_logits"),
        (True, "swiftkv_logits"),
        (None, "swiftkv_logits"),
    ):
        np.testing.assert_allclose(
            skv.logits(model, tokens_of(reference), swiftkv=swiftkv), reference[name], atol=5e-6
        )


@pytest.mark.short("llama-trained-4of8-group2-tied-True")
@pytest.mark.parametrize("swiftkv", [False, True])
def test_greedy_continuations(recorded, swiftkv):
    model, reference = recorded
    expected = reference["swiftkv_greedy" if swiftkv else "teacher_greedy"].tolist()
    prompts = reference["input_ids"].tolist()
    model = dataclasses.replace(model, eos_token_ids=())  # the recording did not stop
    assert skv.generate(model, prompts, max_tokens=len(expected[0]), swiftkv=swiftkv) == expected


def test_distillation_loss_and_gradients(recorded, tmp_path):
    model, reference = recorded
    mask = jnp.asarray(reference["labels"] != -100, jnp.float32)

    def loss(delta):
        return skv.distill_loss(
            dataclasses.replace(model, swiftkv=delta), tokens_of(reference), mask
        )

    (value, metrics), gradient = jax.value_and_grad(loss, has_aux=True)(model.swiftkv)
    for name in ("logits_loss", "hidden_loss"):
        np.testing.assert_allclose(metrics[name], reference[name][0], rtol=1e-5)
    np.testing.assert_allclose(
        value, reference["logits_loss"][0] + reference["hidden_loss"][0], rtol=1e-5
    )

    skv.save_hf(dataclasses.replace(model, swiftkv=gradient), tmp_path / "gradient", format="delta")
    exported = load_file(tmp_path / "gradient" / "model.safetensors")
    expected = {
        name.removeprefix("grad."): array
        for name, array in reference.items()
        if name.startswith("grad.")
    }
    assert exported.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(
            exported[name], array, atol=1e-5 * np.abs(array).max(), err_msg=name
        )


def test_a_fresh_delta_is_the_authors(tmp_path):
    """Drop the delta from the checkpoint that was saved right after initialisation, and make it
    again."""
    model = skv.load(FIXTURES / NAMES[0])
    skv.save_hf(
        dataclasses.replace(model, config=model.config.cut(8), llama=whole(model), swiftkv=None),
        tmp_path / "plain",
    )
    plain = skv.load(tmp_path / "plain")
    assert plain.swiftkv is None and plain.config.num_key_value_layers == 8
    skv.save_hf(skv.add_swiftkv(plain, 4), tmp_path / "again")
    ours, theirs = (
        load_file(folder / "model.safetensors")
        for folder in (tmp_path / "again", FIXTURES / NAMES[0])
    )
    assert ours.keys() == theirs.keys()
    for name in theirs:
        np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)


def whole(model):
    from swiftkv_jax.model.stacks import split_layers

    return split_layers(model.config.cut(8), model.llama)


@pytest.mark.short("llama-trained-4of8-group2-tied")
def test_orbax_round_trip(recorded, tmp_path):
    model, reference = recorded
    skv.save(model, tmp_path / "orbax")
    again = skv.load(tmp_path / "orbax")
    assert again.config == model.config and again.eos_token_ids == model.eos_token_ids
    jax.tree.map(
        np.testing.assert_array_equal, (again.llama, again.swiftkv), (model.llama, model.swiftkv)
    )


def test_bfloat16_is_close(recorded):
    model, reference = recorded
    narrow = skv.load(
        FIXTURES / (NAMES[0] if model.config.key_value_group_size == 1 else NAMES[1]),
        dtype="bfloat16",
    )
    assert (
        narrow.dtype == jnp.bfloat16
        and narrow.swiftkv is not None
        and narrow.swiftkv.norm.dtype == jnp.bfloat16
    )
    logits = skv.logits(narrow, tokens_of(reference))
    assert logits.dtype == jnp.float32
    error = (
        np.abs(logits - reference["swiftkv_logits"]).max()
        / np.abs(reference["swiftkv_logits"]).max()
    )
    assert 1e-5 < error < 0.1


def test_a_teacher_needs_no_delta_and_a_student_does(recorded):
    model, reference = recorded
    plain = dataclasses.replace(model, swiftkv=None)
    np.testing.assert_array_equal(
        skv.logits(plain, tokens_of(reference)),
        skv.logits(model, tokens_of(reference), swiftkv=False),
    )
    with pytest.raises(ValueError, match="swiftkv=True, but this model has no delta"):
        skv.logits(plain, tokens_of(reference), swiftkv=True)
    with pytest.raises(ValueError, match="no delta"):
        skv.generate(plain, [[1, 2]], max_tokens=1, swiftkv=True)


def test_tokens_may_be_lists(recorded):
    model, reference = recorded
    tokens, mask = reference["input_ids"], reference["labels"] != -100
    np.testing.assert_array_equal(
        skv.logits(model, tokens.tolist()), skv.logits(model, tokens_of(reference))
    )
    loss, _ = skv.distill_loss(model, tokens.tolist(), mask.tolist())
    assert loss == skv.distill_loss(model, tokens_of(reference), jnp.asarray(mask))[0]


def test_arguments_of_the_wrong_kind_are_refused(recorded, tmp_path):
    model, _ = recorded
    for tokens in ([1, 2], [[1.5]], 3):
        with pytest.raises(skv.UsageError, match="`tokens` must be rows of token ids"):
            skv.logits(model, tokens)  # pyright: ignore[reportArgumentType]
    for call in (
        lambda: skv.generate("a/path", "text", max_tokens=1),  # type: ignore[arg-type]
        lambda: skv.chat("a/path", [], max_tokens=1),  # type: ignore[arg-type]
        lambda: skv.logits("a/path", [[1]]),  # type: ignore[arg-type]
        lambda: skv.distill_loss("a/path", [[1]], [[1]]),  # type: ignore[arg-type]
        lambda: skv.save("a/path", tmp_path / "a"),  # type: ignore[arg-type]
        lambda: skv.save_hf("a/path", tmp_path / "a"),  # type: ignore[arg-type]
        lambda: skv.add_swiftkv("a/path", 4),  # type: ignore[arg-type]
        lambda: Engine.from_model("a/path"),  # type: ignore[arg-type]
    ):
        with pytest.raises(skv.UsageError, match="`model` must be a Model, as .*load.*got str"):
            call()
    for options in ({}, {"max_model_len": 8}):
        with pytest.raises(skv.UsageError, match="`options` must be EngineOptions, got dict"):
            Engine.from_model(model, options)  # type: ignore[arg-type]
    with pytest.raises(skv.UsageError, match="`num_key_value_layers`='4' must be a whole number"):
        skv.add_swiftkv(model, "4")  # type: ignore[arg-type]
    for call in (
        lambda: skv.load(demo.LLAMA, mesh="1x1"),  # type: ignore[arg-type]
        lambda: skv.generate(model, [1], max_tokens=1, mesh="1x1"),  # type: ignore[arg-type]
        lambda: Engine.from_model(model, mesh="1x1"),  # type: ignore[arg-type]
    ):
        with pytest.raises(skv.UsageError, match="`mesh` must be a Mesh, as make_mesh .*got str"):
            call()


def test_tokens_that_the_model_cannot_take_are_refused(recorded):
    model, _ = recorded
    vocab_size, positions = model.config.vocab_size, model.config.max_position_embeddings
    for tokens, message in (
        ([[1, vocab_size]], f"`tokens`: token id {vocab_size} is outside the vocabulary"),
        (np.asarray([[-1]]), "`tokens`: token id -1 is outside"),
        ([[1] * (positions + 1)], f"rows of {positions + 1} tokens; the model has {positions} pos"),
        ([[1, 2], [3]], "`tokens` must be rows of token ids, .*all rows of one length"),
        ("text", "`tokens` must be rows of token ids"),
        ([["text"]], "`tokens` must be rows of token ids"),
        ([[2**40]], "`tokens`"),
    ):
        with pytest.raises(skv.UsageError, match=message):
            skv.logits(model, tokens)  # type: ignore[arg-type]
        with pytest.raises(skv.UsageError, match=message):
            skv.distill_loss(model, tokens, [[1.0]])  # type: ignore[arg-type]
    for mask, message in (
        ([[1.0]], r"shape of `tokens`, \(1, 2\), got \(1, 1\)"),
        (1.0, r"got \(\)"),
        ([[1.0], [1.0, 1.0]], "`loss_mask` must be rows of numbers"),
    ):
        with pytest.raises(skv.UsageError, match=message):
            skv.distill_loss(model, [[1, 2]], mask)  # type: ignore[arg-type]
    traced = jax.jit(lambda tokens: skv.logits(model, tokens))(jnp.asarray([[1, 2]]))
    np.testing.assert_allclose(traced, skv.logits(model, [[1, 2]]), atol=1e-5)


def test_what_is_no_mesh_is_refused():
    with pytest.raises(skv.UsageError, match="expected DATAxMODEL"):
        skv.make_mesh("two by one")
    shapes = [(0, 1), (-2, 1), (-1, -1), (1, 1, 5), (1,), 2, None, (1.0, 1), (True, 1)]
    for shape in [*shapes, MeshShape(fsdp=0), MeshShape(-1, -1)]:
        with pytest.raises(skv.UsageError, match="`mesh`=.*expected a text.*or a pair"):
            skv.make_mesh(shape)  # type: ignore[arg-type]
    assert skv.make_mesh((-1, 8)).size == 8


def test_a_mesh_may_be_written_as_a_text():
    mesh = skv.make_mesh("2x4")
    assert mesh == skv.make_mesh((2, 4))
    assert dict(mesh.shape) == {"data": 2, "fsdp": 1, "model": 4}


def test_everything_public_is_documented():
    for name in skv.__all__:
        assert getattr(skv, name).__doc__, name


def test_the_demos_tokenizer_has_a_class_that_transformers_4_knows():
    for folder in (demo.LLAMA, demo.SWIFTKV):
        settings = json.loads((folder / "tokenizer_config.json").read_text())
        assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
        assert load_tokenizer(folder, read_auxiliary_files(folder)[1]).encode("def f") == [
            0,
            315,
            287,
        ]


def test_the_demos_index_names_the_file_of_each_tensor():
    """The student's folder holds only what was trained."""
    index = json.loads((demo.SWIFTKV / "model.safetensors.index.json").read_text())
    names = {"../llama/model.safetensors", "swiftkv.safetensors"}
    headers = {name: read_header(demo.SWIFTKV / name)[0] for name in names}
    stored = {tensor.name: name for name, tensors in headers.items() for tensor in tensors}
    assert index["weight_map"] == stored
    assert all("swiftkv" in tensor.name for tensor in headers["swiftkv.safetensors"])
