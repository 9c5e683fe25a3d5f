"""Requests that are wrong in one way each: their bodies, their heads, their framing."""

import json
import random
from collections.abc import Callable
from typing import Any, NamedTuple

from tests.soak.server.client import request
from tests.soak.server.generated import Generator

USER = [{"role": "user", "content": "a"}]
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": USER, "max_tokens": 3},
    "/v1/completions": {"prompt": "hello", "max_tokens": 3},
    "/v1/responses": {"input": "hello", "max_output_tokens": 3},
    "/v1/messages": {"messages": USER, "max_tokens": 3},
    "/v1/messages/count_tokens": {"messages": USER},
    "/v1/score": {"pairs": [{"context": "a", "continuation": "b"}]},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [5, 6]},
}
RICH: dict[str, Any] = {
    "n": 2,
    "temperature": 0.5,
    "stop": ["x", "y"],
    "logit_bias": {"5": 1.0},
    "stream": True,
    "stream_options": {"include_usage": True},
    "seed": 3,
    "structured_outputs": {"regex": "[a-d]{2}"},
    "metadata": {"a": "b"},
}
GETS = ("/", "/health", "/ready", "/ping", "/v1/models", "/metrics", "/version", "/load")
HOSTILE = (
    None, True, -1, 0, 1, 1.5, -0.0, 1e308, 2**31, 2**63, 2**70, 10**19, "", "a", "\x00", "null",
    "١", "\u2028", [], [1], [[]], [None], [[1, "a"]], {}, {"a": 1}, {"": {}}, "x" * 10_000,
    [0] * 5_000, {str(n): n for n in range(2_000)},
)  # fmt: skip


class Raw(NamedTuple):
    kind: str
    content: bytes
    is_whole: bool = True
    """The server has all that it needs to answer and close."""
    head: bool = False


