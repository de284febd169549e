"""Losses and metrics.

A loss takes the outputs and the labels of a batch and returns one number for each example. A metric
does the same, or returns a numerator and a denominator for each example; the metric of a dataset is
then the sum of the numerators divided by the sum of the denominators.
"""

import sys
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from fedda.errors import InputError, unknown

Measure = TypeVar("Measure", bound=Callable[..., Any])

NAMES = ("accuracy", "cross_entropy", "recall_at_5", "squared_error", "tag_cross_entropy")


def lower_is_better(measure: Measure) -> Measure:
    """Mark a metric whose lower values are better, as all losses of this module are.

    Statistics of the worst clients need it: see `fedda.evaluate`.

    Example:
        >>> import fedda
        >>> @fedda.losses.lower_is_better
        ... def wrong(logits, labels):
        ...     return 1 - fedda.losses.accuracy(logits, labels)
    """
    measure.__dict__["higher_is_better"] = False
    return measure


@lower_is_better
def cross_entropy(logits: Array, labels: Array) -> Array:
    """Return the cross-entropy of integer labels, -log softmax(logits)[label].

    Args:
        logits: Shape [examples, classes].
        labels: The class of each example, integers of shape [examples].

    Returns:
        One number for each example.

    Example:
        >>> import jax.numpy as jnp
        >>> import fedda
        >>> logits = jnp.array([[0.0, 0.0], [0.0, 10.0]])
        >>> losses = fedda.losses.cross_entropy(logits, jnp.array([0, 1]))
        >>> [round(float(loss), 3) for loss in losses]
        [0.693, 0.0]
    """
    log_probabilities = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log_probabilities, labels[:, None], axis=-1)[:, 0]


@lower_is_better
def squared_error(outputs: Array, targets: Array) -> Array:
    """Return (output - target)², averaged over the outputs of an example.

    Args:
        outputs: Shape [examples, ...].
        targets: An array of the same shape.

    Returns:
        One number for each example.

    Raises:
        InputError: The shapes differ.

    Example:
        >>> import jax.numpy as jnp
        >>> import fedda
        >>> outputs, targets = jnp.array([[1.0, 2.0]]), jnp.array([[0.0, 2.0]])
        >>> fedda.losses.squared_error(outputs, targets).tolist()
        [0.5]
    """
    if outputs.shape != targets.shape:  # [n, 1] - [n] would silently be [n, n]
        raise InputError(
            "squared_error needs outputs and targets of the same shape, got "
            f"{outputs.shape[1:]} and {targets.shape[1:]} for each example."
        )
    errors = jnp.square(outputs - targets)
    return errors.reshape(errors.shape[0], -1).mean(-1)


def accuracy(logits: Array, labels: Any) -> Array:
    """Return 1 for each correctly classified example, 0 for the others.

    Args:
        logits: Shape [examples, classes]. The prediction is the class with the largest logit.
        labels: The class of each example, integers of shape [examples].

    Returns:
        One number for each example.

    Example:
        >>> import jax.numpy as jnp
        >>> import fedda
        >>> logits = jnp.array([[0.2, 0.8], [0.2, 0.8]])
        >>> fedda.losses.accuracy(logits, jnp.array([1, 0])).tolist()
        [1.0, 0.0]
    """
    return (jnp.argmax(logits, -1) == labels).astype(logits.dtype)


@lower_is_better
def tag_cross_entropy(logits: Array, tags: Array) -> Array:
    """Return the binary cross-entropy of multi-label data, averaged over all tags.

    Args:
        logits: Shape [examples, tags].
        tags: The tag numbers of each example, integers of shape [examples, n]. Numbers beyond
            the last logit are ignored, so they can be used as padding.

    Returns:
        One number for each example.

    Example:
        >>> import jax.numpy as jnp
        >>> import fedda
        >>> logits, tags = jnp.array([[10.0, -10.0, 10.0]]), jnp.array([[0, 2, 3]])
        >>> float(fedda.losses.tag_cross_entropy(logits, tags)[0]) < 0.001
        True
    """
    signs = jnp.where(_has(tags, logits), -logits, logits)
    return jax.nn.softplus(signs).mean(-1)  # -log of the sigmoid, which never overflows


def recall_at_5(logits: Array, tags: Array) -> tuple[Array, Array]:
    """Return the recall at 5 of multi-label data, as a numerator and a denominator.

    Of equal logits, the first counts as larger.

    Args:
        logits: Shape [examples, tags].
        tags: The tag numbers of each example, as in `tag_cross_entropy`.

    Returns:
        For each example, the number of its tags among the five largest logits, and the number of
        all its tags. The recall of a dataset is the ratio of their sums.

    Example:
        >>> import jax.numpy as jnp
        >>> import fedda
        >>> logits, tags = jnp.array([[6.0, 5.0, 4.0, 3.0, 2.0, 1.0]]), jnp.array([[0, 5]])
        >>> hits, total = fedda.losses.recall_at_5(logits, tags)
        >>> float(hits[0] / total[0])
        0.5
    """
    has = _has(tags, logits)
    _, best = lax.top_k(logits, min(5, logits.shape[-1]))
    hits = jnp.take_along_axis(has, best, axis=-1)
    return hits.sum(-1, dtype=logits.dtype), has.sum(-1, dtype=logits.dtype)


def _has(tags: Array, logits: Array) -> Array:
    """Return a boolean matrix [examples, tags] of the tags that each example has."""
    none = jnp.zeros(logits.shape[-1], bool)
    return jax.vmap(lambda row: none.at[row].set(True, mode="drop"))(tags.astype(jnp.int32))


def as_measure(measure: Any) -> Any:
    """Return a loss or metric from its name in this module, or from a loss module of PyTorch.

    Anything else is returned as it is.

    Raises:
        InputError: There is no such name, the module is no mean over examples, or it is a class.
    """
    if isinstance(measure, type):
        raise InputError(
            f"a loss or metric must be a function or module, got the class {measure.__name__}. "
            f"Give an instance: {measure.__name__}()."
        )
    if isinstance(measure, str):
        if measure not in NAMES:
            raise unknown("loss or metric", measure, NAMES)
        return globals()[measure]
    if "torch.nn" in sys.modules and isinstance(measure, sys.modules["torch.nn"].Module):
        from fedda.models.torch import from_torch_loss

        return from_torch_loss(measure)
    return measure


def as_measures(measures: Any) -> Any:
    """Return a list of losses and metrics, each from `as_measure`."""
    return list(map(as_measure, measures)) if isinstance(measures, list | tuple) else measures
