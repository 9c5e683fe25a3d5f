"""`python -m swiftkv_jax.infer [generate|chat]`: run a model.

With no arguments it continues a line of Python with the demo model. `generate` is the default command:

    python -m swiftkv_jax.infer --model llama-3.1-8b-swiftkv -p "Once upon a time"
    python -m swiftkv_jax.infer --model llama-3.1-8b-swiftkv -i prompts.jsonl -o answers.jsonl
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from pathlib import Path

from tqdm import tqdm

from .. import cli
from ..bundle import Model
from ..cli import log
from ..config import Config
from ..errors import UsageError
from . import chat
from .flags import SWIFTKV, add_model_flags, add_sampling_flags, load_model, sampling_params
from .generate import Engine, check_prompt
from .output import JsonlWriter, Row, TextWriter
from .prompts import Request, read_jsonl, read_text
from .sampling import SamplingParams
from .text import TextStream, encode

DEMO_PROMPT = "def read_lines(path):"


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_model_flags(parser)
    flag = parser.add_argument
    flag("stdin", nargs="?", choices=["-"], help="- reads one prompt from standard input")
    flag("--prompt", "-p", action="append", metavar="TEXT", help="a prompt; repeat to add more")
    flag("--prompt-file", "-f", type=Path, metavar="FILE", help="a file as one prompt")
    flag("--input", "-i", type=Path, metavar="JSONL", help='rows {"id"?, "prompt" | "prompt_token_ids" | "messages"}')
    flag("--output", "-o", type=Path, metavar="JSONL", help="a row per prompt, in order (default: text on standard output)")
    add_sampling_flags(parser, max_tokens=128)
    flag("--max-num-seqs", type=int, default=64, metavar="N", help="rows that run together (default: 64)")
    flag("--stream", action=argparse.BooleanOptionalAction, default=True, help="print text as it comes (default: yes)")


def generate(args: argparse.Namespace) -> int:
    params = sampling_params(args)
    sources = [args.stdin, args.prompt, args.prompt_file, args.input]
    if sum(source is not None for source in sources) > 1:
        raise UsageError("give one of --prompt, --prompt-file, --input and -")
    if args.max_num_seqs < 1:
        raise UsageError(f"--max-num-seqs {args.max_num_seqs} must be at least 1")
    demo = all(source is None for source in sources)
    if demo and args.model is not None:
        raise UsageError("nothing to generate from: give --prompt, --prompt-file, --input or -")
    if args.output and args.output.exists():
        raise UsageError(f"--output {args.output}: exists already; nothing is overwritten, so remove it or choose another path")
    if args.output and not args.output.absolute().parent.is_dir():
        raise UsageError(f"--output {args.output}: its folder does not exist")

    model, mesh = load_model(args)
    if model.tokenizer is None and (args.stop or not args.output):
        raise UsageError("this checkpoint has no tokenizer: write tokens with --output, and leave out --stop")
    rows = [Row(request, _stream(model, args.stop), error=request.error) for request in _requests(args, model)]
    limit = args.max_model_len or model.config.max_position_embeddings
    _check(model.config, rows, params, limit, fail_alone=args.input is not None)
    longest = max((len(row.request.token_ids) for row in rows if row.error is None), default=1)
    live = args.stream and len(rows) == 1 and not args.output
    engine = Engine(
        model,
        swiftkv=SWIFTKV[args.swiftkv],
        max_model_len=args.max_model_len or longest + params.max_tokens,
        max_num_seqs=min(args.max_num_seqs, len(rows)),
        decode_steps=1 if live else 8,
        mesh=mesh,
        attention=args.attention,
    )
    del model  # the engine has its own copy of the layers: memory for one, not two
    _run(engine, rows, params, args, live=live, prefix=DEMO_PROMPT if demo else "")
    for row in rows:
        if row.error is not None:
            log(f"error: {row.error}")
    return cli.SOME_ROWS_FAILED if any(row.error is not None for row in rows) else cli.OK


def _stream(model: Model, stops: list[str]) -> TextStream | None:
    return None if model.tokenizer is None else TextStream(model.tokenizer, stops)


def _requests(args: argparse.Namespace, model: Model) -> list[Request]:
    if args.input is not None:
        return read_jsonl(args.input, model.tokenizer)
    if model.tokenizer is None:
        raise UsageError("this checkpoint has no tokenizer: give prompt_token_ids with --input")
    if args.stdin:
        texts = [sys.stdin.read()]
    elif args.prompt_file is not None:
        texts = [read_text(args.prompt_file)]
    else:
        texts = args.prompt or [DEMO_PROMPT]
    return [Request(number, encode(model.tokenizer, text)) for number, text in enumerate(texts)]


def _check(config: Config, rows: list[Row], params: SamplingParams, limit: int, *, fail_alone: bool) -> None:
    """Raise `UsageError` for a prompt that cannot run; with `fail_alone`, give the error to its row."""
    for number, row in enumerate(rows):
        if row.error is not None:
            continue
        try:
            check_prompt(config, number, row.request.token_ids, params.max_tokens, limit)
        except UsageError as error:
            if not fail_alone:
                raise
            row.error = f"{error} (id {row.request.id!r})"


def _run(engine: Engine, rows: list[Row], params: SamplingParams, args: argparse.Namespace, *, live: bool, prefix: str) -> None:
    running = [row for row in rows if row.error is None]
    if running:
        start = time.perf_counter()
        engine.warm_up()
        log(f"compiled in {time.perf_counter() - start:.1f} s")
    stopped: set[int] = set()
    partial = args.output and args.output.with_name(args.output.name + ".partial")
    with contextlib.ExitStack() as stack:
        if partial:
            writer = JsonlWriter(rows, stack.enter_context(partial.open("w", encoding="utf-8")))
        else:
            writer = TextWriter(rows, sys.stdout, live=live, prefix=prefix)
        progress = stack.enter_context(tqdm(total=len(running), unit="row", disable=None if args.input else True))
        writer.update()
        for event in engine.stream([row.request.token_ids for row in running], params, cancelled=stopped):
            row = running[event.row]
            row.push(event.tokens, event.finish_reason)
            if row.done:
                stopped.add(event.row)
                progress.update()
            writer.update()
        writer.update()
    if partial:
        partial.rename(args.output)  # an interrupted run leaves what it had under the partial name
    _summarise(engine)


def _summarise(engine: Engine) -> None:
    stats = engine.stats
    if stats.first_token_seconds is not None:
        log(
            f"prompt: {stats.prompt_tokens} tokens, {stats.prompt_tokens / stats.prefill_seconds:.0f} tokens/s; "
            f"first token after {stats.first_token_seconds:.3f} s; "
            f"generated: {stats.new_tokens} tokens, {stats.new_tokens / stats.decode_seconds:.1f} tokens/s; "
            f"KV cache: {engine.kv_bytes_per_token} bytes/token"
        )


COMMANDS = {"generate": (generate, add_flags), "chat": (chat.main, chat.add_flags)}


def parser(command: str) -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog=f"python -m swiftkv_jax.infer {command}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    COMMANDS[command][1](result)
    return result


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    command, argv = (argv[0], argv[1:]) if argv and argv[0] in COMMANDS else ("generate", argv)
    args = parser(command).parse_args(argv)
    return cli.run(lambda: COMMANDS[command][0](args))


if __name__ == "__main__":
    sys.exit(main())
