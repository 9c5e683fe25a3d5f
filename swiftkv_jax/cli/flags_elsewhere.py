"""Flags of a command in other programs, and what to write here: for errors that name an unknown
flag, and for the table of docs/from-vllm.md.

A key is a flag, or a flag with one of its values. In a text, `{value}` is the value that was given.
"""

from __future__ import annotations


def _by_flag(lines: str) -> dict[str, str]:
    """Flag -> text, of lines with the flags before the first colon."""
    rows = (line.partition(": ") for line in lines.strip().splitlines())
    return {flag: text for flags, _, text in rows for flag in flags.split(", ")}


VLLM = _by_flag("""
--tensor-parallel-size, --data-parallel-size: use --mesh {data}x{model}
--pipeline-parallel-size: unsupported: layers are not divided over devices; --mesh divides rows \
and heads
--enable-expert-parallel: leave it out: --mesh divides experts as it divides heads
--distributed-executor-backend, --nnodes, --node-rank: use --coordinator-address, \
--num-processes and --process-id, for several hosts
--attention-backend: use --attention, whose values differ
--kv-cache-memory-bytes: use --kv-cache-memory {value}
--async-scheduling: leave it out: the host is always a step behind the device
--api-server-count: leave it out: one thread handles all connections
--num-scheduler-steps: use --decode-steps {value}
--quantization awq, --quantization awq_marlin, --quantization gptq, --quantization gptq_marlin, \
--quantization compressed-tensors: leave it out: a quantised checkpoint says how it is stored
--kv-cache-dtype fp8_e5m2: use fp8, which is e4m3
--dtype half, --dtype float16: use bfloat16 or float32
--dtype float: use float32
--load-format: leave it out: the format is recognised; bench has --load-format dummy
--tokenizer, --tokenizer-mode: leave it out: the tokenizer is the checkpoint's
--download-dir: set HF_HOME in the environment, the folder of the Hub's cache
--hf-token: set HF_TOKEN in the environment
--trust-remote-code: leave it out: code of a checkpoint is never run
--enforce-eager: leave it out: every program is compiled
--compilation-config: leave it out; --compiler-option passes options to XLA
--enable-chunked-prefill: leave it out: prompts are always read in chunks, of \
--max-num-batched-tokens
--swap-space: leave it out: preempted requests are recomputed
--cpu-offload-gb: unsupported: weights stay on the device
--kv-offloading-size: use --prefix-cache-host SIZE: pages that leave the prefix cache go to host \
memory
--kv-transfer-config: unsupported: one server reads prompts and decodes
--spec-tokens: use --speculative-config '{{"num_speculative_tokens": {value}}}'
--spec-model: use --speculative-config '{{"model": "{value}"}}', of an LSTM or MLP speculator
--disable-log-requests, --disable-uvicorn-access-log: leave it out: prompts are logged only with \
--log-requests
--disable-access-log-for-endpoints: leave it out: polls of /health, /metrics and the like are not \
logged
--disable-log-stats: leave it out: figures are at /metrics
--seed: give each request a `seed`
--hf-overrides, --rope-scaling: unsupported: change config.json
--config: unsupported: give the flags
--generation-config: leave it out: the checkpoint's generation_config.json is obeyed
--override-generation-config: use --temperature, --top-p and the other flags of sampling
--enable-reasoning: leave it out: --reasoning-parser is enough
--guided-decoding-backend, --structured-outputs-config: leave it out: grammars are compiled by \
llguidance
--max-cpu-loras: leave it out: --max-loras adapters are kept, on the device
--lora-dtype: leave it out: adapters have the dtype of the weights
--limit-mm-per-prompt, --language-model-only: leave it out: all models read text only
--enable-prompt-tokens-details: leave it out: usage always has the cached tokens
--sse-keep-alive-interval: use --sse-keep-alive {value}
""")
"""Flags of `vllm serve`: of 0.33, and some that older versions had."""

