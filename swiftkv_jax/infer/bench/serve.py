"""The command `bench serve`: how fast a server answers."""

from __future__ import annotations

import argparse
import asyncio
import datetime
import itertools
import logging
import math
import random
import time
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from typing import Any

from ...cli import ERROR, OK
from ...cli.fields import given
from ...errors import DataError, UsageError
from ...process.files import check_absent, write_json
from ...process.jsonl import parse_object, read_lines
from ...process.provenance import command
from .cells import TIMES, Timed, arrival_times, spread, times_of
from .http_client import Client
from .serve_arguments import ServeBenchOptions

logger = logging.getLogger(__name__)

MAX_CPU_SHARE = 0.6


def main(args: argparse.Namespace) -> int:
    options = ServeBenchOptions(**given(ServeBenchOptions, args))
    check_absent("`output`", options.output)
    if not options.request_rate > 0:
        raise UsageError(f"`request_rate`={options.request_rate} must be above 0")
    if options.prefix_len >= options.input_len:
        raise UsageError(f"`prefix_len`={options.prefix_len} must be below `input_len`")
    if options.dataset is None:
        prompts: list[Any] = random_prompts(options)
    else:
        prompts = read_prompts(options.dataset)
    prompts = list(itertools.islice(itertools.cycle(prompts), options.num_prompts))
    result = asyncio.run(measure(options, prompts))
    timed: list[Timed] = result.pop("timed")
    result |= summary(timed, result["seconds"])
    print(table(result))
    if options.output is not None:
        write_json(options.output, _document(options, result, timed))
        logger.info(f"written to {options.output}")
    if result["client_cpu_share"] > MAX_CPU_SHARE:
        raise DataError(
            f"this client used {result['client_cpu_share']:.0%} of a core, above "
            f"{MAX_CPU_SHARE:.0%}: it may be what was measured"
        )
    return ERROR if result["failed"] else OK


def read_prompts(file: Path) -> list[Any]:
    """`prompt` of each line. Raises `DataError`."""
    prompts = []
    for line in read_lines(file):
        try:
            prompts.append(parse_object(line.content)["prompt"])
        except (DataError, KeyError):
            raise DataError(f"{line.where}: expected an object with `prompt`") from None
    if not prompts:
        raise DataError(f"{file}: there is no prompt in it")
    return prompts


def random_prompts(options: ServeBenchOptions) -> list[list[int]]:
    rng = random.Random(options.seed)

    def draw(count: int) -> list[int]:
        return [rng.randrange(options.vocab_size) for _ in range(count)]

    prefix = draw(options.prefix_len)
    rest = options.input_len - options.prefix_len
    return [prefix + draw(rest) for _ in range(options.num_prompts)]


async def measure(options: ServeBenchOptions, prompts: Sequence[Any]) -> dict[str, Any]:
    """Run all requests. Raises `DataError` if there is no server, or it refuses a request of the
    warm-up."""
    try:
        client = Client(options.base_url, api_key=options.api_key)
    except ValueError as error:
        raise UsageError(f"`base_url`: {error}") from None
    try:
        model = options.model or client.first_model()
    except (OSError, HTTPException, ValueError, LookupError) as error:
        raise DataError(f"no server at {options.base_url}: {error}") from None
    body = {
        "model": model,
        "max_tokens": options.output_len,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if options.ignore_eos:
        body["ignore_eos"] = True
    body |= options.extra_body
    rng = random.Random(options.seed + 1)
    for _ in range(options.num_warmups):
        warm = await client.complete(body | {"prompt": [rng.randrange(options.vocab_size)] * 8})
        if warm.error:
            raise DataError(f"the server refuses a request: {warm.error}")
    gate = asyncio.Semaphore(options.max_concurrency or len(prompts))

    async def one(prompt: Any) -> Timed:
        async with gate:
            return await client.complete(body | {"prompt": prompt})

    arrivals = arrival_times(len(prompts), options.request_rate, options.seed)
    begin = time.perf_counter()
    cpu = time.thread_time()
    tasks = []
    for prompt, at in zip(prompts, arrivals, strict=True):
        await asyncio.sleep(max(begin + at - time.perf_counter(), 0))
        tasks.append(asyncio.ensure_future(one(prompt)))
    timed = [await task for task in tasks]
    seconds = time.perf_counter() - begin
    cpu = time.thread_time() - cpu
    client.close()
    return {"model": model, "timed": timed, "seconds": seconds, "client_cpu_share": cpu / seconds}


def summary(timed: Sequence[Timed], seconds: float) -> dict[str, Any]:
    """Rates and times of a run."""
    good = [one for one in timed if one.error is None]
    result: dict[str, Any] = {
        "completed": len(good),
        "failed": len(timed) - len(good),
        "errors": sorted({one.error for one in timed if one.error})[:5],
        "prompt_tokens": sum(one.num_prompt_tokens for one in good),
        "output_tokens": sum(one.num_tokens for one in good),
    }
    result["requests_per_s"] = len(good) / seconds
    result["output_tokens_per_s"] = result["output_tokens"] / seconds
    result["tokens_per_s"] = (result["output_tokens"] + result["prompt_tokens"]) / seconds
    return result | {name: spread(values) for name, values in times_of(good).items() if values}


def table(result: dict[str, Any]) -> str:
    """The figures, as a table of Markdown."""
    lines = [
        f"{result['completed']} requests, {result['failed']} failed, {result['seconds']:.2f} s; "
        f"{result['requests_per_s']:.2f} requests/s, {result['output_tokens_per_s']:.1f} output "
        f"tokens/s, {result['tokens_per_s']:.1f} tokens/s in all; the client used "
        f"{result['client_cpu_share']:.0%} of a core",
        *(f"failed: {error}" for error in result["errors"]),
    ]
    lines += ["", "| ms | mean | p50 | p90 | p99 |", "| --- | ---: | ---: | ---: | ---: |"]
    for name in TIMES:
        if name in result:
            cells = (f"{1e3 * value:.2f}" for value in result[name].values())
            lines.append(f"| {name.upper()} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _document(
    options: ServeBenchOptions, result: dict[str, Any], timed: Sequence[Timed]
) -> dict[str, Any]:
    recorded = {name: value for name, value in vars(options).items() if value != math.inf}
    del recorded["api_key"], recorded["output"]
    if options.dataset is not None:
        recorded["dataset"] = str(options.dataset)
    begin = min((one.sent for one in timed if one.sent), default=0.0)
    rows = [
        {
            "sent": one.sent - begin if one.sent else None,  # None: there was no connection
            "arrivals": [at - begin for at in one.arrivals],
            "tokens": one.num_tokens,
            "error": one.error,
        }
        for one in timed
    ]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command(secret="--api-key"),
        "options": recorded,
        **result,
        "requests": rows,
    }
