"""What a notebook prints for the objects of the public API: a line, from shapes alone."""

import jax
import pytest

import swiftkv_jax as skv
from swiftkv_jax import demo, nnx
from tests.infer.mock_model_runner import mock_engine


@pytest.fixture(scope="module")
def model() -> skv.Model:
    return skv.load(demo.SWIFTKV)


def test_a_model(model):
    line = "Model(llama, 8 layers, SwiftKV K=4 g=1, float32, 2.4M parameters)"
    assert repr(model) == line
    assert repr(nnx.LlamaForCausalLM(model)) == f"LlamaForCausalLM({line})"
    assert repr(skv.load(demo.LLAMA)) == "Model(llama, 8 layers, float32, 2.2M parameters)"


def test_a_quantized_model():
    model = skv.load(demo.SWIFTKV, quantization="int8", dtype="bfloat16")
    line = "Model(llama, 8 layers, SwiftKV K=4 g=1, bfloat16, int8, 2.4M parameters)"
    assert repr(model) == line


def test_an_engine():
    engine, _ = mock_engine(num_pages=64, slots=4, max_model_len=64)
    assert repr(engine) == "Engine(llama, 4 sequences of 64 tokens, 64 pages)"


def test_its_weights(model):
    llama = sum(leaf.size for leaf in jax.tree.leaves(model.llama))
    assert repr(model.llama) == f"Llama(20 arrays, {llama:,} entries)"
    assert repr(model.swiftkv) == "SwiftKV(4 arrays, 131,200 entries)"


def test_nothing_is_read(model):
    """Shapes without arrays, arrays that are traced, and trees without leaves."""
    line = repr(model)
    assert repr(jax.eval_shape(lambda: model)) == line
    seen = []
    jax.make_jaxpr(lambda one: seen.append(repr(one)))(model)
    assert seen == [line]
    empty = jax.tree.map(lambda leaf: None, model)
    assert repr(empty).endswith("no arrays, 0 parameters)")
