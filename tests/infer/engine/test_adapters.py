"""Adapters beside the weights: answers are those of the models that they are merged into, those of
upper layers share one prefix cache, and they come and go without a compilation."""

import dataclasses
import gc
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import swiftkv_jax as skv
from swiftkv_jax.errors import CheckpointError, UsageError
from swiftkv_jax.infer.engine.engine import Engine
from swiftkv_jax.infer.engine.options import SpeculativeConfig
from swiftkv_jax.infer.engine.requests import Request, ScoreRequest
from swiftkv_jax.infer.engine.sampling_params import SamplingParams
from swiftkv_jax.infer.runner.adapters import check_adapters
from swiftkv_jax.infer.runner.build import build_model_runner
from swiftkv_jax.infer.runner.serving_form import num_bytes
from tests import tiny
from tests.checkpoints.test_adapters import adapter
from tests.infer.engine.mock_requests import check_empty, drain
from tests.infer.engine.own_kv_engines import run
from tests.infer.engine.test_engine import LENGTH, model, options
from tests.infer.mock_model_runner import continuation, mock_engine
from tests.test_boundary import model_of

ALL = ["self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
KV = ["self_attn.k_proj", "self_attn.v_proj"]
STUDENTS_KV = [f"{module}_swiftkv" for module in KV]
"""Of the first upper layer, whose group has both."""
MADE: list[tuple[list[str], list[str], dict[str, Any]]] = [
    ([], ALL, {"rank": 4}),
    ([], ["self_attn.q_proj"], {}),
    ([], ["self_attn.q_proj", "self_attn.q_proj_swiftkv"], {"rank": 1}),
    ([], ["self_attn.o_proj"], {"rank": 3}),
    ([*ALL, *KV, *STUDENTS_KV], ALL, {"rank": 4}),
    (STUDENTS_KV[:1], [], {}),
    (KV, [], {"rank": 3}),
    (ALL[2:], [], {"use_rslora": True, "alpha_pattern": {"up_proj": 1}}),
]
"""Modules of an adapter, of lower layers or the student's keys and values, and of each upper layer,
and its other fields."""
TENANTS = [f"tenant-{number}" for number in range(len(MADE))]
UPPER, LOWER = TENANTS[:4], TENANTS[4:]
"""Those that share the model's prefix cache, and those that do not."""
Answer = tuple[list[int], list[float]]
"""Tokens, and their log-probabilities."""
DOCUMENT = np.random.default_rng(0).integers(61, size=41).tolist()
"""Ten pages of four, and the token that is decoded first."""


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """Three layers, one of them lower."""
    path = tmp_path_factory.mktemp("base") / "model"
    skv.save_hf(model(), path)
    return path


@pytest.fixture(scope="module")
def folders(base, tmp_path_factory) -> dict[str, Path]:
    path = tmp_path_factory.mktemp("adapters")
    found = {}
    for seed, (name, (lower, upper, fields)) in enumerate(zip(TENANTS, MADE, strict=True)):
        modules = [f"{1 if one in STUDENTS_KV else 0}.{one}" for one in lower]
        modules += [f"{layer}.{one}" for layer in (1, 2) for one in upper]
        sizes = {f"model.layers.{module}": 0.2 for module in modules}
        found[name] = adapter(path / name, sizes, base, seed=seed, **fields)
    return found


def engine_with(**fields: Any) -> Engine:
    """With a program for the first token of a prompt that is alone, as on a GPU."""
    chosen = options(max_num_seqs=9, chunks=(16,), decode_rows=(1, 9), **fields)
    runner = build_model_runner(model(), chosen)
    first = chosen.speculative is None
    runner.shapes = dataclasses.replace(runner.shapes, first_tokens=first)
    return Engine(runner, config=runner.config, eos_token_ids=(), options=chosen)


@pytest.fixture(scope="module")
def engine(folders) -> Engine:
    found = engine_with(enable_lora=True, max_loras=8, max_lora_rank=4)
    for name, path in folders.items():
        found.adapters.load(name, path)
    return found


class Oracle:
    """Log-probabilities by whole forward passes of the merged models."""

    def __init__(self, base: Path, folders: dict[str, Path]):
        self._models = {"": model()}
        self._models |= {name: skv.load(base, adapter=path) for name, path in folders.items()}

    def check(self, name: str, tokens, start: int, found: Answer, *, greedy: bool = True) -> None:
        """`found` are those from `start` on; with `greedy` each is the likeliest."""
        padded = np.zeros((1, LENGTH), np.int32)
        padded[0, : len(tokens)] = tokens
        logits = skv.logits(self._models[name], padded)[0, start - 1 : len(tokens) - 1]
        every = np.asarray(jax.nn.log_softmax(logits))
        expected = every[np.arange(len(every)), tokens[start:]]
        np.testing.assert_allclose(found[1], expected, atol=1e-4)
        if greedy:
            np.testing.assert_allclose(expected, every.max(-1), atol=1e-4)

    def check_answer(self, request: Request, found: Answer) -> None:
        tokens, greedy = [*request.prompt, *found[0]], not request.params.temperature
        assert len(found[0]) == request.params.max_tokens
        self.check(request.adapter, tokens, len(request.prompt), found, greedy=greedy)


@pytest.fixture(scope="module")
def oracle(base, folders) -> Oracle:
    return Oracle(base, folders)


def ask(name: str, prompt: Sequence[int] = DOCUMENT, **fields: Any) -> Request:
    params = SamplingParams(**{"max_tokens": 7, "ignore_eos": True, "logprobs": 0} | fields)
    return Request(prompt, params, adapter=name)


def assert_same(found: Answer, expected: Answer) -> None:
    assert found[0] == expected[0]
    np.testing.assert_allclose(found[1], expected[1], atol=1e-4)


def test_eight_tenants_read_one_document(engine, oracle):
    """It is prefilled once for those of upper layers and for requests without an adapter, and once
    for each of the others; half of the answers are draws."""
    engine.reset_stats()
    requests = [
        ask(name, temperature=number % 2, seed=number) for number, name in enumerate([*TENANTS, ""])
    ]
    found = run(engine, requests[:1]) + run(engine, requests[1:])
    assert engine.prefix_stats.hits == 4 * 40 and engine.stats.prefilled_tokens == 5 * 40
    for request, answer in zip(requests, found, strict=True):
        oracle.check_answer(request, answer)
    assert len({tuple(logprobs) for _, logprobs in found}) == 9
    # What one has answered is in the cache for all that share it.
    for number, name in (0, UPPER[3]), (4, LOWER[0]):
        longer = ask(name, [*DOCUMENT, *found[number][0]])
        engine.reset_stats()
        oracle.check_answer(longer, run(engine, [longer])[0])
        assert engine.prefix_stats.hits == 44
    assert engine.stats.compilations == 0


def test_prompts_in_one_chunk(engine, oracle):
    """Of five adapters, with tokens that begin alike."""
    requests = [ask(name, DOCUMENT[20:23], max_tokens=2) for name in ("", *LOWER)]
    engine.reset_stats()
    for request, answer in zip(requests, run(engine, requests), strict=True):
        oracle.check_answer(request, answer)
    assert engine.stats.chunks == 1


def test_rows_of_the_model_are_those_of_an_engine_without_adapters(engine):
    """To the bit. The places for adapters are in the memory plan."""
    plain = engine_with(scoring=False)
    requests = [ask("", DOCUMENT[at : at + 20], temperature=at % 2, seed=1) for at in range(5)]
    others = [ask(name, DOCUMENT[:9]) for name in LOWER]
    assert run(engine, [*requests, *others])[:5] == run(plain, requests)
    places = num_bytes(engine.model_runner.weights.adapters)
    plans = [one.model_runner.plan.weights for one in (engine, plain)]
    assert plans[0] - plans[1] == places > 0


def test_pages_are_found_by_the_bytes_of_an_adapter(engine, folders):
    """Not by its name."""
    name, other = LOWER[:2]
    prompt = DOCUMENT[7:28]

    def hits(read: str) -> int:
        engine.reset_stats()
        run(engine, [ask(read, prompt)])
        return engine.prefix_stats.hits

    assert [hits(one) for one in ("", name, name, UPPER[0])] == [0, 0, 20, 20]
    for source, expected in ((UPPER[2], 20), (LOWER[2], 0), (name, 20)):
        engine.adapters.unload(name)
        engine.adapters.load(name, folders[source])
        assert hits(name) == expected
    assert hits(other) == 0
    with pytest.raises(UsageError, match="'none' is not loaded"):
        engine.adapters.prompt_digest("none")


def test_scores(engine, oracle):
    """Of two texts in one chunk."""
    requests = [ScoreRequest(DOCUMENT[at : at + 7], 2, adapter=TENANTS[at]) for at in (0, 4)]
    for request, found in zip(requests, run(engine, requests), strict=True):
        oracle.check(request.adapter, request.tokens, 2, found, greedy=False)


@pytest.mark.long
def test_drafts(engine, folders):
    """Predictions of the answers are accepted in rows of different adapters."""
    names = ["", *UPPER[:2], *LOWER[:2]]
    requests = [ask(name, DOCUMENT[:9], max_tokens=20) for name in names]
    expected = run(engine, requests)
    always = SpeculativeConfig(enable_adaptive_verification=False)
    drafting = engine_with(enable_lora=True, max_lora_rank=4, speculative=always)
    for name in names[1:]:
        drafting.adapters.load(name, folders[name])
    predicted = [
        dataclasses.replace(request, prediction=answer[0])
        for request, answer in zip(requests, expected, strict=True)
    ]
    for found, answer in zip(run(drafting, predicted), expected, strict=True):
        assert_same(found, answer)
    assert drafting.stats.speculation.accepted_tokens > 50


def test_a_name_is_given_to_another_adapter_while_requests_run(engine, folders):
    """The request goes on with the one that it was queued with, and its place is not given away
    before it has ended."""
    first, second = TENANTS[0], TENANTS[3]
    expected = run(engine, [ask(first), ask(second)])
    engine.adapters.unload(second)
    running, tokens = engine.add_request(ask(first)), []
    for _ in range(2):
        tokens += [token for output in engine.step() for token in output.token_ids]
    engine.adapters.unload(first)
    with pytest.raises(UsageError, match="'tenant-0' is not loaded"):
        engine.add_request(ask(first))
    engine.adapters.load(first, folders[second])
    with pytest.raises(UsageError, match="all 8 places for adapters are in use: unload one and"):
        engine.adapters.load(second, folders[second])
    changed = engine.add_request(ask(first))
    outputs = {running: tokens, changed: []}
    for output in drain(engine):
        outputs[output.request_id] += output.token_ids
    assert [outputs[running], outputs[changed]] == [tokens for tokens, _ in expected]
    engine.adapters.unload(first)
    for name in (first, second):
        engine.adapters.load(name, folders[name])
    assert_same(run(engine, [ask(second)])[0], expected[1])
    assert sorted(engine.adapters.names) == sorted(TENANTS)
    check_empty(engine)


def test_loading_compiles_nothing_and_leaks_nothing(engine, folders, compilations):
    """In one place, the smaller after the larger: nothing of it stays."""
    small, large = LOWER[1], LOWER[0]
    expected = run(engine, [ask(small)])
    read = [engine.adapters.read(folders[name]) for name in (large, small)]
    gc.collect()
    before = len(jax.live_arrays())
    for one in read * 50:
        engine.adapters.unload(small)
        engine.adapters.insert(small, one)
    gc.collect()
    assert len(jax.live_arrays()) == before
    assert_same(run(engine, [ask(small)])[0], expected[0])
    assert not compilations


def test_weights_are_updated_below_adapters(engine, base, folders):
    """Those of the model itself change, the adapters stay."""
    before = run(engine, [ask(TENANTS[0]), ask("")])
    engine.update_weights(skv.load(base, adapter=folders[TENANTS[0]]))
    assert_same(run(engine, [ask("")])[0], before[0])
    engine.update_weights(skv.load(base))
    assert_same(run(engine, [ask(TENANTS[0])])[0], before[0])


@pytest.mark.parametrize("names", [("10", "20"), ("110", "120")])
def test_a_place_is_kept_for_a_request_that_waits_again(names):
    """The pages suffice for one of two; the one that was preempted ends with its adapter, unloaded
    meanwhile. The second two do not share pages of their prompts."""
    engine, _ = mock_engine(num_pages=14, reserve_tokens=4, num_adapters=2)
    for name in names:
        engine.adapters.load(name, Path(name))
    params, prompt = SamplingParams(max_tokens=30, ignore_eos=True), [*range(5, 15)]
    ids = {engine.add_request(Request(prompt, params, adapter=name)): name for name in names}
    outputs: dict[int, list[int]] = {number: [] for number in ids}
    while not engine.stats.preemptions:
        for output in engine.step():
            outputs[output.request_id] += output.token_ids
    engine.adapters.unload(names[1])
    with pytest.raises(UsageError, match="all 2 places"):
        engine.adapters.load("30", Path("30"))
    for output in drain(engine):
        outputs[output.request_id] += output.token_ids
    for number, name in ids.items():
        assert outputs[number] == continuation(prompt, 30, int(name), ends=False)
    engine.adapters.load("30", Path("30"))


def test_what_an_engine_refuses(engine, base, folders, tmp_path):
    for load, text in [
        (lambda: engine.adapters.load(TENANTS[0], folders[TENANTS[0]]), "is loaded already"),
        (lambda: engine.adapters.load("", folders[TENANTS[0]]), "'' is not the name of an"),
        (lambda: engine.adapters.unload("other"), "'other' is not loaded"),
        (lambda: mock_engine()[0].adapters.load("1", Path("1")), "takes no adapters"),
        (lambda: mock_engine()[0].adapters.read(Path("1")), "takes no adapters"),
    ]:
        with pytest.raises(UsageError, match=text):
            load()
    names = engine.adapters.names
    teachers = adapter(tmp_path / "a", {"model.layers.1.self_attn.k_proj": 1}, base)
    engine.adapters.unload(TENANTS[0])
    with pytest.raises(CheckpointError, match="merge the adapter into the teacher, calibrate"):
        engine.adapters.load("teacher's", teachers)
    engine.adapters.load(TENANTS[0], folders[TENANTS[0]])
    assert sorted(engine.adapters.names) == sorted(names)


def test_what_is_refused_at_the_start():
    with pytest.raises(UsageError, match="`lora_upper_only` needs `enable_lora`"):
        options(lora_upper_only=True)
    upper_only = options(enable_lora=True, lora_upper_only=True)
    with pytest.raises(UsageError, match="for the upper layers of SwiftKV, and this model runs"):
        build_model_runner(model(), upper_only, swiftkv=False)
    config = model().config
    several: Any = types.SimpleNamespace(is_multi_process=True)
    with pytest.raises(UsageError, match="one process; one adapter can be merged at load"):
        check_adapters(config, config, upper_only, several)
    hf = tiny.hf_config(key_value_group_size=2, shared_kv_heads=[[1, 0]] * 4)
    with pytest.raises(UsageError, match="mix shared values"):
        build_model_runner(tiny.model_of(hf, tiny.tensors_for(hf)), options(enable_lora=True))
    config, llama, delta = model_of(1, 0, 1)
    with pytest.raises(UsageError, match="prompt attention layers: prompts run those; leave it"):
        build_model_runner(skv.Model(llama, delta, config), upper_only)
