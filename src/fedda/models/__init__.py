"""Models, as records of pure functions.

`linear`, `mlp`, `cnn`, `resnet18` and `autoencoder` are ready-made models. `from_torch`, `from_nnx`
and `from_equinox` convert modules of PyTorch, Flax and Equinox. All of them are imported on first
use, because importing these libraries is slow.
"""

import importlib
import inspect
import sys
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec

import jax
import jax.numpy as jnp
from jax import Array

from fedda.errors import InputError, import_extra, unknown

if TYPE_CHECKING:
    from fedda.models.convolutional import cnn, resnet18
    from fedda.models.dense import autoencoder, linear, mlp
    from fedda.models.equinox import from_equinox
    from fedda.models.flax import from_nnx
    from fedda.models.torch import from_torch

__all__ = [
    "Model",
    "autoencoder",
    "cnn",
    "from_equinox",
    "from_nnx",
    "from_torch",
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
    "from_torch": "torch",
    "linear": "dense",
    "mlp": "dense",
    "resnet18": "convolutional",
}

BUILT_IN = ("autoencoder", "cnn", "linear", "mlp", "resnet18")

Params = Any
P = ParamSpec("P")

# The precision of matrix products. Weights, sums and losses are always float32. "tf32" rounds the
# factors to 10 bits on GPUs that support it, and equals "fp32" elsewhere. "bf16" computes the
# layers in bfloat16.
PRECISIONS = ("tf32", "fp32", "bf16")


class Model(NamedTuple):
    """A model, as pure functions of its parameters.

    The first axis of the inputs `x` and of the outputs is the batch axis.

    Attributes:
        init: `(key) -> params`, the initial parameters.
        apply: `(params, x) -> outputs`, used in evaluation, and in training if `train` is None.
        train: `(params, x, key) -> outputs`, used in training, for example with dropout.
        penalty: `(params) -> number`, added to the training loss of a batch, for example a weight
            decay.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> import fedda
        >>> model = fedda.Model(
        ...     init=lambda key: {"w": jax.random.normal(key, (4, 2))},
        ...     apply=lambda params, x: x @ params["w"],
        ... )
        >>> model.apply(model.init(jax.random.key(0)), jnp.ones((3, 4))).shape
        (3, 2)
    """

    init: Callable[[Array], Params]
    apply: Callable[[Params, Any], Any]
    train: Callable[[Params, Any, Array], Any] | None = None
    penalty: Callable[[Params], Array] | None = None

    def shapes(self) -> Params:
        """Return the shapes and types of the parameters, without computing them."""
        return jax.eval_shape(self.init, jax.random.key(0))


def built_in(make: Callable[P, Model]) -> Callable[P, Model]:
    """Note in a model how it was made, so that a saved result can make it again.

    The note is an attribute of `apply`: a model with another `apply` does not have it.
    """

    @wraps(make)
    def noted(*args: P.args, **kwargs: P.kwargs) -> Model:
        model = make(*args, **kwargs)
        given = inspect.signature(make).bind(*args, **kwargs).arguments
        if all(isinstance(value, int | float | str) for value in given.values()):
            model.apply.__dict__["recipe"] = [make.__name__, *map(list, given.items())]
        return model

    return noted


def recipe_of(model: Model) -> list[Any] | None:
    """Return how to make a built-in model again: its function and pairs of arguments."""
    return getattr(model.apply, "recipe", None)


def from_recipe(recipe: list[Any]) -> Model:
    """Return the model of a recipe.

    Raises:
        InputError: There is no such built-in model.
    """
    name, *arguments = recipe
    if name not in BUILT_IN:
        raise unknown("built-in model", name, BUILT_IN)
    model: Model = __getattr__(name)(**dict(arguments))
    return model


def with_input(
    model: Model,
    prepare: Callable[[Any], Any],
    augment: Callable[[Any, Array], Any] | None = None,
) -> Model:
    """Return the model with a preparation of its inputs.

    The preparation runs on the device. So the examples can be stored compactly, such as images as
    bytes, and be unpacked only when a batch is used.

    Args:
        model: The model.
        prepare: `(x) -> x`, applied to the inputs.
        augment: `(x, key) -> x`, applied in training instead of `prepare`. None uses `prepare`
            in training too.

    Returns:
        A model with the same parameters.

    Example:
        >>> import jax, numpy as np
        >>> import fedda
        >>> model = fedda.models.linear(features=4, classes=2)
        >>> on_bytes = fedda.models.with_input(model, lambda x: x.astype("float32") / 255)
        >>> params = on_bytes.init(jax.random.key(0))
        >>> on_bytes.apply(params, np.full((3, 4), 255, np.uint8)).shape
        (3, 2)
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
    """Return the model with another precision of its matrix products.

    Apply `with_input` after `with_precision`, so that the preparation of the inputs stays exact.

    Args:
        model: The model.
        precision: `"fp32"`; `"tf32"`, which is faster on GPUs that support it; or `"bf16"`, which
            computes the layers in bfloat16 with rounded copies of the weights and inputs. The
            outputs are float32 in all cases.

    Returns:
        A model with the same parameters.

    Raises:
        InputError: The precision is unknown.

    Example:
        >>> import jax, numpy as np
        >>> import fedda
        >>> model = fedda.models.with_precision(fedda.models.linear(4, 2), "bf16")
        >>> model.apply(model.init(jax.random.key(0)), np.ones((3, 4), np.float32)).dtype
        dtype('float32')
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


def as_model(model: object) -> Model:
    """Return the model of a module of PyTorch, Flax NNX or Equinox. A `Model` is returned as it is.

    Raises:
        InputError: It is neither.
    """
    if isinstance(model, Model):
        return model
    for library, adapter in (
        ("torch.nn", "from_torch"),
        ("flax.nnx", "from_nnx"),
        ("equinox", "from_equinox"),
    ):
        if library in sys.modules and isinstance(model, sys.modules[library].Module):
            return __getattr__(adapter)(model)
    raise InputError(
        "model must be a fedda.Model(init, apply), or a module of PyTorch, Flax NNX or Equinox, "
        f"got {type(model).__name__}."
    )


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if name == "from_torch":
        import_extra("torch", "torch", "convert a PyTorch module")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
