"""A model as users have it: architecture, weights, and the files that came with them."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from ..errors import ConfigError, UsageError
from .config import Config, GeneratedKV
from .cut import drop_own
from .initialization import init_swiftkv
from .params import Llama, SwiftKV
from .quantization import Scheme, is_quantized, refuse_quantized, scheme_of, values_of
from .stacks import split_layers

LOSS_FIELDS = ("swiftkv_perplexity_loss", "swiftkv_far_loss")
"""Fields of `config.json` on what a student lost when it was made: see `checkpoints.loss_notes`."""


@dataclasses.dataclass(frozen=True, eq=False)
class AuxiliaryFiles:
    """Files of a checkpoint that are kept without being read: tokenizer, chat template, generation
    defaults.

    Compared by identity, so a `Model` can cross `jax.jit`.
    """

    contents: dict[str, bytes] = dataclasses.field(default_factory=dict)
    """File name -> bytes."""
    hf_config: dict[str, Any] = dataclasses.field(default_factory=dict)
    """The `config.json` as it was read; export keeps its fields and overwrites those a `Config`
    determines."""

    def of_new_student(self) -> AuxiliaryFiles:
        """The files without the `LOSS_FIELDS`, which are of the student that they came with."""
        kept = {name: value for name, value in self.hf_config.items() if name not in LOSS_FIELDS}
        return dataclasses.replace(self, hf_config=kept)


@struct.dataclass
class Model:
    """A Llama, with a SwiftKV delta or without. A pytree: the arrays are its leaves."""

    llama: Llama
    """The frozen weights."""
    swiftkv: SwiftKV | None
    """The delta; None for a plain Llama."""
    config: Config = struct.field(pytree_node=False)
    eos_token_ids: tuple[int, ...] = struct.field(pytree_node=False, default=())
    """Tokens that end a generation, from generation_config.json or config.json."""
    tokenizer: Any = struct.field(pytree_node=False, default=None)
    """A transformers tokenizer, or None if the checkpoint brought none."""
    auxiliary_files: AuxiliaryFiles = struct.field(
        pytree_node=False, default_factory=AuxiliaryFiles
    )

    @property
    def dtype(self) -> jnp.dtype:
        return self.llama.embed.dtype

    def __repr__(self) -> str:
        """One line, from shapes alone: nothing is copied from a device."""
        config = self.config
        parts = [config.family, f"{config.num_layers} layers"]
        if self.swiftkv is not None:
            cut = f"K={config.num_key_value_layers} g={config.key_value_group_size}"
            if config.prompt_attention_layers:
                cut += f" M={config.prompt_attention_layers}"
            if config.prompt_mlp_neurons:
                cut += f" m={config.prompt_mlp_neurons}"
            parts.append(f"SwiftKV {cut}{' tap' * config.boundary_taps}")
        arrays = jax.tree.leaves((self.llama, self.swiftkv), is_leaf=is_quantized)
        arrays = list(map(values_of, arrays))
        embed = getattr(self.llama, "embed", None)
        parts.append(str(getattr(embed, "dtype", "no arrays")))
        if (scheme := self.quantization) is not None:
            parts.append(scheme.format)
        count = sum(getattr(leaf, "size", 0) for leaf in arrays)
        return f"Model({', '.join(parts)}, {_rounded(count)} parameters)"

    @property
    def quantization(self) -> Scheme | None:
        """The scheme of the quantised matrices; None if they are not quantised."""
        return scheme_of(self.llama)

    def uses_swiftkv(self, swiftkv: bool | None) -> bool:
        """Resolve the `swiftkv` argument of the public functions: None means the student if there
        is a delta.

        Raises `ValueError` if the student is asked for and there is no delta.
        """
        if swiftkv not in (None, True, False):
            raise ValueError(f"`swiftkv`={swiftkv!r} must be True, False or None")
        if swiftkv and self.swiftkv is None:
            raise ValueError(
                "swiftkv=True, but this model has no delta: add one with add_swiftkv or load a "
                "SwiftKV checkpoint"
            )
        return self.swiftkv is not None if swiftkv is None else swiftkv


def _rounded(count: int) -> str:
    """`2359296` -> `2.4M`."""
    for unit, name in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if count >= unit:
            return f"{count / unit:.1f}{name}"
    return str(count)


def check_model(model: object) -> None:
    """Raise `UsageError` unless `model` is a `Model`: paths and names have to be loaded first."""
    if not isinstance(model, Model):
        raise UsageError(
            f"`model` must be a Model, as swiftkv_jax.load returns it, got {type(model).__name__}"
        )


def default_dtype() -> jnp.dtype:
    """bfloat16 on accelerators, float32 on a CPU (where bfloat16 arithmetic is emulated, several
    times slower)."""
    return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


def cut_of(
    model: Model,
    num_key_value_layers: int,
    key_value_group_size: int,
    prompt_attention_layers: int = 0,
    prompt_mlp_neurons: int = 0,
    boundary_taps: int = 0,
    *,
    generated_kv: GeneratedKV | None = None,
    exact_head: int | None = None,
) -> Config:
    """The architecture of `model` at a cut, for a fresh delta, without what `generated_kv` and
    `exact_head` drop. Raises `ConfigError` if the cut does not fit, and `UsageError` if `model` is
    none."""
    check_model(model)
    for name, value in (
        ("num_key_value_layers", num_key_value_layers),
        ("key_value_group_size", key_value_group_size),
    ):
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise UsageError(f"`{name}`={value!r} must be a whole number")
    if num_key_value_layers < 1:  # 0 means "all" in a configuration file; here it would be a slip
        raise ConfigError(
            f"{num_key_value_layers=} must be from 1 to num_layers={model.config.num_layers}"
        )
    config = drop_own(model.config, generated_kv, exact_head).cut(
        int(num_key_value_layers),
        int(key_value_group_size),
        prompt_attention_layers=prompt_attention_layers,
        prompt_mlp_neurons=prompt_mlp_neurons,
        boundary_taps=boundary_taps,
    )
    return dataclasses.replace(config, shared_kv_heads=None)


def add_swiftkv(
    model: Model,
    num_key_value_layers: int,
    key_value_group_size: int = 1,
    *,
    prompt_attention_layers: int = 0,
    prompt_mlp_neurons: int = 0,
    boundary_taps: int = 0,
) -> Model:
    """Give a model a fresh delta, copied from its own teacher (`initialization.init_swiftkv`).

    The first `num_key_value_layers` layers keep their keys and values; the others share one
    projection per `key_value_group_size` layers, after `prompt_attention_layers` of which prompts
    run the attention and `prompt_mlp_neurons`, and with `boundary_taps` (see `Config`). Any delta
    the model has is left behind; its `generated_kv`, `exact_tail` and `exact_head` stay, as in
    `calibrate`. Raises `ConfigError` if the cut does not fit and `UsageError` if
    the model is quantised, or none.
    """
    config = cut_of(
        model,
        num_key_value_layers,
        key_value_group_size,
        prompt_attention_layers,
        prompt_mlp_neurons,
        boundary_taps,
    )
    refuse_quantized(model.llama, "add_swiftkv")
    llama = split_layers(config, model.llama)
    delta = init_swiftkv(config, llama) if config.num_upper_layers else None
    files = model.auxiliary_files.of_new_student()
    return dataclasses.replace(
        model, config=config, llama=llama, swiftkv=delta, auxiliary_files=files
    )
