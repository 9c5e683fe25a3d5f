"""Speculators against float64 NumPy, written from the definition, on files in the published
layouts with random weights."""

import dataclasses
import json
import math
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from swiftkv_jax.checkpoints.speculators import read_speculator, write_speculator
from swiftkv_jax.errors import CheckpointError, ConfigError, DivergenceError
from swiftkv_jax.model.batch import unpacked_batch
from swiftkv_jax.model.mesh import make_mesh
from swiftkv_jax.model.params import Llama
from swiftkv_jax.model.speculator import (
    advance,
    draft_tokens,
    first_state,
    speculator_logits,
    speculator_shapes,
)
from swiftkv_jax.model.speculator_config import SpeculatorConfig
from swiftkv_jax.train.recipe import DEMO
from swiftkv_jax.train.run import speculator as training

V, D, INNER, N = 61, 32, 24, 3
ARCTIC = {
    "model_type": "mlp_speculator",
    "architectures": ["MLPVariantSpeculatorPreTrainedModel"],
    "base_model_archs": ["LlamaForCausalLM"],
    "n_predict": N,
    "vocab_size": V,
    "input_hidden_dim": D,
    "inner_dim": str(INNER),
    "proj_dim": str(INNER),
    "emb_dim": str(INNER),
    "tie_weights": True,
    "tie_lstm_embs": True,
    "scale_input": True,
    "method": "sum_lstm",
    "torch_dtype": "bfloat16",
}
IBM = {
    "model_type": "mlp_speculator",
    "architectures": ["MLPSpeculatorPreTrainedModel"],
    "n_predict": N,
    "vocab_size": V,
    "emb_dim": D,
    "inner_dim": INNER,
    "n_candidates": 5,
    "top_k_tokens_per_head": [4, 3, 2],
    "tie_weights": False,
    "scale_input": False,
    "transformers_version": "4.38.2",
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "arctic lstm": ARCTIC,
    "arctic rnn": ARCTIC | {"method": "sum_rnn"},
    "ibm": IBM,
    "ibm tied": IBM | {"tie_weights": True, "scale_input": True},
    "ibm wide": IBM | {"inner_dim": 0},
}


