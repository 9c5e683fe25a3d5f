"""Flags of a command in other programs, and what to write here: for errors that name an unknown
flag, and for the table of docs/from-vllm.md.

A key is a flag, or a flag with one of its values. In a text, `{value}` is the value that was given.
"""

from __future__ import annotations

VLLM = {
    "--tensor-parallel-size": "here --mesh {data}x{model}",
    "--data-parallel-size": "here --mesh {data}x{model}",
    "--pipeline-parallel-size": "not here: layers are not divided over devices; --mesh divides "
    "rows and heads",
    "--enable-expert-parallel": "leave it out: --mesh divides experts as it divides heads",
    "--distributed-executor-backend": "here --coordinator-address, --num-processes and "
    "--process-id, for several hosts",
    "--nnodes": "here --coordinator-address, --num-processes and --process-id, for several hosts",
    "--node-rank": "here --coordinator-address, --num-processes and --process-id, for several "
    "hosts",
    "--attention-backend": "here --attention, whose values differ",
    "--kv-cache-memory-bytes": "here --kv-cache-memory {value}",
    "--async-scheduling": "leave it out: the host is always a step behind the device",
    "--api-server-count": "leave it out: one thread has all connections",
    "--num-scheduler-steps": "here --decode-steps {value}",
    "--quantization awq": "leave it out: a quantised checkpoint says how it is stored",
    "--quantization awq_marlin": "leave it out: a quantised checkpoint says how it is stored",
    "--quantization gptq": "leave it out: a quantised checkpoint says how it is stored",
    "--quantization gptq_marlin": "leave it out: a quantised checkpoint says how it is stored",
    "--quantization compressed-tensors": "leave it out: a quantised checkpoint says how it is "
    "stored",
    "--kv-cache-dtype fp8_e5m2": "here fp8, which is e4m3",
    "--dtype half": "here bfloat16 or float32",
    "--dtype float16": "here bfloat16 or float32",
    "--dtype float": "here float32",
    "--load-format": "leave it out: the format is recognised; bench has --load-format dummy",
    "--tokenizer": "leave it out: the tokenizer is the checkpoint's",
    "--tokenizer-mode": "leave it out: the tokenizer is the checkpoint's",
    "--download-dir": "HF_HOME in the environment has the place of the Hub's cache",
    "--hf-token": "HF_TOKEN in the environment has the token of the Hub",
    "--trust-remote-code": "leave it out: code of a checkpoint is never run",
    "--enforce-eager": "leave it out: every program is compiled",
    "--compilation-config": "leave it out; --compiler-option has options of XLA",
    "--enable-chunked-prefill": "leave it out: prompts are always read in chunks, of "
    "--max-num-batched-tokens",
    "--swap-space": "leave it out: nothing is swapped to the host",
    "--cpu-offload-gb": "not here: weights are not offloaded to the host",
    "--kv-offloading-size": "not here: caches are not offloaded to the host",
    "--kv-transfer-config": "not here: one server reads prompts and decodes",
    "--spec-tokens": "here --speculative-config '{{\"num_speculative_tokens\": {value}}}'",
    "--spec-model": 'here --speculative-config \'{{"model": "{value}"}}\', of an LSTM or MLP '
    "speculator",
    "--disable-log-requests": "leave it out: requests are logged with --log-requests alone",
    "--disable-uvicorn-access-log": "leave it out: requests are logged with --log-requests alone",
    "--disable-log-stats": "leave it out: figures are at /metrics",
    "--seed": "a request has `seed`",
    "--hf-overrides": "not here: change config.json",
    "--rope-scaling": "not here: change config.json",
    "--config": "not here: give the flags",
    "--generation-config": "leave it out: the checkpoint's generation_config.json is obeyed",
    "--override-generation-config": "here --temperature, --top-p and the other flags of sampling",
    "--enable-reasoning": "leave it out: --reasoning-parser alone",
    "--guided-decoding-backend": "leave it out: grammars are compiled by llguidance",
    "--structured-outputs-config": "leave it out: grammars are compiled by llguidance",
    "--max-cpu-loras": "leave it out: --max-loras adapters are kept, on the device",
    "--lora-dtype": "leave it out: that of the weights",
    "--limit-mm-per-prompt": "leave it out: there are text models only",
    "--language-model-only": "leave it out: there are text models only",
    "--enable-prompt-tokens-details": "leave it out: usage always has the cached tokens",
    "--sse-keep-alive-interval": "here --sse-keep-alive {value}",
}
"""Flags of `vllm serve`: of 0.33, and some that older versions had."""

