"""Predictions, and requests that switch drafts off: the same answers, counted."""

import types
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from swiftkv_jax.infer.engine.options import SpeculativeConfig
from swiftkv_jax.infer.engine.requests import Drafts, Request
from swiftkv_jax.serve.service.generation import Generation
from tests.serve.conftest import Running
from tests.serve.test_metrics import families, value

HI: Any = [{"role": "user", "content": "hi"}]
BODY: Any = {"model": "tiny", "max_tokens": 40, "temperature": 0, "seed": 3}
NAMES = ("accepted_prediction_tokens", "rejected_prediction_tokens")
PER_POSITION = "vllm:spec_decode_num_accepted_tokens_per_pos"


@pytest.fixture(scope="module")
def drafting(start) -> Running:
    speculative = SpeculativeConfig(num_speculative_tokens=3)
    return start(engine={"width": 4, "speculative": speculative}, request_metrics=True)


@pytest.fixture
def client(drafting) -> Iterator[openai.OpenAI]:
    with drafting.openai() as client:
        yield client
    drafting.check_empty()


def predicted(content: Any) -> Any:
    return {"type": "content", "content": content}


def counts(usage: Any) -> tuple[int, int]:
    details = usage.completion_tokens_details
    return details.accepted_prediction_tokens, details.rejected_prediction_tokens


def test_a_prediction_changes_counts_alone(client, drafting):
    chat = client.chat.completions
    plain = chat.create(messages=HI, **BODY)
    assert counts(plain.usage) == (None, None)
    text = plain.choices[0].message.content
    stats = drafting.app.service.engine.snapshot.stats.speculation
    parts = [{"type": "text", "text": "a b"}, {"type": "text", "text": "c"}]
    for content in ("a bc", parts):
        before = stats
        answer = chat.create(messages=HI, **BODY, prediction=predicted(content))
        assert answer.choices[0].message.content == text
        stats = drafting.app.service.engine.snapshot.stats.speculation
        right, wrong = counts(answer.usage)
        assert right == stats.accepted_tokens - before.accepted_tokens > 0
        assert right + wrong == stats.draft_tokens - before.draft_tokens > right
    *_, last = chat.create(
        messages=HI,
        **BODY,
        prediction=predicted(text),
        stream=True,
        stream_options={"include_usage": True},
    )
    assert counts(last.usage)[0] > 0
    off = chat.create(
        messages=HI, **BODY, prediction=predicted(text), extra_body={"speculative": False}
    )
    assert off.choices[0].message.content == text and counts(off.usage) == (0, 0)


def test_an_empty_prediction_is_none(client, running):
    """A client sends an empty file before an edit, also to a server without drafts."""
    for content in ("", [], [{"type": "text", "text": ""}]):
        body = BODY | {"messages": HI, "prediction": predicted(content)}
        assert counts(client.chat.completions.create(**body).usage) == (None, None)
        assert running.post("/v1/chat/completions", body)[0] == 200


def test_tokens_behind_a_stop_string_are_no_tokens_of_the_answer():
    """A step has emitted more of the prediction than the answer has."""
    drafts = Drafts(steps=1, tokens=9, accepted=7, predicted=9, predicted_accepted=7)
    choice = types.SimpleNamespace(num_tokens=3, drafts=drafts)
    part = types.SimpleNamespace(request=Request([1], prediction=[2]), choices=[choice])
    parts: Any = [part]
    reservation: Any = None
    assert Generation([], parts, reservation, 0.0).prediction_tokens == (3, 2)


def test_completions_take_predictions_too(drafting):
    body = BODY | {"prompt": ["one", "two"], "n": 2, "prediction": predicted("three")}
    status, answer = drafting.post("/v1/completions", body)
    assert status == 200 and len(answer["choices"]) == 4
    found = answer["usage"]["completion_tokens_details"]
    assert all(found[name] > 0 for name in NAMES)
    assert found[NAMES[0]] < answer["usage"]["completion_tokens"]
    assert answer["metrics"]["speculative_decoding"] is None, "of several samples"
    form = {"structured_outputs": {"regex": "[ab]{4}"}, "prediction": predicted("abab")}
    status, answer = drafting.post("/v1/completions", BODY | {"prompt": "one"} | form)
    assert status == 200 and set(answer["choices"][0]["text"]) <= set("ab")


@pytest.mark.parametrize(
    ("prediction", "param", "said"),
    [
        ("a", "prediction", "expected `object"),
        ({"content": "a"}, "prediction.type", "missing"),
        ({"type": "text", "content": "a"}, "prediction.type", "invalid enum value"),
        ({"type": "content"}, "prediction.content", "missing"),
        (predicted(3), "prediction.content", "expected `str | array`"),
        (predicted(["a"]), "prediction.content[0]", "expected `object`"),
        (predicted([{"type": "text"}]), "prediction.content[0].text", "missing"),
        (
            predicted([{"type": "image_url", "image_url": {"url": "a"}}]),
            "prediction.content[0].type",
            "the model reads text alone",
        ),
        (predicted("a" * 257), "prediction.content", "257 tokens, an answer at most 256"),
        (predicted("a" * 9000), "prediction.content", "at least 1125 tokens"),
    ],
)
def test_a_wrong_prediction_is_refused_by_name(client, prediction, param, said):
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(messages=HI, **BODY, prediction=prediction)
    assert caught.value.param == param
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_a_server_without_drafts_refuses_predictions(running):
    body = {"messages": HI, "max_tokens": 2}
    for speculative in (True, False):
        assert running.post("/v1/chat/completions", body | {"speculative": speculative})[0] == 200
    status, answer = running.post("/v1/chat/completions", body | {"prediction": predicted("a")})
    error = answer["error"]
    assert (status, error["param"], error["code"]) == (400, "prediction", "unsupported_parameter")
    assert error["message"] == "`prediction` needs the server's --speculative-config"
    assert not any("spec_decode" in name for name in families(running))


def test_drafts_are_counted_under_the_names_of_vllm(drafting):
    before = families(drafting)
    _, answer = drafting.post("/v1/chat/completions", BODY | {"messages": HI})
    drafting.check_empty()
    found = families(drafting)

    def counted(name: str, **labels: str) -> float:
        return value(found, name, "_total", **labels) - value(before, name, "_total", **labels)

    drafts, tokens, accepted = (
        counted(f"vllm:spec_decode_num_{name}")
        for name in ("drafts", "draft_tokens", "accepted_tokens")
    )
    summary = answer["metrics"]["speculative_decoding"]
    assert summary == {
        "mean_acceptance_length": pytest.approx(1 + accepted / drafts),
        "draft_acceptance_rate": pytest.approx(accepted / tokens),
        "num_spec_steps": drafts,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": tokens,
        "num_spec_tokens": 3,
    }
    labels = {one.labels["position"] for one in found[PER_POSITION].samples}
    assert labels == {"0", "1", "2"} and counted(PER_POSITION) == accepted > 0
    assert counted("swiftkv:verify_calls") > 0
