"""Convert Equinox modules to models."""

import inspect
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jax import Array

from fedda.models import Model, Params


def from_equinox(make: Callable[[Array], Any] | eqx.Module) -> Model:
    """Return a model from an Equinox module.

    As usual in Equinox, the module takes a single example. If its `__call__` has a parameter `key`,
    it gets a random key for each example in training, and none in evaluation. The parameters are
    the module's floating-point arrays.

    Args:
        make: `(key) -> module`, makes the module from a random key, so that every seed has other
            initial weights. Or a module: every seed then starts from its weights.

    Returns:
        The model. Its inputs have a batch axis.

    Example:
        >>> import equinox, jax, numpy as np
        >>> import fedda
        >>> model = fedda.models.from_equinox(lambda key: equinox.nn.Linear(64, 10, key=key))
        >>> model.apply(model.init(jax.random.key(0)), np.ones((3, 64))).shape
        (3, 10)
    """
    if isinstance(make, eqx.Module):
        module = make
        make = lambda key: module  # noqa: E731
    example = make(jax.random.key(0))
    _, static = eqx.partition(example, eqx.is_inexact_array)
    noisy = "key" in inspect.signature(type(example).__call__).parameters

    def init(key: Array) -> Params:
        return eqx.filter(make(key), eqx.is_inexact_array)

    def apply(params: Params, x: Any) -> Any:
        return jax.vmap(eqx.nn.inference_mode(eqx.combine(params, static)))(x)

    def train(params: Params, x: Any, key: Array) -> Any:
        module = eqx.combine(params, static)
        keys = jax.random.split(key, jax.tree.leaves(x)[0].shape[0])
        return jax.vmap(lambda one, k: module(one, key=k))(x, keys)

    return Model(init=init, apply=apply, train=train if noisy else None)
