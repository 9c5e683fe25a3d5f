"""The conversion of a model into the weights that an engine serves: at the start, and again for
other weights of the same shapes."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.sharding import Mesh

from ...errors import UsageError
from ...model.config import Config
from ...model.model import Model, check_model
from ...model.quantization import with_kernels, with_scheme
from ...model.stacks import cast
from .memory import allocating
from .serving_form import Weights, serve_model


@dataclasses.dataclass(frozen=True)
class Conversion:
    """Conversion of the models of one engine."""

    shapes: Model
    """The model that it was made from, as `ShapeDtypeStruct`s with shardings."""
    served: Config
    """Architecture that is served (`serving_form.served_config`)."""
    swiftkv: bool
    mesh: Mesh | None
    kernels_of: Any
    """The `jax.Device` whose kernels multiply quantised matrices; None runs them through XLA."""
    quantize_activations: bool = False
    """True if matrices multiply activations in 8 bits, whatever the device's default."""

    @staticmethod
    def shapes_of(model: Model) -> Model:
        """`shapes` of a model that is on its devices."""
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), model
        )

    def __call__(self, model: Model, *, donate: bool) -> Weights:
        """The weights of a model that is on its devices. `donate` as in `Engine.from_model`."""
        with allocating("the copy of the layers in serving form (`donate` keeps them once)"):
            weights = serve_model(model, self.served, self.swiftkv, self.mesh, donate=donate)
        if self.kernels_of is not None:
            weights = with_kernels(weights, self.kernels_of)
        if self.quantize_activations:
            weights = with_scheme(weights, arithmetic="native")
        return weights

    def placed(self, model: Model) -> Model:
        """The model on the devices of the first one; arrays that are there are not moved. Raises
        `UsageError` unless its config, parts, shapes and dtypes are the first one's, and for one
        that was donated. The dtype of a delta may be another: it is cast."""
        check_model(model)
        leaves = jax.tree.leaves(model)
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves):
            raise UsageError("`model` was donated before: its arrays are deleted; load it again")
        expected, tree = jax.tree_util.tree_flatten_with_path(self._served(self.shapes))
        found, tree_found = jax.tree_util.tree_flatten_with_path(self._served(model))
        if model.config != self.shapes.config or tree_found != tree:
            raise UsageError("`model` has not the config and parts of the one that is served")
        for (path, leaf), (_, wanted) in zip(found, expected, strict=True):
            if (leaf.shape, leaf.dtype) != (wanted.shape, wanted.dtype):
                name = jax.tree_util.keystr(path, simple=True, separator=".")
                raise UsageError(
                    f"`model`: {name} is {leaf.dtype}{list(leaf.shape)}, the one that is served "
                    f"is {wanted.dtype}{list(wanted.shape)}"
                )
        pairs = zip(found, expected, strict=True)
        leaves = [_place(leaf, wanted) for (_, leaf), (_, wanted) in pairs]
        return dataclasses.replace(model, **jax.tree.unflatten(tree, leaves))

    def _served(self, model: Model) -> dict[str, Any]:
        """The weights that count, the delta in the dtype of the others."""
        delta = cast(model.swiftkv, model.dtype) if self.swiftkv else None
        return {"llama": model.llama, "swiftkv": delta}


def _place(leaf: Any, wanted: jax.ShapeDtypeStruct) -> jax.Array:
    """The array where `wanted` is; the same if it is there."""
    if isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(wanted.sharding, leaf.ndim):
        return leaf
    return jax.device_put(leaf, wanted.sharding)
