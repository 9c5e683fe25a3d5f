"""A distillation run, in the order it happens."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from tqdm import tqdm

from ..bundle import Model
from ..checkpoints import load, open_any, save_hf
from ..checkpoints.digest import digest
from ..cli import INTERRUPTED, OK, log
from ..config import Config
from ..cost import train_flops_per_token
from ..errors import CheckpointError, DivergenceError, UsageError
from ..params import cast, init_swiftkv
from ..sharding import batch_sharding, make_mesh, swiftkv_shardings
from .loader import batches, first_batches
from .metrics import MetricsLog, Progress, measure_matmul_rate
from .packing import PackedRows, pack
from .recipe import Recipe
from .recovery import RunCheckpoints, prepare_folder
from .sources import STDLIB, read, tokenize
from .step import init_state, make_eval_step, make_optimizer, make_train_step, state_shapes, state_shardings


def run(recipe: Recipe) -> int:
    """Distil a delta and export the model to `output_dir/model`. Returns the exit code.

    Continues from the newest checkpoint in `output_dir` if there is one. On SIGINT or SIGTERM the current step is
    finished and saved first.
    """
    mesh = make_mesh(recipe.mesh)
    model = load_model(recipe, mesh)
    config, llama, export_dtype = model.config, model.llama, source_dtype(model)
    log(describe(recipe, model, mesh))

    rows = load_rows(recipe.data, model.tokenizer, recipe.max_length, "training")
    eval_rows = None
    if recipe.eval_data:
        eval_rows = load_rows((recipe.eval_data,), model.tokenizer, recipe.max_length, "held-out", held_out=True)
    steps = recipe.max_steps or max(1, len(rows) // recipe.batch_size)

    prepare_folder(recipe.output_dir)
    optimizer = make_optimizer(recipe, steps)
    checkpoints = RunCheckpoints(recipe, fingerprint(recipe, model, rows, steps))
    state = checkpoints.restore(state_shapes(config, optimizer), state_shardings(config, optimizer, mesh))
    if state is None:
        assert model.swiftkv is not None
        state = init_state(config, optimizer, mesh, model.swiftkv)
    model = dataclasses.replace(model, swiftkv=None)  # the state's master copy is the delta from here on
    first, exported = int(state.step), recipe.output_dir / "model"
    if exported.exists():
        checkpoints.close()
        if first < steps:
            raise UsageError(f"--output-dir {recipe.output_dir} holds the model of a finished run; name another, or remove {exported}")
        log(f"finished {steps} steps before: the model is in {exported}")
        return OK
    if first:
        log(f"continuing after step {first} of {steps}")

    train_step = make_train_step(config, recipe, optimizer, mesh)
    eval_step = make_eval_step(config, recipe, mesh)
    write_settings(recipe, config, steps)
    with contextlib.ExitStack() as stack:
        stack.callback(checkpoints.close)
        metrics = stack.enter_context(contextlib.closing(MetricsLog(recipe.output_dir / "metrics.jsonl", first_step=first)))

        def evaluate(state) -> None:
            if eval_rows is not None:
                results = evaluate_delta(eval_step, state.delta, llama, eval_rows, recipe, mesh)
                log(f"step {int(state.step)}: held-out " + "  ".join(f"{name} {value:.4f}" for name, value in results.items()))
                metrics.write({"step": int(state.step)} | {f"eval_{name}": value for name, value in results.items()})

        if first == 0:
            evaluate(state)
        progress = Progress(
            first_step=first,
            steps=steps,
            flops_per_token=train_flops_per_token(config, recipe.max_length, remat=recipe.remat),
            matmul_rate=measure_matmul_rate(model.dtype, mesh.size),
        )
        stack.callback(progress.close)
        signals = stack.enter_context(StopSignals())
        for step, batch in enumerate(batches(rows, recipe.batch_size, seed=recipe.seed, start=first, stop=steps), start=first + 1):
            state, values = train_step(state, llama, jax.device_put(batch, batch_sharding(mesh)))
            progress.advance(recipe.batch_size * recipe.max_length)
            if step == first + 1:
                jax.block_until_ready(state)
                progress.restart_clock()
            stop = signals.received  # read once: a signal that comes later stops the next step
            last = step == steps or bool(stop)
            if last or step % recipe.logging_steps == 0 or step % recipe.save_steps == 0:
                numbers = finite_numbers(step, values, recipe)
                if step % recipe.logging_steps == 0 or step == steps:
                    metrics.write({"step": step} | numbers | progress.report(step, numbers))
                if last or step % recipe.save_steps == 0:
                    checkpoints.save(state)
            if stop and step < steps:
                log(f"stopped after step {step} of {steps}; the same command continues")
                return INTERRUPTED if stop == signal.SIGINT else OK
        evaluate(state)

    finished = dataclasses.replace(model, llama=cast(llama, export_dtype), swiftkv=cast(state.delta, export_dtype))
    save_hf(finished, exported)
    log(f"finished {steps} steps: the model is in {exported}")
    return OK


def finite_numbers(step: int, values: dict[str, jax.Array], recipe: Recipe) -> dict[str, float]:
    """The metrics on the host. Raises `DivergenceError` if the step went wrong: nothing of it may be saved or exported."""
    numbers = {name: float(value) for name, value in values.items()}
    if not np.isfinite(numbers["loss"]) or not np.isfinite(numbers["grad_norm"]):
        what = f"loss {numbers['loss']}, gradient norm {numbers['grad_norm']}"
        raise DivergenceError(f"step {step}: {what}; checkpoints in {recipe.output_dir} are from before")
    return numbers


def load_model(recipe: Recipe, mesh: Mesh) -> Model:
    """The frozen weights split at the cut, and a delta: the checkpoint's own if it has this cut, else a fresh one."""
    found = open_any(recipe.model).config
    has_delta = found.num_upper_layers > 0
    layers = recipe.num_key_value_layers or (found.num_key_value_layers if has_delta else max(1, found.num_layers // 2))
    same_layers = has_delta and layers == found.num_key_value_layers
    config = found.cut(layers, recipe.key_value_group_size or (found.key_value_group_size if same_layers else 1))
    if recipe.max_length > config.max_position_embeddings:
        raise UsageError(f"--max-length {recipe.max_length}: this model has {config.max_position_embeddings} positions")
    if not -config.num_layers - 1 <= recipe.hidden_loss_layer <= config.num_layers:
        limits = f"from {-config.num_layers - 1} to {config.num_layers}"
        raise UsageError(f"--hidden-loss-layer {recipe.hidden_loss_layer}: must be {limits}")
    if config.num_upper_layers == 0:
        raise UsageError(f"--num-key-value-layers {layers}: this model has {config.num_layers} layers, so nothing is left to distil")
    model = load(recipe.model, dtype=recipe.dtype, mesh=mesh, config=config)
    if model.swiftkv is None:
        init = jax.jit(init_swiftkv, static_argnums=0, out_shardings=swiftkv_shardings(config, mesh))
        model = dataclasses.replace(model, swiftkv=init(config, model.llama))
    if model.tokenizer is None:
        raise UsageError(f"--model {recipe.model}: it has no tokenizer, so text cannot be read")
    return model


def load_rows(sources: tuple[str, ...], tokenizer, length: int, what: str, *, held_out: bool = False) -> PackedRows:
    """Read, tokenise and pack every source, with progress on stderr."""
    documents = (document for source in sources for document in read(source, held_out=held_out and source == STDLIB))
    rows = pack(tokenize(tqdm(documents, desc=f"{what} data", unit=" documents", leave=False, disable=None), tokenizer), length)
    log(f"{what} data: {rows.num_tokens:,} tokens in {len(rows):,} rows of {length}, {rows.num_tokens / rows.tokens.size:.1%} full")
    return rows


def evaluate_delta(eval_step, delta, llama, rows: PackedRows, recipe: Recipe, mesh: Mesh) -> dict[str, float]:
    """Teacher and student on the first rows of a data set: perplexities, agreement, KL and hidden loss, per token."""
    limit = recipe.eval_batches
    parts = [
        eval_step(delta, llama, jax.device_put(batch, batch_sharding(mesh)))
        for batch in first_batches(rows, recipe.batch_size, limit=limit)
    ]
    means = {name: float(value) for name, value in jax.tree.map(lambda *leaves: jnp.stack(leaves).sum(), *parts).means().items()}
    return {
        "teacher_perplexity": float(np.exp(means.pop("teacher_loss"))),
        "student_perplexity": float(np.exp(means.pop("student_loss"))),
        **means,
    }


def fingerprint(recipe: Recipe, model: Model, rows: PackedRows, steps: int) -> dict[str, Any]:
    """What must be the same for a checkpoint to be continued: weights, data, and the settings that steer the updates."""
    settings = "batch_size max_length learning_rate warmup_ratio temperature hidden_loss_weight hidden_loss_layer seed".split()
    data = zlib.crc32(rows.loss_mask.tobytes(), zlib.crc32(rows.tokens.tobytes()))
    weights = zlib.crc32(b"".join(digest(leaf).to_bytes(8, "little") for leaf in jax.tree.leaves((model.llama, model.swiftkv))))
    return {name: getattr(recipe, name) for name in settings} | {
        "steps": steps,
        "dtype": str(model.dtype),
        "num_key_value_layers": model.config.num_key_value_layers,
        "key_value_group_size": model.config.key_value_group_size,
        "base_model": f"{weights:08x}",
        "data": f"{data:08x}",
    }


def describe(recipe: Recipe, model: Model, mesh: Mesh) -> str:
    config = model.config
    frozen, trained = (sum(leaf.size for leaf in jax.tree.leaves(tree)) for tree in (model.llama, model.swiftkv))
    device = jax.devices()[0]
    emulated = " (emulated: for trying out, not for speed)" if device.platform == "cpu" and mesh.size > 1 else ""
    return (
        f"{recipe.model}: {frozen:,} frozen and {trained:,} trained parameters; {config.num_key_value_layers} of {config.num_layers} "
        f"layers own their keys and values, the others share in groups of {config.key_value_group_size}\n"
        f"{model.dtype} on a {recipe.mesh[0]}x{recipe.mesh[1]} data x model mesh of {device.device_kind} devices{emulated}"
    )


def write_settings(recipe: Recipe, config: Config, steps: int) -> None:
    """The resolved recipe beside the run, for whoever finds it later."""
    settings = dataclasses.asdict(recipe) | {"max_steps": steps, "config": dataclasses.asdict(config), "jax": jax.__version__}
    (recipe.output_dir / "recipe.json").write_text(json.dumps(settings, indent=2, default=str) + "\n")


def source_dtype(model: Model) -> jnp.dtype:
    """The dtype the checkpoint came in: what the run read widened is written as it was. Raises `CheckpointError`."""
    hf = model.side_files.hf_config
    name = hf.get("torch_dtype") or hf.get("dtype") or model.dtype
    if name not in ("float32", "bfloat16", "float16", model.dtype):
        raise CheckpointError(f"config.json: torch_dtype={name!r} is not supported; supported: float32, bfloat16, float16")
    return jnp.dtype(name)


class StopSignals:
    """Notes SIGINT and SIGTERM instead of dying from them; a second one acts as usual."""

    received: int = 0

    def __enter__(self) -> StopSignals:
        self._previous = {number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def _note(self, number: int, frame: Any) -> None:
        self.received = number
        log("finishing and saving the current step; once more to stop at once")
        self._restore()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def __exit__(self, *exception: Any) -> None:
        self._restore()
