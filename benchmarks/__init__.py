"""Measurements, each one command that checks, times, prints a table and writes JSON into
`benchmarks/results/`.

python -m benchmarks.NAME, where NAME is
    kernels              the attention ops: correctness, speed against cuDNN and the roofline
    kernels.tune         the best block sizes for this device, into `pallas_kernels/tuning.json`
    serve                the engine at Llama-3.1-8B shape: prefill, decode, throughput, both models
    http_load            latency under load, through HTTP
    drafts_and_tiers     steps of several tokens, and pages of the cache in host memory
    train_step           the distillation step: speed, MFU, and memory against the plan
    beside_transformers  the servers of SwiftKV and its teacher beside `transformers serve`
    real                 students of models that people use: text, tasks that read the prompt
    distill_real         trains such students by a plan, and measures them as `real` does
    short_run            measures nothing: runs a plan of such commands within a total time
    measurements         keeps `docs/measurements.md` up to date with the results

`medium/` is a Llama of 16 layers and the proportions of Llama-3.1-8B, for `infer bench --config` on
a CPU. With `--shapes smoke` benchmarks run on a CPU too, as a test, and write JSON only to
`--output`. Times mean something on a GPU or a TPU. Programs of a result
`NAME-compiled-for-DEVICE-*.json` were compiled for the device and counted, never run there. A
benchmark that has answered its question is a result file and a paragraph of the page; its program
is in the history of the repository.
"""
