"""Models from Equinox modules."""

import inspect
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
from jax import Array

from fedda.models import Model, Params, given_module


def from_equinox(make: Callable[[Array], Any]) -> Model:
    """Return a model from an Equinox module that takes one example.

    A `__call__` with a parameter `key` gets a key for each example in training, none in evaluation.

    Args:
        make: `make(key)` returns the module.

    Raises:
        InputError: `make` is a module.

    Example:
        `fedda.models.from_equinox(lambda key: equinox.nn.Linear(64, 10, key=key))`
    """
    if any(map(eqx.is_array, jax.tree.leaves(make))):
        raise given_module("from_equinox", "key", make)
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
