"""What /metrics says, against what clients saw; headers and the log."""

import json
import logging
import re
import time

import pytest
from prometheus_client.parser import text_string_to_metric_families

from swiftkv_jax.serve.service import load_log
from swiftkv_jax.serve.service.metrics import Histogram, RecentMaximum, token_buckets
from tests.serve.conftest import later
from tests.serve.process import ROOT

BODY = {"prompt": "hello", "max_tokens": 20, "ignore_eos": True}
# Upper bounds of their buckets in vLLM 0.33, `v1/metrics/loggers.py`.
FIRST = ".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
BETWEEN = ".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80"
WHOLE = ".3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
LENGTHS = "1 2 5 10 20 50 100 200"
BUCKETS = {
    "time_to_first_token_seconds": FIRST,
    "inter_token_latency_seconds": BETWEEN,
    "request_time_per_output_token_seconds": BETWEEN,
    "e2e_request_latency_seconds": WHOLE,
    "request_queue_time_seconds": WHOLE,
    "request_inference_time_seconds": WHOLE,
    "request_prefill_time_seconds": WHOLE,
    "request_decode_time_seconds": WHOLE,
    "request_prompt_tokens": LENGTHS,
    "request_prefill_kv_computed_tokens": LENGTHS,
    "request_generation_tokens": LENGTHS,
    "request_max_num_generation_tokens": LENGTHS,
    "request_params_max_tokens": LENGTHS,
    "request_params_n": "1 2 5 10 20",
    "iteration_tokens_total": "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384",
}
# Names that dashboards of vLLM ask for.
NAMES = (
    """
num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries
prefix_cache_hits prompt_tokens generation_tokens num_preemptions request_success
admission_rejections num_requests_waiting_by_reason prompt_tokens_cached cache_config_info
gpu_cache_usage_perc gpu_prefix_cache_queries gpu_prefix_cache_hits
""".split()
    + list(BUCKETS)
)


def families(running) -> dict:
    _, headers, content = running.request("GET", "/metrics")
    assert headers["content-type"].startswith("text/plain")
    return {one.name: one for one in text_string_to_metric_families(content.decode())}


def value(found: dict, name: str, sample: str = "", **labels: str) -> float:
    return sum(
        one.value
        for one in found[name].samples
        if one.name == name + sample and labels.items() <= one.labels.items()
    )


@pytest.fixture(scope="module")
def answered(start):
    """A server that has answered some requests."""
    running = start()
    for n, prompt in ((1, "hello"), (3, "hello"), (1, "x" * 40)):
        assert running.post("/v1/completions", BODY | {"n": n, "prompt": prompt})[0] == 200
    assert running.post("/v1/completions", BODY | {"prompt": ""})[0] == 400
    running.check_empty()
    return running


def test_the_names_are_those_of_vllm(answered):
    found = families(answered)
    assert {f"vllm:{name}" for name in NAMES} <= set(found)
    for name in NAMES:
        for sample in found[f"vllm:{name}"].samples:
            assert sample.labels["model_name"] == "tiny" and sample.labels["engine"] == "0"


def test_prompts_that_come_from_host_memory_count_as_cached(start):
    running = start(engine={"num_pages": 72, "host_pages": 200})
    prompts = ["abcd" * 25, "efgh" * 25, "ijkl" * 25]
    answers = [
        running.post("/v1/completions", BODY | {"prompt": prompt})
        for prompt in [*prompts, prompts[0]]
    ]
    assert [status for status, _ in answers] == [200] * 4
    cached = answers[-1][1]["usage"]["prompt_tokens_details"]["cached_tokens"]
    running.check_empty()
    found = families(running)
    hits = value(found, "vllm:external_prefix_cache_hits", "_total")
    assert 0 < hits <= cached == value(found, "vllm:prompt_tokens_cached", "_total")
    assert value(found, "vllm:prefix_cache_hits", "_total") == cached - hits
    assert value(found, "vllm:external_prefix_cache_queries", "_total") == 400 - cached + hits
    saved, loaded = (
        value(found, "swiftkv:tier_bytes", "_total", tier="host", direction=direction) / 8
        for direction in ("saved", "loaded")
    )
    assert loaded == hits <= 4 * value(found, "swiftkv:tier_pages", tier="host") == saved