TRANSFORMERS = _by_flag("""
--num-return-sequences, --best-of: use --n {value}
--max-length: use --max-tokens, of the answer alone
--do-sample: use --temperature, above 0
--num-beams, --length-penalty: unsupported: there is no beam search
""")
"""Arguments of `transformers.GenerationConfig` and of older versions of vLLM."""

VLLM_BENCH_SERVE = _by_flag("""
--backend, --endpoint-type: leave it out: any server with OpenAI's completions
--endpoint: leave it out: /v1/completions
--host: use --base-url http://{value}:8000
--port: use --base-url http://127.0.0.1:{value}
--dataset-name: leave it out: random token ids, or the prompts of --dataset
--dataset-path: use --dataset {value}, a JSON object with `prompt` in each line
--random-input-len: use --input-len {value}
--random-output-len: use --output-len {value}
--random-prefix-len: use --prefix-len {value}, which counts in --input-len
--random-range-ratio: unsupported: all prompts have one length; --dataset has others
--served-model-name: use --model {value}
--tokenizer, --trust-remote-code: leave it out: prompts are token ids
--save-result, --result-dir: use --output FILE
--result-filename: use --output {value}
--ignore-eos: leave it out: end tokens are ignored without --no-ignore-eos
--temperature: use --extra-body '{{"temperature": {value}}}'
--top-p: use --extra-body '{{"top_p": {value}}}'
--percentile-metrics: leave it out: all are printed
--metric-percentiles: leave it out: p50, p90 and p99 are printed
--disable-tqdm: leave it out: there is no progress bar
""")
"""Flags of `vllm bench serve`."""

TRAINER = _by_flag("""
--model-name-or-path: use --model {value}
--dataset-name: use --data {value}, a local folder or file
--train-file: use --data {value}
--validation-file: use --eval-data {value}
--per-device-train-batch-size: use --batch-size, rows of a step over all devices
--per-device-eval-batch-size: leave it out: that of --batch-size
--max-seq-length, --max-seq-len: use --max-length {value}
--packing: leave it out: rows are packed
--lr: use --learning-rate {value}
--lr-scheduler-type: use --lr-schedule {value}
--warmup-steps: use --warmup-ratio, a share of the steps
--weight-decay: leave it out: there is none
--optim: leave it out: AdamW without weight decay
--bf16, --fp16: use --dtype bfloat16
--gradient-checkpointing: use --remat layer
--deepspeed, --fsdp: use --mesh fsdp=N
--tensor-parallel-size: use --mesh {data}x{model}
--resume-from-checkpoint: use --resume auto, or a step
--overwrite-output-dir: unsupported: name another --output-dir
--run-name: leave it out: a run is named like its --output-dir
--logging-dir: leave it out: logs are in --output-dir
--eval-strategy, --evaluation-strategy: leave it out: --eval-steps alone
--save-strategy: leave it out: --save-steps alone
--metric-for-best-model: leave it out: the held-out loss
--do-train: leave it out
--do-eval: leave it out: --eval-data alone
--trust-remote-code: leave it out: code of a checkpoint is never run
""")
"""Flags of the trainers of transformers and TRL."""

_ALIASES = {"-tp": "--tensor-parallel-size", "-dp": "--data-parallel-size"} | {
    "-pp": "--pipeline-parallel-size",
    "-q": "--quantization",
}
_MESH = {"--data-parallel-size": "data", "--tensor-parallel-size": "model"}


def advice(table: dict[str, str], flags: list[tuple[str, str | None]]) -> list[str | None]:
    """Say what to write in the place of each of the `flags` of a command line, with their values;
    None for those that `table` lacks."""
    given = [(_ALIASES.get(name, name), value) for name, value in flags]
    sizes = {"data": "1", "model": "1"} | {
        _MESH[name]: value or "N" for name, value in given if name in _MESH
    }
    return [
        text and text.format(value=value or "VALUE", **sizes)
        for text, value in ((table.get(name), value) for name, value in given)
    ]
