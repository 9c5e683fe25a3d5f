"""Token ids, logits and greedy text of the GGUF files, against `references.json`: what transformers
computes in float32 from the same files, which it decodes itself (`record.py` writes it)."""

import dataclasses
import json
from pathlib import Path

import jax
import numpy as np
import pytest

import swiftkv_jax as skv
from examples.real_models import path_of

REFERENCES = json.loads((Path(__file__).parent / "references.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", REFERENCES)
def test_references(name):
    """Logits are compared at every eighth token, and their sum of exponentials at each; they are
    up to 50 in size."""
    model = skv.load(path_of(name), dtype="float32")
    endless = dataclasses.replace(model, eos_token_ids=())
    for expected in REFERENCES[name]:
        ids = expected["ids"]
        assert model.tokenizer.encode(expected["text"]) == ids
        with jax.default_matmul_precision("highest"):
            logits = np.asarray(skv.logits(model, np.array([ids])))[0]
            greedy = skv.generate(endless, ids, max_tokens=len(expected["greedy"]))
        sums = np.logaddexp.reduce(logits.astype(np.float64), axis=-1)
        np.testing.assert_allclose(sums, expected["logsumexp"], rtol=0, atol=5e-4)
        found = np.take_along_axis(logits[expected["positions"]], np.array(expected["top_ids"]), -1)
        np.testing.assert_allclose(found, expected["top_logits"], rtol=0, atol=5e-4)
        assert greedy == expected["greedy"]