def test_the_buckets_are_those_of_vllm(answered):
    found = families(answered)
    histograms = {name for name, one in found.items() if one.type == "histogram"}
    assert histograms == {f"vllm:{name}" for name in BUCKETS} | {"swiftkv:tokenize_seconds"}
    for name, bounds in BUCKETS.items():
        samples = found[f"vllm:{name}"].samples
        shown = [float(one.labels["le"]) for one in samples if one.name.endswith("_bucket")]
        assert shown == [*map(float, bounds.split()), float("inf")], name


def test_sums_are_what_clients_got(answered):
    found = families(answered)
    assert value(found, "vllm:generation_tokens", "_total") == 5 * 20
    assert value(found, "vllm:prompt_tokens", "_total") == 5 + 5 + 40
    assert value(found, "vllm:request_success", "_total", finished_reason="length") == 5
    assert value(found, "vllm:request_success", "_total") == 5
    hits = value(found, "vllm:prefix_cache_hits", "_total")
    assert 0 < hits < 5, "pages of the second prompt"
    for name, count, total in (
        ("vllm:request_prompt_tokens", 3, 50),
        ("vllm:request_prefill_kv_computed_tokens", 3, 50 - hits),
        ("vllm:request_generation_tokens", 5, 100),
        ("vllm:request_max_num_generation_tokens", 3, 60),
        ("vllm:request_params_max_tokens", 3, 60),
        ("vllm:request_params_n", 3, 5),
    ):
        assert value(found, name, "_count") == count and value(found, name, "_sum") == total
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        assert value(found, f"vllm:{name}_seconds", "_count") == 3
    # Every token but those of the first event of a sequence has a gap before it.
    gaps = value(found, "vllm:inter_token_latency_seconds", "_count")
    assert 5 * (20 - 3) <= gaps <= 5 * 19
    assert value(found, "swiftkv:http_requests", "_total", route="/v1/completions") == 4
    assert value(found, "swiftkv:http_requests", "_total", status="400") == 1
    steps = value(found, "vllm:iteration_tokens_total", "_count")
    assert 3 * 3 <= steps <= 5 * 20 + 3
    cached = value(found, "swiftkv:prefilled_tokens", "_total")
    assert value(found, "vllm:iteration_tokens_total", "_sum") == cached + 5 * 20
    for name in ("running", "waiting", "waiting_by_reason"):
        name = f"vllm:num_requests_{name}"
        assert value(found, name) == 0
    assert value(found, "vllm:kv_cache_usage_perc") == 0
    assert value(found, "swiftkv:compilations", "_total") == 0


def test_tokens_behind_a_stop_string_are_no_answer(start):
    """Those of the call that found it, and of the one in flight: the sum is that of `usage`."""
    running, used = start(engine={"steps": 8}, step_seconds=0.01), 0
    _, whole = running.post("/v1/completions", BODY | {"max_tokens": 40})
    used += whole["usage"]["completion_tokens"]
    text = whole["choices"][0]["text"]
    for at in (3, 9, 12):
        for n in (1, 2):
            body = BODY | {"max_tokens": 40, "stop": text[at : at + 2], "n": n, "seed": 1}
            _, answer = running.post("/v1/completions", body | {"temperature": 0})
            assert answer["choices"][0]["finish_reason"] == "stop"
            used += answer["usage"]["completion_tokens"]
    running.check_empty()
    running.until(lambda: not running.app.service.engine._engine.has_work)
    found = families(running)
    assert value(found, "vllm:generation_tokens", "_total") == used
    assert value(found, "vllm:request_generation_tokens", "_sum") == used
    assert value(found, "swiftkv:wasted_tokens", "_total") > 6
    engine = running.app.service.engine
    steps = engine.snapshot.num_steps
    running.post("/v1/completions", BODY | {"max_tokens": 200, "stop": text[3:5]})
    running.check_empty()
    assert engine.snapshot.num_steps - steps < 10, "of 25 calls; the engine ends it too"


def test_calls_of_tools_have_stopped(start, says):
    """The label has no other values than vLLM's, for panels that divide by `stop`."""
    running = start(engine={"max_model_len": 512})
    says('{"name": "now", "parameters": {}}')
    chat = {
        "messages": [{"role": "user", "content": "hi"}],
        "tools": [{"type": "function", "function": {"name": "now"}}],
        "temperature": 0,
    }
    _, answer = running.post("/v1/chat/completions", chat)
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    running.check_empty()
    samples = families(running)["vllm:request_success"].samples
    counts = {one.labels["finished_reason"]: one.value for one in samples}
    assert counts == {"stop": 1, "length": 0, "abort": 0, "error": 0}


