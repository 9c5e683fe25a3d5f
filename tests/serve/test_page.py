"""The page at /."""

import base64
import hashlib
import json
import re


def test_the_page(running):
    status, headers, content = running.request("GET", "/")
    assert status == 200 and headers["content-type"] == "text/html; charset=utf-8"
    assert len(content) < 40_000 and headers["x-content-type-options"] == "nosniff"
    text, policy = content.decode(), headers["content-security-policy"]
    for name in ("script", "style"):
        (inside,) = re.findall(f"<{name}>(.*?)</{name}>", text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        assert f"{name}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
    assert not re.findall(
        r"https?://|src=|@import|url\(|(inner|outer|Adjacent)HTML| on\w+=", text
    ), "only its own"
    assert "height: 100dvh" in text and "<pre" not in text
    # The log is moved to its end for a new turn, and else only where the reader is there already.
    assert text.count(".scrollTop = ") == 2 and text.count('$("log").scrollTop = ') == 1
    assert "if (atEnd) log.scrollTop" in text and "scrollIntoView" not in text
    assert running.request("HEAD", "/")[0] == 200


def test_it_has_a_temperature_of_its_own_where_nothing_sets_one(running, monkeypatch):
    """A card shows what checkpoint and flags set."""

    def default_sampling():
        return json.loads(running.request("GET", "/v1/models")[2])["data"][0]["default_sampling"]

    assert default_sampling() == {}
    monkeypatch.setattr(running.app, "sampling_defaults", {"temperature": 0.3})
    assert default_sampling() == {"temperature": 0.3}
    page = running.request("GET", "/")[2].decode()
    assert "Object.keys(card.default_sampling).length ? {} : SAMPLING" in page


def test_it_needs_no_key_and_can_be_left_out(start):
    running = start(api_keys={"a": "secret"})
    assert running.request("GET", "/")[0] == 200
    assert running.request("GET", "/v1/models")[0] == 401
    assert start(page=False).request("GET", "/")[0] == 404
