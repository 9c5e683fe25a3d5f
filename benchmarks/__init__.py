"""Measurements, each one command that checks, times, prints a table and writes JSON into
`benchmarks/results/`.

python -m benchmarks.NAME, where NAME is
    kernels           the attention ops: correctness, speed against other libraries and the roofline
    kernels.tune      the best block sizes for this device, into `pallas_kernels/tuning.json`
    kv_projection     what a fused kernel for the key/value projection could still save
    loss              the distillation loss: memory and time against all logits at once
    train_step        the distillation step: operations against two whole models, memory, speed, MFU
    teachers          makes a teacher for `quality`: a small Llama trained on Python source
    quality           students beside their teacher, by cut, start, training and serving (demo)
    real              students of models that people use: text, tasks that read the prompt
    distill_real      trains such students by a plan, and measures them as `real` does
    closed_form       what limits the closed form: calibration tokens, keys or values (demo)
    hidden_loss       whether the weight of the hidden state's error matters in training (demo)
    serve             the engine at Llama-3.1-8B shape: prefill, decode, throughput, both models
    http              what the HTTP server costs beside the engine alone
    hf_serve          this package's server beside `transformers serve`: speed and behaviour
    command_buffers   the engine's programs under XLA's options for command buffers: tokens, times
    predict           what kernels and serve measure, by count of bytes, products and launches
    hf_baseline       the same weights in Hugging Face transformers on the same machine
    kv_quantization   what caches and weights of 8 bits cost in perplexity (demo)
    short_run         measures nothing: runs a plan of such commands within a total time
    real_models       measures nothing: fetches the real models for the others and for tests

`medium/` is a Llama of 16 layers and the proportions of Llama-3.1-8B, for `infer bench --config` on
a CPU.

With `--shapes smoke` they run on a CPU too, as a test, and write JSON only to `--output`;
`kernels.tune --dry-run` lists its candidates. Times mean something on a GPU or a TPU. Programs of a
result `NAME-compiled-for-DEVICE-*.json` were compiled for the device and counted, never run there;
`predicted-for-DEVICE-*.json` comes from a model.
"""