TRANSFORMERS = {
    "--num-return-sequences": "here --n {value}",
    "--best-of": "here --n {value}",
    "--max-length": "here --max-tokens, of the answer alone",
    "--do-sample": "here --temperature, above 0",
    "--num-beams": "not here: there is no beam search",
    "--length-penalty": "not here: there is no beam search",
}
"""Arguments of `transformers.GenerationConfig` and of older versions of vLLM."""

VLLM_BENCH_SERVE = {
    "--backend": "leave it out: any server with OpenAI's completions",
    "--endpoint": "leave it out: /v1/completions",
    "--endpoint-type": "leave it out: any server with OpenAI's completions",
    "--host": "here --base-url http://{value}:8000",
    "--port": "here --base-url http://127.0.0.1:{value}",
    "--dataset-name": "leave it out: random token ids, or the prompts of --dataset",
    "--dataset-path": "here --dataset {value}, a JSON object with `prompt` in each line",
    "--random-input-len": "here --input-len {value}",
    "--random-output-len": "here --output-len {value}",
    "--random-prefix-len": "here --prefix-len {value}, which counts in --input-len",
    "--random-range-ratio": "not here: all prompts have one length; --dataset has others",
    "--served-model-name": "here --model {value}",
    "--tokenizer": "leave it out: prompts are token ids",
    "--trust-remote-code": "leave it out: prompts are token ids",
    "--save-result": "here --output FILE",
    "--result-filename": "here --output {value}",
    "--result-dir": "here --output FILE",
    "--ignore-eos": "leave it out: end tokens are ignored without --no-ignore-eos",
    "--temperature": "here --extra-body '{{\"temperature\": {value}}}'",
    "--top-p": "here --extra-body '{{\"top_p\": {value}}}'",
    "--percentile-metrics": "leave it out: all are printed",
    "--metric-percentiles": "leave it out: p50, p90 and p99 are printed",
    "--disable-tqdm": "leave it out: there is no progress bar",
}
"""Flags of `vllm bench serve`."""

TRAINER = {
    "--model-name-or-path": "here --model {value}",
    "--dataset-name": "here --data {value}, a local folder or file",
    "--train-file": "here --data {value}",
    "--validation-file": "here --eval-data {value}",
    "--per-device-train-batch-size": "here --batch-size, rows of a step over all devices",
    "--per-device-eval-batch-size": "leave it out: that of --batch-size",
    "--max-seq-length": "here --max-length {value}",
    "--max-seq-len": "here --max-length {value}",
    "--packing": "leave it out: rows are packed",
    "--lr": "here --learning-rate {value}",
    "--lr-scheduler-type": "here --lr-schedule {value}",
    "--warmup-steps": "here --warmup-ratio, a share of the steps",
    "--weight-decay": "leave it out: there is none",
    "--optim": "leave it out: AdamW without weight decay",
    "--bf16": "here --dtype bfloat16",
    "--fp16": "here --dtype bfloat16",
    "--gradient-checkpointing": "here --remat layer",
    "--deepspeed": "here --mesh fsdp=N",
    "--fsdp": "here --mesh fsdp=N",
    "--tensor-parallel-size": "here --mesh {data}x{model}",
    "--resume-from-checkpoint": "here --resume auto, or a step",
    "--overwrite-output-dir": "not here: name another --output-dir",
    "--run-name": "leave it out: a run is named like its --output-dir",
    "--logging-dir": "leave it out: logs are in --output-dir",
    "--eval-strategy": "leave it out: --eval-steps alone",
    "--evaluation-strategy": "leave it out: --eval-steps alone",
    "--save-strategy": "leave it out: --save-steps alone",
    "--metric-for-best-model": "leave it out: the held-out loss",
    "--do-train": "leave it out",
    "--do-eval": "leave it out: --eval-data alone",
    "--trust-remote-code": "leave it out: code of a checkpoint is never run",
}
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
    found = []
    for name, value in given:
        text = table.get(name)
        found.append(None if text is None else text.format(value=value or "VALUE", **sizes))
    return found
