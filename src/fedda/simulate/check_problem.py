"""Checks of a problem that a user has made: its model, loss, metrics and test set."""

import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fedda.core.losses import cross_entropy
from fedda.core.task import ExampleWise
from fedda.data.federation import Shards, check_labels, check_shapes, num_rows
from fedda.data.streaming import Feed
from fedda.errors import InputError
from fedda.models import Model
from fedda.simulate.train import TOTALS, example

# The number of examples that a loss is tried on: a prime, as hardly any model has that many
# outputs, which would be taken for examples.
TRIED = 1009


def _readable(shape: tuple[int, ...] | str) -> str:
    """Return a shape, or a text about one, with `batch` for the number of examples tried."""
    return re.sub(rf"\b{TRIED}\b", "batch", str(shape))


def check_problem(
    model: Model,
    loss: ExampleWise,
    metrics: Sequence[ExampleWise],
    shards: Shards | Feed,
    test: tuple[Any, Any] | None,
) -> None:
    """Check that model, loss, metrics and data fit together. Nothing is computed.

    Raises:
        InputError: Something would fail inside a compiled program, or give wrong numbers silently.
    """
    if not callable(loss):
        raise InputError(f"loss must be a function such as losses.cross_entropy, got {loss!r}.")
    if callable(metrics) or not all(hasattr(metric, "__name__") for metric in metrics):
        raise InputError("metrics must be a list of named functions, as def makes them.")
    if metrics and test is None:
        raise InputError("metrics are of the test set: give test=(x, y) too.")
    names = ["round", "train_loss", "loss", *TOTALS, *(metric.__name__ for metric in metrics)]
    for name in names:
        if names.count(name) > 1:
            raise InputError(f"the metric name {name!r} is taken: rename the function.")
    like = example(shards)
    if test is not None:
        if num_rows(test) == 0:
            raise InputError("the test set must hold at least one example, got none.")
        check_shapes(test, (like.x, like.y), "the test set")
    x, y = jax.eval_shape(lambda shard: shard.rows(jnp.zeros(TRIED, "int32")), like.shard(0))
    params = model.shapes()
    kinds = {leaf.dtype.name for leaf in jax.tree.leaves(params)}
    if not kinds or not kinds <= {"bfloat16", "float16", "float32", "float64"}:
        raise InputError(
            "the parameters must be arrays of float32, float64, float16 or bfloat16, got "
            f"{', '.join(sorted(kinds)) or 'none'}."
        )
    try:
        outputs = jax.eval_shape(model.apply, params, x)
    except Exception as error:  # whatever the user's function raises
        shapes = jax.tree.map(lambda leaf: leaf.shape[1:], x)
        # Flax and JAX print the shape of the batch, whose size no user has chosen.
        raise InputError(
            f"the model cannot be applied to examples of shape {shapes}: "
            f"{_readable(str(error)).rstrip('.')}. Give examples of the shape that the model "
            "expects, or a model for this shape."
        ) from error
    if loss is cross_entropy and isinstance(shards, Shards):
        check_labels(shards, outputs.shape[-1], test)
    for measure in (loss, *metrics):
        name = getattr(measure, "__name__", "loss")
        result = jax.eval_shape(measure, outputs, y)
        ratio = isinstance(result, tuple) and measure is not loss  # numerator and denominator
        for values in result if ratio else [result]:
            shape = getattr(values, "shape", None)
            if shape != (TRIED,):
                got = type(values).__name__ if shape is None else f"shape {_readable(shape)}"
                shapes = jax.tree.map(lambda leaf: leaf.shape[1:], (outputs, y))
                raise InputError(
                    f"{name} must give one number an example, so an array of shape (batch,), got "
                    f"{got}. The outputs and the label of one have the shapes {shapes}: average "
                    "over outputs, if at all, and not over examples."
                )
        if measure is loss and not jnp.issubdtype(result.dtype, jnp.floating):
            raise InputError(
                f"{name} must give floating-point numbers, got {result.dtype}, which has no "
                "gradient: nothing would be learnt. Use it as a metric, and a differentiable loss."
            )