class Mutator:
    def __init__(self, generator: Generator, rng: random.Random):
        self._generator, self._rng = generator, rng
        self._kinds: list[Callable[[], Raw]] = [
            self._field, self._field, self._inside, self._inside, self._deep, self._wide,
            self._literal, self._unicode, self._bytes, self._bytes, self._media_type,
            self._truncated, self._pipelined, self._chunked, self._head, self._method,
        ]  # fmt: skip

    def next(self) -> Raw:
        return self._rng.choice(self._kinds)()

    def _base(self) -> tuple[str, dict[str, Any]]:
        path = self._rng.choice(list(GOOD))
        body = dict(GOOD[path])
        if path.endswith("completions"):
            for name in self._rng.sample(list(RICH), self._rng.choice((0, 1, 3))):
                body[name] = RICH[name]
        return path, body

    def _sent(self, kind: str, path: str, body: Any, **headers: str) -> Raw:
        return Raw(kind, request(path, body, headers=headers))

    # Bodies -----------------------------------------------------------------------

    def _field(self) -> Raw:
        path, body = self._base()
        schema = self._generator._schemas[self._generator.bodies[path]["$ref"].rpartition("/")[2]]
        name = self._rng.choice([*schema["properties"], "no_such_field", "", "ſ" * 600])
        return self._sent("field", path, body | {name: self._rng.choice(HOSTILE)})

    def _inside(self) -> Raw:
        """One value anywhere in the body is another."""
        path, body = self._base()
        body = json.loads(json.dumps(body))
        places: list[tuple[Any, Any]] = []

        def walk(value: Any) -> None:
            found = value.items() if isinstance(value, dict) else enumerate(value)
            for key, one in found:
                places.append((value, key))
                if isinstance(one, dict | list):
                    walk(one)

        walk(body)
        holder, key = self._rng.choice(places)
        if self._rng.random() < 0.5:
            holder[key] = self._rng.choice(HOSTILE)
        else:
            holder[key] = self._generator.any_value()
        return self._sent("inside", path, body)

    def _deep(self) -> Raw:
        path, body = self._base()
        depth = self._rng.choice((32, 64, 65, 500, 2_000, 100_000))
        opening, closing = self._rng.choice(((b"[", b"]"), (b'{"a":', b"}")))
        value = opening * depth + b"1" + closing * depth
        name = self._rng.choice(
            [*body, "tools", "metadata", "response_format", "chat_template_kwargs", "documents"]
        )
        content = json.dumps(body).encode()[:-1] + f', "{name}": '.encode() + value + b"}"
        return self._sent("deep", path, content if self._rng.random() < 0.8 else value)

    def _wide(self) -> Raw:
        path, body = self._base()
        count = self._rng.choice((1_000, 20_000))
        wide = self._rng.choice(
            ([1] * count, {f"k{n}": None for n in range(count)}, ["a"] * count, [USER] * count)
        )
        if self._rng.random() < 0.3 and isinstance(wide, dict):
            return self._sent("wide", path, body | wide)
        name = self._rng.choice([*body, "messages", "stop", "tools", "metadata", "logit_bias"])
        return self._sent("wide", path, body | {name: wide})

    def _literal(self) -> Raw:
        """What Python's JSON reads and JSON is not, numbers of any size, names that come twice."""
        path, body = self._base()
        literals = ("NaN", "Infinity", "-Infinity", "1e999", "-1e999", "9" * 5_000, "0x1", "01",
                    "-", "1e", ".5", "1.", "+1", "tru", "undefined", "'a'", "1,", "")  # fmt: skip
        value = self._rng.choice(literals)
        name = self._rng.choice([*body, "temperature", "seed", "max_tokens", "n", "top_p"])
        content = json.dumps(body).encode()[:-1] + f', "{name}": {value}}}'.encode()
        return self._sent("literal", path, content)

    def _unicode(self) -> Raw:
        path, body = self._base()
        found = self._rng.choice(
            (rb"\ud800", rb"\udfff\ud800", b"\xff", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf8\x88",
             b"\xe6\xbc", b"\x00", b"\x1b[2J", rb"\u0000", rb"\uFEFF", b"\xef\xbb\xbf", rb"\u12")
        )  # fmt: skip
        texts = [name for name, value in body.items() if isinstance(value, str)]
        name = self._rng.choice([*texts, "user", "model", "stop", "request_id"]).encode()
        content = json.dumps(body).encode()[:-1] + b', "' + name + b'": "a' + found + b'"}'
        if self._rng.random() < 0.2:
            content = found + content
        return self._sent("unicode", path, content)

    def _bytes(self) -> Raw:
        path, body = self._base()
        content, rng = bytearray(json.dumps(body).encode()), self._rng
        for _ in range(rng.choice((1, 1, 2, 8))):
            at = rng.randrange(len(content))
            match rng.randrange(3):
                case 0:
                    content[at] = rng.randrange(256)
                case 1:
                    content[at:at] = rng.randbytes(rng.choice((1, 2, 50)))
                case 2 if len(content) > 10:
                    del content[at : at + rng.choice((1, 5))]
        return self._sent("bytes", path, bytes(content))

    # Heads and framing --------------------------------------------------------------

    def _media_type(self) -> Raw:
        path, body = self._base()
        name, value = self._rng.choice(
            (("Content-Type", "text/plain"), ("Content-Type", ""), ("Content-Type", "\xff"),
             ("Content-Type", "application/json; charset=utf-16"), ("Content-Encoding", "gzip"),
             ("Content-Type", "multipart/form-data; boundary=a"), ("Accept", "nothing/at-all"),
             ("Content-Type", "application/json, text/plain"), ("X-Request-Id", "\xe4" * 500),
             ("Authorization", "Bearer \xff\x80"), ("X-Request-Timeout-Ms", "9" * 500),
             ("X-Request-Timeout-Ms", "-1"), ("Traceparent", "00-" + "0" * 5_000))
        )  # fmt: skip
        return self._sent("media type", path, body, **{name: value})

    def _truncated(self) -> Raw:
        path, body = self._base()
        content = request(path, body)
        return Raw("truncated", content[: self._rng.randrange(len(content))], False)

    def _pipelined(self) -> Raw:
        """Good requests one behind the other, and perhaps garbage behind them."""
        path, body = self._base()
        first = request(path, body, headers={"Connection": "keep-alive"})
        content = first * self._rng.choice((1, 2, 5))
        last = self._rng.choice((request("/tokenize", GOOD["/tokenize"]), b"\x00\r\n\r\n"))
        return Raw("pipelined", content + last)

    def _chunked(self) -> Raw:
        path, body = self._base()
        content = json.dumps(body).encode()
        size = self._rng.choice(
            (b"%x" % len(content), b"-1", b"zz", b"", b"f" * 17, b"f" * 200, b"0x5", b"5 ; a=b",
             b"%x;%s" % (len(content), b"a" * 20_000), b"%x" % (len(content) + 1), b"1_0")
        )  # fmt: skip
        found = request(path, b"", headers={"Transfer-Encoding": "chunked", "Content-Length": ""})
        head = found.replace(b"Content-Length: \r\n", b"")
        return Raw("chunked", head + size + b"\r\n" + content + b"\r\n0\r\n\r\n", False)

    def _head(self) -> Raw:
        path, body = self._base()
        lines = request(path, body).split(b"\r\n")
        line = self._rng.choice(
            (b"Content-Length: -5", b"Content-Length: 1, 2", b"Content-Length: 99999999999999999",
             b"Content-Length: +3", b"Content-Length: \xb2", b"Transfer-Encoding: gzip, chunked",
             b"Transfer-Encoding: chunked", b"Host: a\r\nHost: b", b" folded", b"No-Colon",
             b"X-\x00: a", b"X-A: \x00", b": empty", b"X-A : a", b"Expect: 100-continue",
             b"Upgrade: websocket\r\nConnection: Upgrade", b"X-A: " + b"a" * 70_000,
             b"\r\n".join(b"X-%d: a" % n for n in range(150)), b"Content-Length: " + b"9" * 5_000)
        )  # fmt: skip
        lines.insert(self._rng.choice((1, 1, 2)), line)
        if self._rng.random() < 0.2:
            version = self._rng.choice((b"HTTP/1.0", b"HTTP/2.0", b"HTTP/1", b"", b"http/1.1"))
            lines[0] = lines[0].rpartition(b" ")[0] + b" " + version
        return Raw("head", b"\r\n".join(lines), False)

    def _method(self) -> Raw:
        path = self._rng.choice(
            (*GOOD, *GETS, "/openapi.json", "/v1/embeddings", "/v1/models/x%00y", "/%ff", "/..%2f",
             "//", "/v1/models/" + "a" * 9_000, "http://a/health", "/health?%00=%ff&a", "/\xff")
        )  # fmt: skip
        methods = (
            "GET",
            "HEAD",
            "PUT",
            "DELETE",
            "PATCH",
            "OPTIONS",
            "TRACE",
            "POST",
            "BREW",
            "g\t",
        )
        method = self._rng.choice(methods)
        content = request(path, GOOD["/tokenize"], method=method)
        head = method == "HEAD" and path.isascii()  # else no method is read
        return Raw("method", content, head=head)
