"""Hugging Face transformers on a CPU, one prompt at a time: the process that `hf_baseline` starts.
It imports nothing of this repository.

    python -P benchmarks/hf_baseline_worker.py --model DIR --output-len 32 --threads 2

Prints a line of JSON with its versions, then for each line of standard input, a JSON list of token
ids, one with its times: `ttft`, the prompt and the first new token; `tpot`, each further token; and
`tokens`, the greedy continuation.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
import time
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="a Hugging Face checkpoint")
    parser.add_argument("--output-len", type=int, required=True, help="new tokens, at least 2")
    parser.add_argument("--threads", type=int, required=True, help="of torch")
    args = parser.parse_args()
    torch: Any = importlib.import_module("torch")  # not a dependency of this repository
    transformers: Any = importlib.import_module("transformers")
    torch.set_num_threads(args.threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    versions = {
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    print(json.dumps(versions | {"threads": torch.get_num_threads()}), flush=True)
    with torch.inference_mode():
        for line in sys.stdin:
            print(
                json.dumps(_continue(torch, model, json.loads(line), args.output_len)), flush=True
            )


def _continue(torch: Any, model: Any, prompt: list[int], output_len: int) -> dict[str, Any]:
    """Greedy continuation and its times. Not by `generate`, which would add its own work to each
    token. Logits are computed for the last token only."""
    start, cpu = time.perf_counter(), time.process_time()
    step = model(torch.tensor([prompt]), use_cache=True, logits_to_keep=1)
    token = step.logits[:, -1].argmax(-1)
    tokens = [int(token)]
    first, first_cpu = time.perf_counter(), time.process_time()
    for _ in range(output_len - 1):
        step = model(token[:, None], past_key_values=step.past_key_values, use_cache=True)
        token = step.logits[:, -1].argmax(-1)
        tokens.append(int(token))
    end, end_cpu = time.perf_counter(), time.process_time()
    more = output_len - 1
    cpu_times = {"ttft_cpu": first_cpu - cpu, "tpot_cpu": (end_cpu - first_cpu) / more}
    return {"ttft": first - start, "tpot": (end - first) / more, "tokens": tokens} | cpu_times


if __name__ == "__main__":
    main()
