"""The options of a server: what it offers, which requests it accepts, and what one may cost."""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import re
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from ..cli import token_count
from ..cli.fields import check_options, option
from ..errors import UsageError, reason_of

MAX_PROMPTS = 128
"""Prompts of one completion request."""
DEFAULT_TEMPERATURE = 1.0
"""Temperature where neither request nor server sets one, as at OpenAI."""
MAX_LOGPROB_ENTRIES = 250_000
"""Log-probabilities that one request may ask for: an entry is some 2.4 KB in memory."""
MAX_BODY_SIZE = 32 * 2**20
"""Bytes of a body, unless `max_body_size` says otherwise."""
_ORIGIN = r"[a-z][a-z\d+.-]*://[^/\s?#@*A-Z]+"
_OF_THE_SERVER = (
    "add_generation_prompt chat_template continue_final_message conversation documents max_length "
    "messages padding processor_kwargs return_assistant_tokens_mask return_dict return_tensors "
    "tokenize tokenizer_kwargs tools truncation"
).split()
"""Arguments of `apply_chat_template`, and what it gives templates itself."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVEventsConfig:
    """Settings for publishing events of the prefix cache, with vLLM's names, and vLLM's defaults
    where no others are stated. Every client that connects reads the tokens of all cached prompts.

    Raises `UsageError` that names the option.
    """

    endpoint: str
    """ZeroMQ's address of the PUB socket, in vLLM by default tcp://*:5557. One with `*` or `::`,
    and of ipc:// or inproc://, is bound; another is connected to."""
    replay_endpoint: str | None = None
    """Address of a ROUTER socket, which sends again what a subscriber has missed; it is bound.
    None: no such socket."""
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
            value = getattr(self, field.name)
            kind = str(field.type)
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
        """Parse the JSON object of `--kv-events-config`, as vLLM takes it."""
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


def parse_list(text: str) -> tuple[str, ...]:
    """A list, A,B or in JSON as vLLM takes it. Raises `UsageError`."""
    entries: object = text.split(",")
    if text.lstrip()[:1] in ("[", '"'):
        try:
            entries = json.loads(text)
        except ValueError as error:
            raise UsageError(f"{text!r} is not JSON: {error}") from None
    entries = [entries] if isinstance(entries, str) else entries
    if not (isinstance(entries, list) and all(isinstance(one, str) for one in entries)):
        raise UsageError(f"{text!r} is not a list of texts")
    entries = [entry.strip() for entry in entries]
    if "" in entries:
        raise UsageError(f"{text!r} has an empty entry")
    return tuple(entries)


def parse_origins(text: str) -> tuple[str, ...]:
    """A list of origins as browsers send them (RFC 6454, section 6.2): nothing else can match one.
    Raises `UsageError`."""
    origins = parse_list(text)
    for origin in origins:
        if origin not in ("*", "null") and not re.fullmatch(_ORIGIN, origin):
            raise UsageError(
                f"{origin!r} is not an origin, such as https://app.example or "
                f"http://localhost:3000: scheme, host and port in lower case, without a path; * is "
                f"every origin"
            )
    return origins


