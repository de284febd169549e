"""Softmax regression, and what a client is given in a round."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]


def log_softmax(W: Array, x: Array) -> Array:
    """Return the log-probabilities of the classes. The last row of W is the biases."""
    scores = np.column_stack([x, np.ones(len(x))]) @ W
    result: Array = scores - np.log(np.exp(scores).sum(1, keepdims=True))
    return result


def losses(W: Array, x: Array, y: NDArray[np.int_]) -> Array:
    """Return the cross-entropy of each example."""
    return -log_softmax(W, x)[np.arange(len(y)), y]


def mean_gradient(W: Array, x: Array, y: NDArray[np.int_]) -> Array:
    """Return the gradient of the mean loss: inputs times (probabilities - unit vectors)."""
    errors = np.exp(log_softmax(W, x)) - np.eye(W.shape[1])[y]
    result: Array = np.column_stack([x, np.ones(len(x))]).T @ errors / len(x)
    return result


class Batch:
    """The examples of one local step. Its gradient is `scale` times that of their mean loss.

    The scale is 1 under the reduction `mean`, and the number of examples under `sum`.
    """

    def __init__(self, x: Array, y: NDArray[np.int_], scale: float = 1.0) -> None:
        self.x, self.y, self.scale = x, y, scale

    def gradient(self, W: Array) -> Array:
        return self.scale * mean_gradient(W, self.x, self.y)

    def mean_loss(self, W: Array) -> float:
        return float(losses(W, self.x, self.y).mean())


class Visit(NamedTuple):
    """What one client works with in a round.

    Attributes:
        client: The client's number.
        examples: Its number of examples, N_i.
        batches: The batches of its local steps, in order.
        whole: All its examples as one local step. Under `sum`, its gradient is at most as long as
            that of a complete mini-batch.
        full: All its examples in the units of a complete mini-batch. Under `sum`, its scale is the
            mini-batch size for all clients.
    """

    client: int
    examples: int
    batches: Sequence[Batch]
    whole: Batch
    full: Batch

    def share(self, batch: Batch) -> float:
        """Return the scale of a batch relative to a complete mini-batch: 1 under `mean`."""
        return batch.scale / self.full.scale


def visit(
    client: int,
    x: Array,
    y: NDArray[np.int_],
    rows: Sequence[Sequence[int]],
    size: int,
    reduction: str = "mean",
    batch: type[Batch] = Batch,
) -> Visit:
    """Return the visit of a client, given the rows of each of its batches.

    Args:
        client: The client's number.
        x: The features of its examples.
        y: The labels of its examples.
        rows: The row numbers of each batch.
        size: The mini-batch size.
        reduction: Whether a step takes the `mean` or the `sum` of the losses of its batch.
        batch: The class of the batches.
    """

    def scale(examples: int) -> float:
        return 1.0 if reduction == "mean" else float(min(examples, size))

    return Visit(
        client,
        len(x),
        batches=[batch(x[list(k)], y[list(k)], scale(len(k))) for k in rows],
        whole=batch(x, y, scale(len(x))),
        full=batch(x, y, scale(size)),
    )
