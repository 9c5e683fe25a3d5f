"""The oracle agrees with the outputs recorded from the authors' model, and with itself when it
skips prefill."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests import oracle

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = ["llama-init-4of8-group1", "llama-trained-4of8-group2-tied"]


@pytest.fixture(scope="module", params=NAMES)
def recorded(request: pytest.FixtureRequest):
    directory = FIXTURES / request.param
    config = json.loads((directory / "config.json").read_text())
    reference = load_file(FIXTURES / f"{request.param}.reference.safetensors")
    tensors = load_file(directory / "model.safetensors")
    teacher, student = (
        oracle.forward_batch(config, tensors, reference["input_ids"], swiftkv=on)
        for on in (False, True)
    )
    return config, tensors, reference, teacher, student


def test_recorded_outputs(recorded):
    _, _, reference, teacher, student = recorded
    for name, outputs in ("teacher", teacher), ("swiftkv", student):
        np.testing.assert_allclose(outputs.logits, reference[f"{name}_logits"], atol=1e-5)
        np.testing.assert_allclose(
            outputs.hidden_states[-2], reference[f"{name}_hidden_m2"], atol=1e-5
        )


def test_recorded_losses(recorded):
    """The authors mask with un-shifted labels (3.2)."""
    _, _, reference, teacher, student = recorded
    loss, logits_loss, hidden_loss = oracle.distill_loss(
        teacher, student, reference["labels"] != -100
    )
    np.testing.assert_allclose(logits_loss, reference["logits_loss"][0], rtol=1e-5)
    np.testing.assert_allclose(hidden_loss, reference["hidden_loss"][0], rtol=1e-5)
    assert loss == pytest.approx(logits_loss + hidden_loss)


def test_recorded_greedy_tokens(recorded):
    """Greedy continuation of the recorded prompts: the first new token at least is the argmax at
    the last position."""
    _, _, reference, teacher, student = recorded
    for name, outputs in ("teacher", teacher), ("swiftkv", student):
        np.testing.assert_array_equal(
            outputs.logits[:, -1].argmax(-1), reference[f"{name}_greedy"][:, 0]
        )


def test_init_fixture_has_the_initial_delta():
    directory = FIXTURES / NAMES[0]
    config, tensors = (
        json.loads((directory / "config.json").read_text()),
        load_file(directory / "model.safetensors"),
    )
    delta = oracle.initial_delta(config, tensors)
    assert set(delta) == {name for name in tensors if "_swiftkv" in name}
    for name, value in delta.items():
        np.testing.assert_array_equal(value, tensors[name], err_msg=name)


@pytest.mark.parametrize("num_skipped", [0, 1, 23])
def test_prefill_skip_is_exact(recorded, num_skipped):
    """1.4: upper keys and values depend on the input of layer K alone, so prompt tokens may stop
    there, with K + (L-K)/g caches."""
    config, tensors, reference, _, student = recorded
    logits, num_caches = oracle.skip_then_decode(
        config, tensors, reference["input_ids"][0], num_skipped
    )
    np.testing.assert_allclose(logits, student.logits[0, num_skipped:], atol=1e-12)
    assert num_caches == 4 + 4 // config["key_value_group_size"]