def test_requests_wait_for_capacity(start):
    running = start(engine={"slots": 1}, step_seconds=0.05, max_num_queued_reqs=8)
    asked = [later(running.post, "/v1/completions", BODY) for _ in range(4)]

    def waiting(name: str, **labels: str) -> float:
        return value(families(running), f"vllm:num_requests_waiting{name}", **labels)

    running.until(lambda: waiting("_by_reason", reason="capacity") == 3)
    assert waiting("_by_reason", reason="deferred") == 0
    assert [one.result(20)[0] for one in asked] == [200] * 4
    assert waiting("") == waiting("_by_reason") == 0


def test_openmetrics_where_it_is_accepted(answered):
    _, headers, content = answered.request(
        "GET", "/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"}
    )
    assert headers["content-type"].startswith("application/openmetrics-text")
    assert content.endswith(b"# EOF\n")
    _, _, plain = answered.request("GET", "/metrics")

    def names(text: bytes) -> set[bytes]:
        return {line.partition(b"{")[0] for line in text.splitlines() if not line.startswith(b"#")}

    assert names(plain) == names(content)
    headers = {"accept": "application/openmetrics-text; version=x"}
    status, headers, _ = answered.request("GET", "/metrics", headers=headers)
    assert status == 200 and headers["content-type"].startswith("text/plain")


def test_histograms_cumulate():
    found = Histogram("n", "N.", (1, 2, 5))
    for one in (0.5, 1, 1.5, 7):
        found.observe(one)
    found.observe(3, times=4)
    assert found.cumulated() == [("1.0", 2), ("2.0", 3), ("5.0", 7), ("+Inf", 8)]
    assert found.sum == 22
    assert token_buckets(100) == (1, 2, 5, 10, 20, 50, 100)


def test_the_largest_value_of_the_last_while():
    found = RecentMaximum(60)
    assert found.value == 0
    for now, value in ((0.1, 0.2), (0.3, 0.7), (0.9, 0.1), (5, 0.5), (60.5, 0.0)):
        found.add(now, value)
        assert found.value == (0.2 if now == 0.1 else 0.7)
    found.add(61, 0.1)
    assert found.value == 0.5
    found.add(200, 0.1)
    assert found.value == 0.1


def test_every_scrape_sees_a_loop_that_was_blocked(start):
    running = start()
    running.until(lambda: bool(running.app.service.metrics.loop_lag._maxima))
    running.app.service._loop.call_soon_threadsafe(time.sleep, 0.4)

    def lag() -> float:
        return value(families(running), "swiftkv:loop_lag_seconds")

    running.until(lambda: lag() >= 0.29)
    time.sleep(0.3)
    assert lag() >= 0.29, "still, after two more heartbeats"


def test_headers_tell_the_times(running):
    _, headers, _ = running.request("POST", "/v1/completions", BODY, {"x-request-id": "mine-1"})
    assert headers["x-request-id"] == "mine-1" and int(headers["openai-processing-ms"]) >= 0
    parts = dict(re.findall(r"(\w+);dur=([\d.]+)", headers["server-timing"]))
    assert set(parts) == {"queue", "ttft", "prefill", "decode", "total"}
    assert float(parts["total"]) >= float(parts["ttft"])
    for bad in ("a b", "x" * 200, "a\tb"):
        _, headers, _ = running.request("GET", "/version", headers={"x-request-id": bad})
        assert re.fullmatch("[0-9a-f]{32}", headers["x-request-id"])
    _, headers, content = running.request("POST", "/v1/completions", BODY | {"stream": True})
    assert set(re.findall(r"(\w+);dur", headers["server-timing"])) == {"queue", "ttft"}
    assert headers["cache-control"] == "no-cache" and "content-length" not in headers


def test_the_log_has_a_line_for_each_request_and_no_text_of_clients(start, caplog):
    caplog.set_level(logging.INFO, "swiftkv_jax")
    running = start(log_json=True)
    running.post("/v1/completions", BODY | {"prompt": "secret words"})
    running.post("/v1/completions", BODY | {"bad\nfield\x1b[2J\u2028": 1})
    running.request("GET", "/health")
    first, second = [record.fields for record in caplog.records if record.message == "request"]  # type: ignore[attr-defined]
    assert first["status"] == 200 and first["prompt_tokens"] == len("secret words")
    assert first["completion_tokens"] == 20 and first["finish_reasons"] == ["length"]
    assert second["status"] == 400 and second["error"] == "unknown_field"
    assert "secret" not in json.dumps([first, second])


