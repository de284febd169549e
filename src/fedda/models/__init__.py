"""Models: a pair of functions `init` and `apply` and, where training differs, a third.

`autoencoder`, `cnn`, `linear`, `mlp` and `resnet18` return the models of the tasks, `from_nnx` and
`from_equinox` those of other libraries. They are imported on first use, as Flax takes its time.
"""

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from fedda.errors import InputError, unknown

if TYPE_CHECKING:
    from fedda.models.convolutional import cnn, resnet18
    from fedda.models.dense import autoencoder, linear, mlp
    from fedda.models.equinox import from_equinox
    from fedda.models.flax import from_nnx

__all__ = [
    "Model",
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

# The modules of the functions that are imported on first use.
_MODULES = {
    "autoencoder": "dense",
    "cnn": "convolutional",
    "from_equinox": "equinox",
    "from_nnx": "flax",
    "linear": "dense",
    "mlp": "dense",
    "resnet18": "convolutional",
}

Params = Any

# How matrix products are computed; weights, sums and losses are float32 in all of them. "tf32"
# rounds factors to 10 bits on GPUs that can, and is "fp32" elsewhere; "bf16" runs the layers in
# bfloat16.
PRECISIONS = ("tf32", "fp32", "bf16")


class Model(NamedTuple):
    """A model as pure functions of its parameters; the first axis of `x` counts examples.

    Attributes:
        init: `(key) -> params`.
        apply: `(params, x) -> outputs`, in evaluation and, if there is no `train`, in training.
        train: `(params, x, key) -> outputs` in training, for example with dropout.
        penalty: `(params) ->` a number that is added to the training loss of a batch.
    """

    init: Callable[[Array], Params]
    apply: Callable[[Params, Any], Any]
    train: Callable[[Params, Any, Array], Any] | None = None
    penalty: Callable[[Params], Array] | None = None

    def shapes(self) -> Params:
        """Return the shapes and types of the parameters. Nothing is computed."""
        return jax.eval_shape(self.init, jax.random.key(0))


def with_input(
    model: Model,
    prepare: Callable[[Any], Any],
    augment: Callable[[Any, Array], Any] | None = None,
) -> Model:
    """Return the model on prepared inputs: what is stored compactly is unpacked on the device.

    Args:
        model: The model.
        prepare: The model sees `prepare(x)`.
        augment: If given, the model sees `augment(x, key)` in training.
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
    """Return the model computed in one of the `PRECISIONS`.

    In bfloat16 the model gets rounded copies of its weights and inputs, and its outputs are float32
    again. Apply `with_input` after this, so that the preparation of inputs stays exact.

    Raises:
        InputError: The precision is unknown.
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


def given_module(function: str, argument: str, module: Any) -> InputError:
    """Return the error of an adapter that got a module, not a function that makes one."""
    name = type(module).__name__
    return InputError(
        f"{function} takes a function that makes a module, so that every seed starts differently, "
        f"got a {name}. Write {function}(lambda {argument}: {name}(..., {argument}={argument}))."
    )


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
