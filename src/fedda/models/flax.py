"""Convert Flax NNX modules to models."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx
from jax import Array

from fedda.errors import InputError
from fedda.models import Model, Params


def from_nnx(make: Callable[[Any], Any] | nnx.Module) -> Model:
    """Return a model from a Flax NNX module.

    The parameters are the module's `nnx.Param` values, as nested dictionaries of arrays. Dropout
    and other random layers get a new key for every training batch, and are off in evaluation.

    Args:
        make: `(rngs) -> module`, makes the module from an `nnx.Rngs`, so that every seed has other
            initial weights. Or a module: every seed then starts from its weights.

    Returns:
        The model.

    Raises:
        InputError: The module has state besides its parameters, such as the statistics of
            BatchNorm.

    Example:
        >>> import jax, numpy as np
        >>> from flax import nnx
        >>> import fedda
        >>> model = fedda.models.from_nnx(lambda rngs: nnx.Linear(64, 10, rngs=rngs))
        >>> model.apply(model.init(jax.random.key(0)), np.ones((3, 64))).shape
        (3, 10)
    """

    def build(key: Array) -> Any:
        if not isinstance(make, nnx.Module):
            return make(nnx.Rngs(key))
        module, rngs = nnx.clone(make), nnx.Rngs(key)
        for _, part in nnx.iter_graph(module):
            if isinstance(part, nnx.RngStream):
                nnx.reseed(part, **{part.tag: rngs()})
        return module

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
