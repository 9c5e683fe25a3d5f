"""Pages in host memory: their bytes, what is loaded is what was saved, and their fingerprint."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swiftkv_jax.infer.runner import host_pages
from swiftkv_jax.infer.runner.build import build_model_runner
from swiftkv_jax.infer.runner.host_pages import fingerprint, host_page, load_pages, save_pages
from swiftkv_jax.infer.runner.layout import Layout
from swiftkv_jax.infer.runner.memory import bytes_per_device
from swiftkv_jax.model.cache import cache_shapes
from swiftkv_jax.plan.presets import LLAMA_8B, LLAMA_70B
from tests.infer.engine.test_disk_tier import model as grouped
from tests.infer.engine.test_engine import model, small


@pytest.mark.parametrize("format", ["float32", "int8"])
def test_pages_come_back_bit_by_bit(format):
    """Keys, values and scales of each layer, into other pages; no other page changes."""
    config = model().config
    shapes = cache_shapes(config, 12, 4, jnp.dtype(format))
    rng = np.random.default_rng(0)

    def content(leaf):
        return jnp.asarray(rng.integers(-100, 100, leaf.shape), leaf.dtype)

    cache = jax.tree.map(content, shapes)
    cache = type(cache)(cache.k, cache.v, jnp.asarray(rng.normal(size=(12, 8))))
    source, target = jnp.array([1, 7, 4]), jnp.array([2, 0, 11])
    saved = save_pages(config, cache, source)
    assert len(saved) == 3
    other = jax.tree.map(lambda leaf: jnp.asarray(leaf + 1), cache)
    expected = jax.tree.map(lambda leaf: np.array(leaf), other)
    for old, new in zip(jax.tree.leaves(cache), jax.tree.leaves(expected), strict=True):
        new[target] = old[source]
    unread: Any = None
    found = load_pages(config, unread, other, target, unread, saved)
    for one, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(one, wanted)


@pytest.mark.parametrize(
    ("config", "full", "boundary"),
    [(LLAMA_8B, 128, 72), (LLAMA_8B.cut(16, 2), 96, 72), (LLAMA_70B, 320, 176)],
)
def test_bytes_of_a_page(config, full, boundary):
    """In KiB for each token, in bfloat16."""
    place = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    for state, size in ((False, full), (True, boundary)):
        layout = Layout(config, jnp.dtype(jnp.bfloat16), None, place, state)
        assert bytes_per_device(host_page(layout, 128)) == 128 * size * 1024
        assert layout.page_bytes(128) == 128 * (full * 1024 + state * 2 * config.embed_dim)


def test_what_pages_depend_on_is_in_their_fingerprint(monkeypatch):
    common = {"prefix_cache_host": 2**22}

    def fingerprint_of(seed: int = 0, **fields) -> bytes:
        options = small(**common | fields)
        runner = build_model_runner(grouped(seed), options)
        return fingerprint(runner.weights, runner.layout, options)

    found = [
        fingerprint_of(),
        fingerprint_of(1),
        fingerprint_of(page_size=8),
        fingerprint_of(kv_cache_dtype="fp8"),
        fingerprint_of(prefix_cache_form="boundary"),
        fingerprint_of(max_model_len=40),
    ]
    assert len({*found[:5]}) == 5 and found[5] == found[0] == fingerprint_of()
    monkeypatch.setattr(host_pages, "PAGE_FORMAT", 0)
    assert fingerprint_of() not in found
