"""A model as a `flax.nnx` module, for tools that work on those: optimisers, quantisers, Orbax.

    module = nnx.LlamaForCausalLM(model)
    module(tokens)                                                       # as swiftkv_jax.logits
    optimizer = flax.nnx.Optimizer(module, optax.adamw(1e-4), wrt=flax.nnx.Param)  # of the delta
    model = module.to_model()                                            # back, the same arrays

It is a view: its variables hold the model's own arrays, under the names of the fields of `params`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Float, Int

from .api import logits
from .model.model import Model, check_model


class Frozen(nnx.Variable):
    """A weight of the original model, which SwiftKV does not train."""


class LlamaForCausalLM(nnx.Module):
    """A model of any family. The arrays of its delta are `flax.nnx.Param`s and the others `Frozen`;
    without a delta all are `flax.nnx.Param`s. Raises `UsageError` if `model` is none."""

    def __init__(self, model: Model):
        check_model(model)
        found = jax.tree_util.tree_leaves_with_path(model)
        paths = tuple(tuple(key.name for key in path) for path, _ in found)
        tree: dict[str, Any] = {}
        for path, (_, leaf) in zip(paths, found, strict=True):
            trained = path[0] == "swiftkv" or model.swiftkv is None
            place = functools.reduce(lambda at, name: at.setdefault(name, {}), path[:-1], tree)
            place[path[-1]] = nnx.Param(leaf) if trained else Frozen(leaf)
        self.llama = _dict(tree["llama"])
        self.swiftkv = _dict(tree["swiftkv"]) if "swiftkv" in tree else None
        self.paths = nnx.static(paths)
        self.structure = nnx.static(jax.tree.structure(model))

    def __repr__(self) -> str:
        """One line, from shapes alone."""
        return f"{type(self).__name__}({self.to_model()!r})"

    def __call__(
        self, tokens: Int[Array, "B T"], *, swiftkv: bool | None = None
    ) -> Float[Array, "B T V"]:
        """`swiftkv_jax.logits`: of the student if there is a delta, or as `swiftkv` says."""
        return logits(self.to_model(), tokens, swiftkv=swiftkv)

    def to_model(self) -> Model:
        """The model, with the arrays that the variables hold now."""
        variables: Any = (functools.reduce(getattr, path, self) for path in self.paths)
        return jax.tree.unflatten(self.structure, [variable[...] for variable in variables])


def _dict(tree: dict[str, Any]) -> nnx.Dict:
    return nnx.Dict(
        {name: _dict(leaf) if isinstance(leaf, dict) else leaf for name, leaf in tree.items()}
    )
