"""Losses and metrics: one number for each example of a batch."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from fedda.errors import InputError


def cross_entropy(logits: Array, labels: Array) -> Array:
    """-log softmax(logits)[label]."""
    log_probabilities = jax.nn.log_softmax(logits)
    return -jnp.take_along_axis(log_probabilities, labels[:, None], axis=-1)[:, 0]


def squared_error(outputs: Array, targets: Array) -> Array:
    """The mean over an example's outputs of (output - target)²."""
    if outputs.shape != targets.shape:  # [n, 1] - [n] would be [n, n], without a word
        raise InputError(
            "squared_error needs outputs and targets of one shape, got "
            f"{outputs.shape[1:]} and {targets.shape[1:]} an example."
        )
    errors = jnp.square(outputs - targets)
    return errors.reshape(errors.shape[0], -1).mean(-1)


def accuracy(logits: Array, labels: Any) -> Array:
    """1 where the largest logit is the label's, else 0."""
    return (jnp.argmax(logits, -1) == labels).astype(logits.dtype)
