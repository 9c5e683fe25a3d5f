"""The options of a server: what it offers, which requests it accepts, and what one may cost."""

from __future__ import annotations

import dataclasses
import json
import re
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from ..errors import UsageError, reason_of

MAX_PROMPTS = 128
"""Prompts of one completion request."""
MAX_LOGPROB_ENTRIES = 250_000
"""Log-probabilities that one request may ask for: an entry is some 2.4 KB in memory."""
MAX_BODY_SIZE = 32 * 2**20
"""Bytes of a body, unless `max_body_size` says otherwise."""
SCHEDULING_POLICIES = ("fcfs", "priority")
ReasoningParser = Literal["auto", "think", "none"]
REASONING_PARSERS: tuple[ReasoningParser, ...] = ("auto", "think", "none")
_OF_THE_SERVER = (
    "add_generation_prompt chat_template continue_final_message conversation documents max_length "
    "messages padding processor_kwargs return_assistant_tokens_mask return_dict return_tensors "
    "tokenize tokenizer_kwargs tools truncation"
).split()
"""Arguments of `apply_chat_template`, and what it gives templates itself."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVEventsConfig:
    """Where events of the prefix cache are published, with vLLM's names and defaults where nothing
    else is said. Every client that connects reads the tokens of all cached prompts.

    Raises `UsageError` that names the option.
    """

    endpoint: str
    """ZeroMQ's address of the PUB socket, in vLLM by default tcp://*:5557. One with `*` or `::`,
    and of ipc:// or inproc://, is bound; another is connected to."""
    replay_endpoint: str | None = None
    """That of a ROUTER socket, which sends again what a subscriber has missed; it is bound. None is
    none."""
    topic: str = ""
    """Topic of all messages: kv@ADDRESS@MODEL for llm-d."""
    buffer_steps: int = 10_000
    """Last batches that can be sent again. A batch has the events of an engine step."""
    hwm: int = 100_000
    """Messages that ZeroMQ keeps for a slow subscriber; it misses those beyond."""
    max_queue_size: int = 100_000
    """Batches that wait for the publisher; those beyond are dropped."""
    enable_kv_cache_events: bool = True
    """False publishes nothing. In vLLM that is the default."""
    publisher: Literal["zmq", "null"] = "zmq"
    """`null` publishes nothing either."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value, kind = getattr(self, field.name), str(field.type)
            if kind == "int":
                good = type(value) is int and value > 0
            elif kind == "bool":
                good = type(value) is bool
            elif field.name == "publisher":
                good = value in ("zmq", "null")
            else:
                good = isinstance(value, str) or (value is None and "None" in kind)
            if not good:
                raise UsageError(f"`kv_events_config`: `{field.name}`={value!r} is not {kind}")
        for name in ("endpoint", "replay_endpoint"):  # ZeroMQ would take the port modulo 2**16
            found = re.fullmatch(r"tcp://.*:(\d+)", getattr(self, name) or "", re.ASCII)
            if found is not None and int(found[1]) > 65535:
                message = f"`{name}`={getattr(self, name)!r}: ports are from 0 to 65535"
                raise UsageError(f"`kv_events_config`: {message}")

    @classmethod
    def from_json(cls, text: str) -> KVEventsConfig:
        """From the JSON object of `--kv-events-config`, as vLLM takes it."""
        try:
            fields = json.loads(text)
        except ValueError as error:
            raise UsageError(f"`kv_events_config` is not JSON: {error}") from None
        if not isinstance(fields, dict) or not isinstance(fields.get("endpoint"), str):
            raise UsageError(
                '`kv_events_config` must be an object with an `endpoint`: {"endpoint": '
                '"tcp://*:5557"}'
            )
        known = [field.name for field in dataclasses.fields(cls)]
        if unknown := sorted(fields.keys() - set(known)):
            raise UsageError(
                f"`kv_events_config` has no {unknown[0]!r}; there are {', '.join(known)}"
            )
        return cls(**fields)

    @property
    def is_enabled(self) -> bool:
        return self.enable_kv_cache_events and self.publisher == "zmq"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of a server, with vLLM's names where it has them. Seconds where nothing else is said.

    Raises `UsageError` that names the option.
    """

    served_model_name: tuple[str, ...] = ()
    """Names of the model; the first is the one in answers. Empty: the name of its folder."""
    api_keys: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False, repr=False)
    """Name of a key -> key. Empty: no key is needed."""
    tokenizer_info: bool = False
    """Answer /tokenizer_info with special tokens and chat template."""
    metrics_public: bool = False
    """Answer /metrics without a key."""
    share_prefix_cache: bool = False
    """Let requests of different keys share cached prefixes: the time to the first token then tells
    one what another has asked."""
    allowed_origins: tuple[str, ...] = ()
    """Origins of web pages that may call the server; none by default."""
    allowed_hosts: tuple[str, ...] | None = None
    """Hosts of the Host header that are answered, without a port; None answers all, and a request
    without the header, of HTTP/1.0, is always answered."""
    unknown_fields: Literal["refuse", "ignore"] = "refuse"
    """What to do with a field that no version of the API has; the header `x-ignored-fields` of the
    answer names those that were ignored."""

    tool_call_parser: Literal["auto", "llama3_json", "hermes", "qwen3_coder", "none"] = "auto"
    """Format of calls of tools; "auto" is that of the chat template, "none" refuses tools."""

    reasoning_parser: ReasoningParser = "auto"
    """How the model marks its reasoning; "auto" is by the chat template, "none" leaves it in the
    content."""
    chat_template_kwargs: tuple[str, ...] = ()
    """Variables of the chat template that requests may set, besides those that switch reasoning.
    """

    root_path: str = ""
    """Path under which a proxy serves this server, "/llm" for example. Requests are answered with
    and without it."""
    ssl_certfile: Path | None = None
    """Certificate chain of TLS, in PEM; None is plain HTTP."""
    ssl_keyfile: Path | None = None
    """Its private key, unless that is in `ssl_certfile`."""

    max_connections: int = 4096
    max_body_size: int | None = None
    """Bytes of a body; None is 64 for each token of `max_model_len`, from 2 to 32 MiB."""
    max_num_queued_reqs: int | None = None
    """Sequences that wait and run, of all requests; None is four times `max_num_seqs`, at least
    64."""
    max_num_queued_tokens: int | None = None
    """Prompt tokens that are not cached yet; None is what 30 s of prefill take, at least four times
    `max_model_len`."""
    max_queued_bytes: int = 256 * 2**20
    """Bytes of the bodies of all requests that are not answered yet."""
    max_reqs_per_key: int | None = None
    """Sequences of one key that wait and run."""
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    """Order of the requests of one key: that of their arrival, or of their `priority`, lower ones
    first, where 10 s of waiting count as much as a difference of 1."""

    queue_timeout: float = 120.0
    """Time that a request may wait before its prefill begins."""
    request_timeout: float = 3600.0
    """Time that a request may take in all."""
    write_timeout: float = 60.0
    """Time that a client may leave a stream unread, once what the system buffers is full."""
    header_timeout: float = 10.0
    """Time from the first byte of a request to the end of its headers."""
    body_timeout: float = 30.0
    """Time for a body, and one second more for each 64 KiB of it."""
    keep_alive_timeout: float = 75.0
    """Time that a connection may stay open without a request."""
    shutdown_timeout: float = 30.0
    """Time that requests have to end after SIGTERM."""
    shutdown_delay: float = 0.0
    """Time after SIGTERM in which requests are still accepted, for load balancers that lag."""
    stall_timeout: float = 60.0
    """Time without an engine step, while there is work, after which /ready fails; after twice that
    the process ends."""
    sse_keep_alive: float = 10.0
    """Silence of a stream after which a comment is sent, for proxies that cut silent ones."""

    default_max_tokens: int | None = None
    """`max_tokens` of a chat that names none, if there is room for so many; None is the room."""
    max_tokens_limit: int | None = None
    """Most `max_tokens`."""
    page: bool = True
    """Answer / with a page to talk to the model."""
    log_requests: bool = False
    """The log's line of a request has the beginning of its prompt."""
    max_log_len: int = 200
    """Characters of it."""
    request_metrics: bool = False
    """Answers have `metrics`: the times of their request."""
    log_json: bool = False
    """The log's record of a request has its values as `fields`, in the place of a text."""
    kv_events_config: KVEventsConfig | None = None
    """Where events of the prefix cache are published; None is nowhere."""

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, bool) or not isinstance(value, int | float):
                continue
            elif field.name == "shutdown_delay" or field.name == "shutdown_timeout":
                if not value >= 0:
                    raise UsageError(f"`{field.name}`={value} must not be negative")
            elif not value > 0:  # not a number either
                raise UsageError(f"`{field.name}`={value} must be above 0")
        if refused := [name for name in self.chat_template_kwargs if name in _OF_THE_SERVER]:
            raise UsageError(f"`chat_template_kwargs`: requests cannot set {refused[0]!r}")
        if self.root_path and not re.fullmatch(r"(/[\w.~-]+)+", self.root_path, re.ASCII):
            raise UsageError(f"`root_path`={self.root_path!r} must be like /llm")
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise UsageError("`ssl_keyfile` needs `ssl_certfile`")
        if self.ssl_certfile is not None:
            _check_certificate(self.ssl_certfile, self.ssl_keyfile)
        for host in self.allowed_hosts or ():
            if host.count(":") == 1 or "]:" in host:
                raise UsageError(f"`allowed_hosts`: {host!r} must have no port")
        for name in self.served_model_name:
            if not name or len(name) > 256 or not name.isprintable():
                raise UsageError(f"`served_model_name`={name!r} must be 1 to 256 characters")

    def body_limit(self, max_model_len: int) -> int:
        """Bytes of a body at most."""
        if self.max_body_size is not None:
            return self.max_body_size
        return min(max(64 * max_model_len, 2 * 2**20), MAX_BODY_SIZE)

    def sequence_limit(self, max_num_seqs: int) -> int:
        """Sequences that wait and run at most."""
        return self.max_num_queued_reqs or max(4 * max_num_seqs, 64)


def _check_certificate(certificate: Path, key: Path | None) -> None:
    """Raise `UsageError` for what is no certificate with its key. A key may have no password."""
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key, password="")
    except (OSError, ValueError) as error:  # `SSLError` is an `OSError`
        name = f"`ssl_certfile`={certificate}"
        name += "" if key is None else f", `ssl_keyfile`={key}"
        if isinstance(error, ssl.SSLError) and "PEM" in str(error):
            message = "is not a certificate and its private key, in PEM"
            message += "; give `ssl_keyfile` if that is another file" if key is None else ""
            raise UsageError(f"{name} {message}") from None
        raise UsageError(f"{name}: {reason_of(error)}") from None
