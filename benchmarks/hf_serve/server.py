"""A server process with OpenAI's API, and what it answers."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple


class Answer(NamedTuple):
    """A completion that was streamed; times in seconds since it was asked for."""

    status: int
    text: str
    first: float
    total: float
    prompt_tokens: int
    tokens: int
    finish_reason: str | None


@dataclasses.dataclass
class Server:
    """A server process with OpenAI's API."""

    process: subprocess.Popen
    url: str
    model: str
    """What requests call the model."""

    def request(self, body: dict[str, Any]) -> urllib.request.Request:
        content = json.dumps({"model": self.model} | body).encode()
        headers = {"content-type": "application/json"}
        return urllib.request.Request(f"{self.url}/v1/completions", content, headers)

    def ask(self, body: dict[str, Any], *, timeout: float = 600) -> tuple[int, Any]:
        """(status, JSON) of a completion that is not streamed."""
        try:
            with urllib.request.urlopen(self.request(body), timeout=timeout) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode(errors="replace")

    def stream(self, body: dict[str, Any], *, on_text: Any = None) -> Answer:
        """A streamed completion, read to its end; `on_text` is called at the first text."""
        start, first, text, reason = time.perf_counter(), 0.0, "", None
        usage = {"prompt_tokens": 0, "completion_tokens": 0}
        asked = self.request(body | {"stream": True, "stream_options": {"include_usage": True}})
        with urllib.request.urlopen(asked, timeout=600) as answer:
            for line in answer:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                for choice in event.get("choices", ()):
                    reason = choice.get("finish_reason") or reason
                    if not choice.get("text"):
                        continue
                    if not first:
                        first = time.perf_counter() - start
                        if on_text is not None:
                            on_text()
                    text += choice["text"]
            status = answer.status
        counts = usage["prompt_tokens"], usage["completion_tokens"]
        return Answer(status, text, first, time.perf_counter() - start, *counts, reason)

    def cpu_seconds(self) -> float:
        """Processor time that the process has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
