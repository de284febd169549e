"""Check that a user's model, loss, metrics and data fit together."""

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedda.core.losses import cross_entropy
from fedda.core.task import ExampleWise
from fedda.data.federation import Shards, check_labels, check_shapes, num_rows
from fedda.data.streaming import Feed
from fedda.errors import InputError, shown
from fedda.models import Model
from fedda.simulate.train import TOTALS, example

# The number of examples in the batch of the checks. It is a prime, because hardly any model has
# this number of outputs, and outputs must not be mistaken for examples.
TRIED = 1009


def _readable(shape: tuple[int, ...] | str) -> str:
    """Return a shape, or a text with shapes, in which `batch` replaces the number of examples."""
    return re.sub(rf"\b{TRIED}\b", "batch", str(shape))


def check_problem(
    model: Model,
    loss: ExampleWise,
    metrics: Sequence[ExampleWise],
    shards: Shards | Feed,
    test: tuple[Any, Any] | None,
) -> None:
    """Check that model, loss, metrics and data fit together, using only their shapes.

    Args:
        model: The model.
        loss: The loss.
        metrics: The metrics of an evaluation.
        shards: The clients' examples.
        test: The test set, or None.

    Raises:
        InputError: A function would fail inside a compiled program, or silently return wrong
            numbers.
    """
    if not callable(loss):
        raise InputError(f"loss must be a function such as losses.cross_entropy, got {loss!r}.")
    if callable(metrics) or not all(hasattr(metric, "__name__") for metric in metrics):
        instead = f' Write ["{metrics}"].' if isinstance(metrics, str) else ""
        raise InputError(
            f"metrics must be a list of named functions or of names, got {shown(metrics)}.{instead}"
        )
    if metrics and test is None:
        raise InputError("metrics need a test set: give test=(x, y) too.")
    names = ["round", "train_loss", "loss", *TOTALS, *(metric.__name__ for metric in metrics)]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"the metric name {name!r} is already used: rename the function.")
    like = example(shards)
    if test is not None:
        if num_rows(test) == 0:
            raise InputError("the test set must have at least one example, got none.")
        check_shapes(test, (like.x, like.y), "the test set")
    x, y = jax.eval_shape(lambda data: data.shard(0).rows(jnp.zeros(TRIED, "int32")), like)
    params = model.shapes()
    kinds = {leaf.dtype.name for leaf in jax.tree.leaves(params)}
    if not kinds or not kinds <= {"bfloat16", "float16", "float32", "float64"}:
        raise InputError(
            "the parameters must be arrays of float32, float64, float16 or bfloat16, got "
            f"{', '.join(sorted(kinds)) or 'none'}."
        )
    try:
        outputs = jax.eval_shape(model.apply, params, x)
    except InputError:
        raise
    except Exception as error:  # a user's function may raise anything
        shapes = jax.tree.map(lambda leaf: leaf.shape[1:], x)
        # Messages of Flax and JAX contain the batch size, which the user has not chosen.
        raise InputError(
            f"the model cannot be applied to examples of shape {shapes}: "
            f"{_readable(str(error)).rstrip('.')}. Give examples of the shape that the model "
            "expects, or a model for this shape."
        ) from error
    of_classes = getattr(loss, "of_classes", False) and y.ndim == 1 and y.dtype.kind in "iu"
    one = isinstance(outputs, jax.ShapeDtypeStruct)  # and no tuple or dictionary of arrays
    if (loss is cross_entropy or of_classes) and one and isinstance(shards, Shards):
        check_labels(shards, outputs.shape[-1], test)
    for measure in (loss, *metrics):
        name = getattr(measure, "__name__", "loss")
        shapes = jax.tree.map(lambda leaf: leaf.shape[1:], (outputs, y))
        try:
            result = jax.eval_shape(measure, outputs, y)
        except InputError:
            raise
        except Exception as error:  # a user's function may raise anything
            if isinstance(error, TypeError) and "must be Tensor" in str(error):
                raise InputError(
                    f"{name} gets arrays of JAX, but computes with tensors of PyTorch: {error}. "
                    "Give a loss module of PyTorch, such as torch.nn.CrossEntropyLoss(), or write "
                    "it with jax.numpy."
                ) from error
            why = _readable(str(error)).removeprefix(f"{name}: ").rstrip(".")
            raise InputError(
                f"{name} cannot be computed: {why}. The outputs and the label of an example have "
                f"the shapes {shapes}. Give outputs and labels that it takes, or another loss or "
                "metric."
            ) from error
        ratio = isinstance(result, tuple) and measure is not loss  # numerator and denominator
        for values in result if ratio else [result]:
            shape = getattr(values, "shape", None)
            if shape != (TRIED,):
                got = type(values).__name__ if shape is None else f"shape {_readable(shape)}"
                raise InputError(
                    f"{name} must return one number for each example, an array of shape (batch,), "
                    f"got {got}. The outputs and the label of an example have the shapes {shapes}. "
                    "Average over the outputs of an example, but not over the examples."
                )
        if measure is loss and not jnp.issubdtype(result.dtype, jnp.floating):
            raise InputError(
                f"{name} must return floating-point numbers, got {result.dtype}, which has no "
                "gradient. Use it as a metric, and give a differentiable loss."
            )
