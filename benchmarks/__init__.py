"""Measurements, each one command that checks, times, prints a table and writes JSON into
`benchmarks/results/`.

    python -m benchmarks.kernels     the attention ops: right, how fast, against other libraries and the device's limits
    python -m benchmarks.tune        the best block sizes for the device at hand, into `pallas_kernels/tuning.json`
    python -m benchmarks.boundary    what a fused kernel for the key/value projection could still save
    python -m benchmarks.loss        the distillation loss: memory and time against all logits at once
    python -m benchmarks.train_step  the distillation step: operations against two whole models, memory, tokens/s, MFU
    python -m benchmarks.quality     what each cut costs in quality, before and after distillation, on the demo model
    python -m benchmarks.serve       the engine at Llama-3.1-8B shape: prefill, decode, throughput, SwiftKV and teacher
    python -m benchmarks.hf_rival    the same weights in Hugging Face transformers on the same machine
    python -m benchmarks.kv_formats  what caches and weights of 8 bits cost in perplexity, on the demo model

`medium/` is a Llama of 16 layers and the proportions of Llama-3.1-8B, for `infer bench --config` on
a CPU.

With `--shapes smoke` they run on a CPU too, to prove that they work, and write JSON only to
`--output`; `tune --dry-run` lists what it would try. Times mean something on a GPU or a TPU.
"""