def test_of_polls_the_log_has_only_those_that_are_refused(start, caplog):
    caplog.set_level(logging.INFO, "swiftkv_jax")
    running = start(log_json=True, api_keys={"a": "secret"})
    for path in ("/", "/health", "/ready", "/ping", "/metrics", "/load", "/v1/models"):
        assert running.request("GET", path, headers={"x-api-key": "secret"})[0] == 200
    assert running.request("GET", "/v1/models")[0] == 401
    running.until(lambda: "request" in caplog.messages)
    found = [record.fields for record in caplog.records if record.message == "request"]  # type: ignore[attr-defined]
    assert [(one["route"], one["status"]) for one in found] == [("/v1/models", 401)]


def test_prompts_in_the_log_are_short_and_escaped(start, caplog):
    caplog.set_level(logging.INFO, "swiftkv_jax")
    running = start(log_requests=True, max_log_len=12)
    running.post("/v1/completions", BODY | {"prompt": "two\nlines\x1b[2J\u2028 and more"})
    running.post("/v1/completions", BODY | {"prompt": [7, 8, 9]})
    running.until(lambda: caplog.text.count("route=/v1") == 2)
    first, second = (one.message for one in caplog.records if "route=/v1" in one.message)
    assert "prompt=two\\nlines\\x" in first and "more" not in first
    assert "prompt=[7, 8, 9]" in second
    assert first.isprintable()


@pytest.mark.parametrize("usage", [False, True])
def test_metrics_of_each_request(start, usage):
    running = start(request_metrics=True, step_seconds=0.002)
    names = {"time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms"}
    names |= {"tokens_per_second"}
    for path in ("/v1/completions", "/v1/chat/completions"):
        body = BODY | {"messages": [{"role": "user", "content": "hi"}], "n": 2}
        del body["messages" if path == "/v1/completions" else "prompt"]
        found = running.post(path, body)[1]["metrics"]
        assert set(found) == names and all(one >= 0 for one in found.values())
        assert found["mean_itl_ms"] == pytest.approx(found["generation_time_ms"] / 19, abs=0.01)
        options = {"stream_options": {"include_usage": True}} if usage else {}
        *events, last, done = running.events(path, body | options)
        assert done == "[DONE]" and set(last["metrics"]) == names
        assert not any("metrics" in event for event in events)
    _, nothing = running.post("/v1/completions", {"prompt": "a", "max_tokens": 0, "echo": True})
    assert nothing["metrics"] == dict.fromkeys(names)


def test_a_line_while_there_is_work(start, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "swiftkv_jax")
    monkeypatch.setattr(load_log, "SECONDS", 0.2)
    running = start()
    time.sleep(0.5)
    assert "tokens/s" not in caplog.text, "nothing has run"
    running.post("/v1/completions", BODY)
    pattern = (
        r"\d+ prompt tokens/s, \d+ new tokens/s, 0 running, 0 waiting, pages 0%, "
        r"prefix cache hits (0%|-), without work \d+%"
    )
    running.until(lambda: re.search(pattern, caplog.text) is not None)


def test_errors_cannot_forge_lines(running):
    _, answer = running.post("/v1/completions", BODY | {"bad\nfield\x1b[2J\u2028": 1})
    assert answer["error"]["message"].isprintable()


def test_the_dashboard_asks_for_what_is_there(answered):
    """Every metric and label of `examples/deploy/grafana.json`."""
    dashboard = json.loads((ROOT / "examples" / "deploy" / "grafana.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    samples = [sample for family in families(answered).values() for sample in family.samples]
    labels = {}
    for sample in samples:
        labels.setdefault(sample.name, set()).update(sample.labels)
    asked = 0
    for expression in expressions:
        names = re.findall(r"(?:vllm|swiftkv):\w+", expression)
        (grouped,) = set(re.findall(r" by \(([\w, ]+)\)", expression))
        for name in names:
            if "{model_name" in expression:
                assert "model_name" in labels[name]
            assert set(grouped.split(", ")) <= labels[name], (name, grouped)
            asked += 1
    assert asked > len(dashboard["panels"]) >= 16
