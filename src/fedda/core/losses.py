"""Losses and metrics: one number for each example of a batch, or numerator and denominator."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from fedda.errors import InputError


def cross_entropy(logits: Array, labels: Array) -> Array:
    """Return -log softmax(logits)[label] for each example."""
    log_probabilities = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log_probabilities, labels[:, None], axis=-1)[:, 0]


def squared_error(outputs: Array, targets: Array) -> Array:
    """Return the mean over an example's outputs of (output - target)²."""
    if outputs.shape != targets.shape:  # [n, 1] - [n] would silently be [n, n]
        raise InputError(
            "squared_error needs outputs and targets of one shape, got "
            f"{outputs.shape[1:]} and {targets.shape[1:]} an example."
        )
    errors = jnp.square(outputs - targets)
    return errors.reshape(errors.shape[0], -1).mean(-1)


def accuracy(logits: Array, labels: Any) -> Array:
    """Return 1 where the largest logit is the label's, else 0."""
    return (jnp.argmax(logits, -1) == labels).astype(logits.dtype)


def tag_cross_entropy(logits: Array, tags: Array) -> Array:
    """Return the binary cross-entropy of having a tag or not, averaged over all tags.

    A row of `tags` has the numbers of an example's tags; those past the last logit, such as
    padding, are ignored.
    """
    signs = jnp.where(_has(tags, logits), -logits, logits)
    return jax.nn.softplus(signs).mean(-1)  # -log of the sigmoid, which never overflows


def recall_at_5(logits: Array, tags: Array) -> tuple[Array, Array]:
    """Return the number of an example's tags among the five largest logits, and of all its tags.

    The ratio of their sums is the recall over many examples. Of equal logits the first is larger.
    """
    has = _has(tags, logits)
    _, best = lax.top_k(logits, min(5, logits.shape[-1]))
    hits = jnp.take_along_axis(has, best, axis=-1)
    return hits.sum(-1, dtype=logits.dtype), has.sum(-1, dtype=logits.dtype)


def _has(tags: Array, logits: Array) -> Array:
    """Tell whether an example has a tag, for every example and tag; a tag may be named twice."""
    none = jnp.zeros(logits.shape[-1], bool)
    return jax.vmap(lambda row: none.at[row].set(True, mode="drop"))(tags.astype(jnp.int32))
