"""Convert Flax NNX modules to models."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax import Array

from fedda.errors import InputError
from fedda.models import Model, Params, given_module


def from_nnx(make: Callable[[Any], Any]) -> Model:
    """Return a model from a Flax NNX module.

    The parameters are the module's `nnx.Param` values, as nested dictionaries of arrays. Dropout
    and other random layers get a new key for every training batch, and are off in evaluation.

    Args:
        make: `(rngs) -> module`, makes the module from an `nnx.Rngs`.

    Returns:
        The model.

    Raises:
        InputError: `make` is a module instead of a function, or the module has state besides its
            parameters, such as the statistics of BatchNorm.

    Example:
        >>> import jax, numpy as np
        >>> from flax import nnx
        >>> import fedda
        >>> model = fedda.models.from_nnx(lambda rngs: nnx.Linear(64, 10, rngs=rngs))
        >>> model.apply(model.init(jax.random.key(0)), np.ones((3, 64))).shape
        (3, 10)
    """
    if isinstance(make, nnx.Module):
        raise given_module("from_nnx", "rngs", make)

    def build(key: Array) -> Any:
        return make(nnx.Rngs(key))

    shape = nnx.eval_shape(lambda: build(jax.random.key(0)))
    split: Any = nnx.split(shape, nnx.Param, nnx.RngState, ...)
    definition, params, noise, rest = split
    if jax.tree.leaves(rest):
        kinds = sorted({type(variable).__name__ for _, variable in nnx.to_flat_state(rest)})
        raise InputError(
            f"from_nnx got a module that keeps {', '.join(kinds)} besides its parameters, but a "
            "federated model is its parameters alone. Use GroupNorm or LayerNorm, not BatchNorm."
        )
    noisy = bool(jax.tree.leaves(noise))

    def init(key: Array) -> Params:
        return nnx.to_pure_dict(nnx.state(build(key), nnx.Param))

    def module(values: Params, key: Array, training: bool) -> Any:
        state = jax.tree.map(lambda leaf: leaf, params)  # a copy, because the next line changes it
        nnx.replace_by_pure_dict(state, values)
        rngs = [nnx.state(build(key), nnx.RngState)] if noisy else []
        built = nnx.merge(definition, state, *rngs)
        (built.train if training else built.eval)()
        return built

    def apply(values: Params, x: Any) -> Any:
        return module(values, jax.random.key(0), training=False)(x)

    def train(values: Params, x: Any, key: Array) -> Any:
        return module(values, key, training=True)(x)

    return Model(init=init, apply=apply, train=train if noisy else None)