def is_loopback(host: str) -> bool:
    """Return whether a host is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _timeout(default: float, text: str, **how: Any) -> float:
    """The field of a time that has a limit."""
    return option(default, f"seconds {text} (default: %(default)s)", metavar="S", **how)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """Options of a server, with vLLM's names where it has them. Seconds where nothing else is said.

    Raises `UsageError` that names the option.
    """

    served_model_name: tuple[str, ...] = option(
        (),
        "name of the model in the API; repeat to accept further ones (default: that on the Hub, or "
        "of the folder)",
        metavar="NAME",
        group="names and formats",
    )
    """The first is the one in answers."""
    chat_template_kwargs: tuple[str, ...] = option(
        (), "variables of the chat template that requests may set", metavar="A,B", parse=parse_list
    )
    """Variables that requests may set. Those that switch reasoning may be set without it."""
    tool_call_parser: Literal["auto", "llama3_json", "hermes", "qwen3_coder", "none"] = option(
        "auto", "format in which the model calls tools (default: that of its chat template)"
    )
    """"none" refuses tools."""
    reasoning_parser: Literal["auto", "think", "none"] = option(
        "auto",
        "how the model marks its reasoning; think is also qwen3 and deepseek_r1 (default: as its "
        "chat template does)",
        parse=lambda name: "think" if name in ("qwen3", "deepseek_r1") else name,
    )
    """"none" leaves it in the content."""
    root_path: str = option(
        "", "prefix of all paths behind a proxy, such as /llm", metavar="PATH", group="address"
    )
    """Requests are answered with and without it."""
    ssl_certfile: Path | None = option(None, "TLS certificate chain, PEM", metavar="FILE")
    """None is plain HTTP."""
    ssl_keyfile: Path | None = option(None, "its private key, without a password", metavar="FILE")
    """None: it is in `ssl_certfile`."""
    api_keys: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False, repr=False)
    """Name of a key -> key. Empty: no key is needed."""
    metrics_public: bool = option(False, "answer /metrics without a key", group="access")
    share_prefix_cache: bool = option(
        False, "share cached prefixes between keys: response times then tell what others have asked"
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        "origins of web pages that may call the server (CORS); * is all",
        metavar="A,B",
        parse=parse_origins,
    )
    allowed_hosts: tuple[str, ...] | None = option(
        None,
        "Host headers to answer (default: on loopback its own, else all)",
        metavar="A,B",
        parse=parse_list,
    )
    """Host names without a port; None answers all, and a request without the header, of HTTP/1.0,
    is always answered."""
    default_max_tokens: int | None = option(
        None,
        "max_tokens of chats that name none (default: all that fit)",
        metavar="N",
        parse=token_count,
        group="limits of requests",
    )
    unknown_fields: Literal["refuse", "ignore"] = option(
        "refuse", "what to do with fields that the API does not have (default: %(default)s)"
    )
    """The header `x-ignored-fields` of the answer names those that were ignored."""
    max_body_size: int | None = option(
        None,
        "bytes of a request's body (default: 64 for each token of --max-model-len)",
        metavar="N",
    )
    """Bytes of a request's body; by default from 2 to 32 MiB."""
    max_connections: int = option(4096, "(default: %(default)s)", metavar="N", group="admission")
    max_num_queued_reqs: int | None = option(
        None, "sequences that wait or run (default: four for each slot, at least 64)", metavar="N"
    )
    max_num_queued_tokens: int | None = option(
        None,
        "prompt tokens that wait and are not cached (default: those of 30 s of prefill, at least "
        "four times --max-model-len)",
        metavar="N",
        parse=token_count,
    )
    max_queued_bytes: int = option(
        256 * 2**20, "bytes of the bodies of unanswered requests (default: 256 MiB)", metavar="N"
    )
    max_reqs_per_key: int | None = option(
        None, "sequences of one key that wait or run (default: no limit)", metavar="N"
    )
    scheduling_policy: Literal["fcfs", "priority"] = option(
        "fcfs",
        "order of the requests of one key: of arrival, or of their `priority` (default: "
        "%(default)s)",
    )
    """Lower priorities come first, where 10 s of waiting count as much as a difference of 1."""

    queue_timeout: float = _timeout(120.0, "a request may wait", group="timeouts")
    """Time from its arrival until its prefill begins."""
    request_timeout: float = _timeout(3600.0, "a request may take")
    write_timeout: float = _timeout(60.0, "a client may leave a stream unread")
    """Time in which nothing more is sent, since the system's buffers are full."""
    header_timeout: float = 10.0
    """Time from the first byte of a request to the end of its headers."""
    body_timeout: float = 30.0
    """Time for a body, and one second more for each 64 KiB of it."""
    keep_alive_timeout: float = _timeout(75.0, "a connection may be idle")
    stall_timeout: float = _timeout(60.0, "without an engine step after which /ready fails")
    """Seconds without an engine step while there is work; after twice that the process ends."""
    shutdown_timeout: float = _timeout(30.0, "requests may take after SIGTERM", at_least=0)
    shutdown_delay: float = _timeout(
        0.0, "after SIGTERM in which requests are still accepted", at_least=0
    )
    """For load balancers that lag."""
    sse_keep_alive: float = _timeout(10.0, "of silence after which a stream gets a comment")
    """For proxies that cut silent ones."""

    tokenizer_info: bool = option(
        False,
        "/tokenizer_info: special tokens and the chat template",
        names=("--enable-tokenizer-info", "--enable-tokenizer-info-endpoint"),
        group="optional features",
    )
    request_metrics: bool = option(
        False,
        "`metrics` in answers: the times of the request",
        names=("--enable-per-request-metrics",),
    )
    allow_runtime_lora: Path | None = option(
        None,
        "/v1/load_lora_adapter and /v1/unload_lora_adapter, for adapters below this directory; "
        "with --enable-lora and a key",
        metavar="DIR",
    )
    page: bool = option(True, "no page at / to talk to the model", names=("--no-page", "--no-ui"))
    log_requests: bool = option(
        False,
        "log the beginning of each prompt",
        names=("--log-requests", "--enable-log-requests"),
        group="logs and events",
    )
    max_log_len: int = option(200, "characters of it (default: %(default)s)", metavar="N")
    log_json: bool = option(False, "log JSON objects, one in a line")
    """The log's record of a request has its values as `fields`, in the place of a text."""
    kv_events_config: KVEventsConfig | None = option(
        None,
        "publish what enters and leaves the prefix cache, as vLLM does: "
        '{"endpoint": "tcp://*:5557", "replay_endpoint", "topic", ...}',
        metavar="JSON",
        parse=str,
        convert=KVEventsConfig.from_json,
    )

    def __post_init__(self):
        check_options(self, above=0)
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
