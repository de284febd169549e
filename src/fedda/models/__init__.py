"""What a model is to this library: two functions and, where training differs, a third.

The functions `autoencoder`, `cnn`, `linear`, `mlp` and `resnet18` make the models of the tasks.
They are loaded when they are first used, as Flax takes its time.
"""

import importlib
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedda.errors import InputError, unknown

if TYPE_CHECKING:
    from fedda.models._autoencoder import autoencoder
    from fedda.models._cnn import cnn
    from fedda.models._linear import linear
    from fedda.models._mlp import mlp
    from fedda.models._resnet import resnet18

__all__ = [
    "PRECISIONS",
    "Model",
    "Params",
    "autoencoder",
    "cnn",
    "from_equinox",
    "from_nnx",
    "linear",
    "mlp",
    "resnet18",
    "with_input",
    "with_precision",
]

Params = Any

# The functions that are loaded late, and their modules.
_LATE = {
    "autoencoder": "_autoencoder",
    "cnn": "_cnn",
    "linear": "_linear",
    "mlp": "_mlp",
    "resnet18": "_resnet",
}

# How products of matrices are computed; weights, sums and losses are float32 in all of them.
# "tf32" rounds factors to 10 bits on GPUs that can, and is "fp32" elsewhere; "bf16" runs the
# layers in bfloat16.
PRECISIONS = ("tf32", "fp32", "bf16")


class Model(NamedTuple):
    """A model as pure functions of its parameters; the first axis of `x` counts examples."""

    init: Callable[[Array], Params]  # (key) -> params
    apply: Callable[[Params, Any], Any]  # (params, x) -> outputs; what evaluation uses
    train: Callable[[Params, Any, Array], Any] | None = None  # (params, x, key), if not `apply`
    penalty: Callable[[Params], Array] | None = None  # added to a batch's loss where it is learnt

    def shapes(self) -> Params:
        """The shapes and types of the parameters; nothing is computed."""
        return jax.eval_shape(self.init, jax.random.key(0))


def with_input(
    model: Model,
    prepare: Callable[[Any], Any],
    augment: Callable[[Any, Array], Any] | None = None,
) -> Model:
    """The model on `prepare(x)`: what is stored compactly is unpacked on the device.

    Training sees `augment(x, key)` instead, if there is one.
    """
    inner = model.train

    def train(params: Params, x: Any, key: Array) -> Any:
        noise_key, key = (key, key) if augment is None else jax.random.split(key)
        x = prepare(x) if augment is None else augment(x, noise_key)
        return model.apply(params, x) if inner is None else inner(params, x, key)

    return model._replace(
        apply=lambda params, x: model.apply(params, prepare(x)),
        train=None if inner is None and augment is None else train,
    )


def with_precision(model: Model, precision: str) -> Model:
    """The model computed in one of the `PRECISIONS`.

    In bfloat16 the model gets rounded copies of its weights and inputs, and its outputs are float32
    again. What a model does to stored examples is to stay exact: put `with_input` around this.
    """
    if precision not in PRECISIONS:
        raise unknown("precision", precision, PRECISIONS)

    def computed(function: Callable[..., Any]) -> Callable[..., Any]:
        def in_bfloat16(params: Params, x: Any, *key: Array) -> Any:
            low = _cast((params, x), jnp.bfloat16)
            return _cast(function(*low, *key), jnp.float32)

        def in_float32(params: Params, x: Any, *key: Array) -> Any:
            with jax.default_matmul_precision("highest" if precision == "fp32" else "high"):
                return function(params, x, *key)

        return in_bfloat16 if precision == "bf16" else in_float32

    return model._replace(
        apply=computed(model.apply),
        train=None if model.train is None else computed(model.train),
    )


def _cast(tree: Any, dtype: Any) -> Any:
    def cast(leaf: Array) -> Array:
        return leaf.astype(dtype) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf

    return jax.tree.map(cast, tree)


def _is_module(function: str, argument: str, module: Any) -> InputError:
    name = type(module).__name__
    return InputError(
        f"{function} takes a function that makes a module, so that every seed begins anew, got a "
        f"{name}. Write {function}(lambda {argument}: {name}(..., {argument}={argument}))."
    )


def from_nnx(make: Callable[[Any], Any]) -> Model:
    """A model from a Flax NNX module; `make(rngs)` builds the module.

    Its parameters are the module's `nnx.Param` values as nested dictionaries of arrays. Dropout
    and other noise work: the training pass reseeds the module from its key.
    """
    from flax import nnx

    if isinstance(make, nnx.Module):
        raise _is_module("from_nnx", "rngs", make)

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

    def module(values: Params, key: Array) -> Any:
        state = jax.tree.map(lambda leaf: leaf, params)  # a copy: filling it in must not leak
        nnx.replace_by_pure_dict(state, values)
        if not noisy:
            return nnx.merge(definition, state)
        return nnx.merge(definition, state, nnx.state(build(key), nnx.RngState))

    def apply(values: Params, x: Any) -> Any:
        built = module(values, jax.random.key(0))
        built.eval()
        return built(x)

    def train(values: Params, x: Any, key: Array) -> Any:
        built = module(values, key)
        built.train()
        return built(x)

    return Model(init, apply, train if noisy else None)


def from_equinox(make: Callable[[Array], Any]) -> Model:
    """A model from an Equinox module that takes one example; `make(key)` builds the module.

    A `__call__` with a parameter `key` gets one key an example in training and none in evaluation.
    """
    import equinox as eqx

    if any(map(eqx.is_array, jax.tree.leaves(make))):
        raise _is_module("from_equinox", "key", make)
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

    return Model(init, apply, train if noisy else None)


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LATE[name]}"), name)