def published(fields: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Every tensor that the published code makes for these fields, copies of tied ones too."""
    rng = np.random.default_rng(seed)
    inner = int(fields["inner_dim"]) or D
    is_lstm = fields.get("method") == "sum_lstm"

    def matrix(*shape: int) -> np.ndarray:
        return rng.normal(size=shape, scale=shape[1] ** -0.5).astype(np.float32)

    def norm(name: str) -> None:
        made[f"{name}.weight"] = rng.normal(1, 0.3, inner).astype(np.float32)
        made[f"{name}.bias"] = rng.normal(0, 0.3, inner).astype(np.float32)

    made: dict[str, np.ndarray] = {}
    if is_lstm:
        made["forget_emb.0.weight"] = matrix(V, inner) * 0.3
        for gate in ("input", "cell", "output"):
            made[f"{gate}_emb.0.weight"] = made["forget_emb.0.weight"]
        for gate in ("forget", "input", "output", "cell"):
            made[f"{gate}_proj.0.weight"] = matrix(inner, D)
            made[f"{gate}_proj.1.weight"] = matrix(inner, inner)
        norm("cell_ln.0")
        norm("state_ln.0")
        made["head.0.weight"] = matrix(V, inner)
        return made | {f"head.{i}.weight": made["head.0.weight"] for i in range(N)}
    end = ".0" if "input_hidden_dim" in fields else ""
    for i in range(N):
        first = fields["tie_weights"] and i > 0
        if first and end:  # its lists of modules end with the first, or the second
            if i == 1:
                made["proj.1.0.weight"] = matrix(inner, inner)
            made[f"head.{i}.weight"] = made["head.0.weight"]
            continue
        made[f"emb.{i}{end}.weight"] = made["emb.0.weight"] if first else 0.3 * matrix(V, inner)
        columns = D if i == 0 else inner
        tied = fields["tie_weights"] and i > 1
        made[f"proj.{i}{end}.weight"] = made["proj.1.weight"] if tied else matrix(inner, columns)
        made[f"head.{i}.weight"] = made["head.0.weight"] if first else matrix(V, inner)
        if first:
            made |= {f"ln.{i}.{part}": made[f"ln.0.{part}"] for part in ("weight", "bias")}
        else:
            norm(f"ln.{i}{end}")
    return made


def write(path: Path, fields: dict[str, Any], tensors: dict[str, np.ndarray], prefix="") -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(fields))
    copies = {prefix + name: tensor.copy() for name, tensor in tensors.items()}
    save_file(copies, path / "model.safetensors")
    return path


def oracle(fields, tensors, hidden, token) -> tuple[list[int], list[np.ndarray]]:
    """(the drafts after `token`, the logits of each), in float64, for one state f64[D]."""
    w = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}
    inner = int(fields["inner_dim"]) or D
    s = 2.0 ** (-1 / (2 * N))
    a = math.sqrt((1 - s * s) * inner / 2) / s

    def rms(x):
        return x / np.sqrt(np.mean(x * x) + 1e-6)

    def gelu(x):
        return x * (1 + np.array([math.erf(one / math.sqrt(2)) for one in x])) / 2

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    def norm(name, x):
        return w[f"{name}.weight"] * rms(x) + w[f"{name}.bias"]

    h, c = hidden.astype(np.float64), np.zeros(inner)
    if fields["scale_input"]:
        h = rms(h) / math.sqrt(2)
    drafts, logits = [], []
    for i in range(N):
        if fields.get("method") == "sum_lstm":
            z = a * w["forget_emb.0.weight"][token]
            gates = {
                gate: w[f"{gate}_proj.{min(i, 1)}.weight"] @ h + z
                for gate in ("forget", "input", "output", "cell")
            }
            c = c * sigmoid(gates["forget"])
            c += gelu(norm("cell_ln.0", gates["cell"])) * sigmoid(gates["input"])
            h = gelu(norm("state_ln.0", c)) * sigmoid(gates["output"])
        else:
            end = ".0" if "input_hidden_dim" in fields else ""
            own = 0 if fields["tie_weights"] else i
            second = min(i, 1) if fields["tie_weights"] else i
            z = a * w[f"emb.{own}{end}.weight"][token]
            h = gelu(norm(f"ln.{own}{end}", w[f"proj.{second}{end}.weight"] @ h + z))
        logits.append(w[f"head.{i}.weight"] @ h)
        token = int(logits[-1].argmax())
        drafts.append(token)
    return drafts, logits


@pytest.mark.parametrize("layout", LAYOUTS)
def test_drafts_are_those_of_the_definition(layout, tmp_path):
    fields = LAYOUTS[layout]
    tensors = published(fields)
    prefix = "speculator." if "arctic" in layout else ""
    found = read_speculator(write(tmp_path / "head", fields, tensors, prefix), np.float32)
    rng = np.random.default_rng(1)
    hidden = (3 * rng.normal(size=(8, D))).astype(np.float32)
    tokens = rng.integers(0, V, 8).astype(np.int32)
    drafts = np.asarray(draft_tokens(found, jnp.asarray(hidden), jnp.asarray(tokens), N))
    expected = [oracle(fields, tensors, *row) for row in zip(hidden, tokens, strict=True)]
    assert drafts.tolist() == [row for row, _ in expected]
    state = first_state(found, jnp.asarray(hidden))
    for step, given in enumerate([tokens, *drafts.T[:-1]]):
        state = advance(found, step, state, jnp.asarray(given))
        found_logits = speculator_logits(found, step, state)
        wanted = np.stack([logits[step] for _, logits in expected])
        np.testing.assert_allclose(found_logits, wanted, atol=2e-5)


def test_a_written_speculator_is_read_again(tmp_path):
    found = read_speculator(write(tmp_path / "head", ARCTIC, published(ARCTIC)), np.float32)
    write_speculator(found, tmp_path / "again")
    again = read_speculator(tmp_path / "again", np.float32)
    assert again.config == found.config
    for one, other in zip(found.proj, again.proj, strict=True):
        np.testing.assert_array_equal(one, other)
    rows = [(np.zeros(D, np.float32) + row, row) for row in range(4)]
    fields = json.loads((tmp_path / "again" / "config.json").read_text())
    assert {name: fields[name] for name in ("inner_dim", "emb_dim", "proj_dim")} == dict.fromkeys(
        ("inner_dim", "emb_dim", "proj_dim"), str(INNER)
    )
    for hidden, token in rows:
        drafts = draft_tokens(again, jnp.asarray(hidden[None]), jnp.array([token]), N)
        assert drafts[0].tolist() == oracle(ARCTIC, published(ARCTIC), hidden, token)[0]


def test_a_head_of_one_token_has_matrices_of_a_second_step(tmp_path):
    """In ArcticTraining's files, which do not use them. What is written has the fields that vLLM
    wants as long as the drafts."""
    fields = ARCTIC | {"n_predict": 1, "_name_or_path": "x", "base_model_arch": "llama"}
    found = read_speculator(write(tmp_path / "head", fields, published(ARCTIC)), np.float32)
    write_speculator(found, tmp_path / "again")
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert (written["n_candidates"], written["top_k_tokens_per_head"]) == (1, [1])
    assert read_speculator(tmp_path / "again", np.float32).config == found.config


def test_a_head_that_is_not_finite_is_not_returned(monkeypatch):
    config = SpeculatorConfig("sum_lstm", 2, V, hidden_dim=D, inner_dim=INNER)
    shapes = speculator_shapes(config, jnp.float32)
    head = jax.tree.map(lambda leaf: jnp.ones(leaf.shape), shapes)
    nothing: Any = None
    llama = Llama(jnp.zeros(()), nothing, nothing, nothing, None, None)
    model: Any = types.SimpleNamespace(config=None, dtype=jnp.float32, llama=llama, swiftkv=None)
    batch = jax.tree.map(np.asarray, unpacked_batch(jnp.zeros((2, 4), jnp.int32)))
    local = types.SimpleNamespace(batch=batch)

    def sums(recipe, config, mesh, speculator, *rest):
        return training.Sums(jnp.nan * speculator.head[0].sum(), jnp.zeros(2), jnp.ones(2))

    monkeypatch.setattr(training, "_sums_of_student", sums)
    monkeypatch.setattr(training, "own_tail", lambda config: 0)
    monkeypatch.setattr(training, "batches", lambda *args, **fields: (one for one in [local] * 3))
    recipe = dataclasses.replace(DEMO, batch_size=2, speculator=2, speculator_steps=3)
    data: Any = None
    with pytest.raises(DivergenceError, match="speculator step 1: loss nan, and its weights"):
        training._fit(recipe, head, model, data, make_mesh((1, 1)))


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"architectures": ["Eagle3Speculator"]}, "'Eagle3Speculator' attends to hidden states of"),
        ({"speculators_model_type": "eagle3"}, "'eagle3' attends to hidden states of the prompt"),
        ({"model_type": "deepseek_mtp"}, "'deepseek_mtp' attends to hidden states of the prompt"),
        ({"architectures": ["MedusaModel"]}, "'MedusaModel' is not supported: its drafts"),
        ({"model_type": "llama"}, "model_type='llama' is no speculator"),
        ({"architectures": 7}, "architectures=7 must be a list"),
        ({"method": ["sum_rnn"]}, "method=['sum_rnn'] must be a string"),
        ({"method": "sum_gru"}, "method='sum_gru' is not supported: sum_rnn, sum_lstm are"),
        ({"inner_dim": "24.48"}, "inner_dim='24.48' is not supported: one size is"),
        ({"emb_dim": "25"}, "inner_dim=24 and emb_dim=25 say the same and differ"),
        ({"tie_lstm_embs": False}, "tie_lstm_embs=False: sum_lstm needs it"),
        ({"n_predict": 0}, "n_predict is missing"),
        ({"rope_theta": 1.0}, "unknown field 'rope_theta'"),
    ],
)
def test_other_configs_are_refused_by_name(changed, message, tmp_path):
    path = write(tmp_path / "head", ARCTIC | changed, {})
    with pytest.raises(ConfigError, match="config.json") as error:
        read_speculator(path, np.float32)
    assert message in str(error.value)


def test_other_tensors_are_refused_by_name(tmp_path):
    tensors = published(ARCTIC)
    extra = {"head.0.bias": np.zeros(V, np.float32)}
    cases = (
        ({name: one for name, one in tensors.items() if "cell_ln" not in name}, "missing: cell_ln"),
        (
            tensors | {"cell_proj.1.weight": np.zeros((INNER, D), np.float32)},
            "wrong shape: cell_proj.1",
        ),
        (tensors | extra, "unexpected: head.0.bias"),
        (tensors | {"head.2.weight": tensors["head.1.weight"] + 1}, "that differ: head.2.weight"),
        (
            tensors | {f"head.{i}.weight": np.zeros((V, INNER)) for i in range(2)},
            "dtype not supported yet: head.0.weight F64",
        ),
        (
            tensors | {f"head.{i}.weight": np.zeros((), np.float32) for i in range(3)},
            "wrong shape: head.0.weight",
        ),
    )
    for number, (changed, message) in enumerate(cases):
        path = write(tmp_path / str(number), ARCTIC, changed)
        with pytest.raises(CheckpointError) as error:
            read_speculator(path, np.float32)
        assert message in str(error.value)
    path = write(tmp_path / "pickle", ARCTIC, tensors)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"run code; .* converts it: python -c 'import sys"):
        read_speculator(path, np.float32)
