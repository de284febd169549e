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

# Examples that a loss is tried on: a prime, as hardly any model has that many outputs, which would
# be taken for them.
TRIED = 1009


def _in_words(shape: tuple[int, ...] | str) -> str:
    """Return a shape, or a text about one, with `batch` for the number of examples tried."""
    return re.sub(rf"\b{TRIED}\b", "batch", str(shape))


def check_measures(loss: Any, metrics: Any, test: Any) -> None:
    """Refuses what is no loss or list of metrics, and metrics that a row has no room for."""
    if not callable(loss):
        raise InputError(
            f"loss must be a function such as fedda.losses.cross_entropy, got {loss!r}."
        )
    if callable(metrics) or not all(hasattr(metric, "__name__") for metric in metrics):
        raise InputError("metrics must be a list of named functions, as def makes them.")
    if metrics and test is None:
        raise InputError("metrics are of the test set: give test=(x, y) too.")
    names = [metric.__name__ for metric in metrics]
    for name in names:
        if names.count(name) > 1 or name in ("round", "train_loss", "loss", *TOTALS):
            raise InputError(f"the metric name {name!r} is taken: rename the function.")


def check_problem(
    model: Model,
    loss: ExampleWise,
    metrics: Sequence[ExampleWise],
    shards: Shards | Feed,
    test: tuple[Any, Any] | None,
) -> None:
    """Refuses what would fail deep inside a compiled program, or give wrong numbers in silence."""
    like = example(shards)
    if test is not None:
        if num_rows(test) == 0:
            raise InputError("the test set must hold at least one example, got none.")
        check_shapes(test, (like.x, like.y), "the test set")
    some = jax.eval_shape(lambda shard: shard.rows(jnp.zeros(TRIED, "int32")), like.shard(0))
    params = model.shapes()
    kinds = {leaf.dtype.name for leaf in jax.tree.leaves(params)}
    if not kinds or not kinds <= {"bfloat16", "float16", "float32", "float64"}:
        raise InputError(
            "the parameters must be arrays of float32, float64, float16 or bfloat16, got "
            f"{', '.join(sorted(kinds)) or 'none'}."
        )
    try:
        outputs = jax.eval_shape(model.apply, params, some[0])
    except Exception as error:  # whatever the user's function raises
        shapes = jax.tree.map(lambda leaf: leaf.shape[1:], some[0])
        # Flax and JAX print the shape of the batch, whose size no user has chosen.
        why = _in_words(str(error)).rstrip(".")
        raise InputError(
            f"the model cannot be applied to examples of shape {shapes}: {why}. Give examples of "
            "the shape that the model expects, or a model for this shape."
        ) from error
    if loss is cross_entropy and isinstance(shards, Shards):
        check_labels(shards, outputs.shape[-1], test)
    for measure in (loss, *metrics):
        name = getattr(measure, "__name__", "loss")
        got = jax.eval_shape(measure, outputs, some[1])
        ratio = isinstance(got, tuple) and measure is not loss  # of two sums
        for numbers in got if ratio else [got]:
            shape = getattr(numbers, "shape", None)
            if shape != (TRIED,):
                found = type(numbers).__name__ if shape is None else f"shape {_in_words(shape)}"
                of_one = jax.tree.map(lambda leaf: leaf.shape[1:], (outputs, some[1]))
                raise InputError(
                    f"{name} must give one number an example, so an array of shape (batch,), got "
                    f"{found}. The outputs and the label of one have the shapes {of_one}: average "
                    "over outputs, if at all, and not over examples."
                )
        if measure is loss and not jnp.issubdtype(got.dtype, jnp.floating):
            raise InputError(
                f"{name} must give floating-point numbers, got {got.dtype}, which has no gradient: "
                "nothing would be learnt. Use it as a metric, and a differentiable loss."
            )
