"""What the server and its clients agree on: the model, the loss, and a client's work in a round."""

from functools import cache

import numpy as np
from fedda.core.losses import accuracy, cross_entropy
from fedda.core.task import Plan, Task
from fedda.data import digits, partition
from fedda.models import mlp

TASK = Task(mlp(64, 64, 10), cross_entropy, Plan(batch=10, amount=5), metrics=(accuracy,))

Examples = tuple[np.ndarray, np.ndarray]


@cache
def _load() -> digits.Digits:
    return digits.load()


def _examples(x: np.ndarray, y: np.ndarray) -> Examples:
    return x.reshape(-1, 64).astype(np.float32) / 16, y


def share(number: int, of: int) -> Examples:
    """Return one client's digits, in which few classes are common and the others are rare."""
    data = _load()
    rows = partition.split("dirichlet:0.3", data.train_y, of, seed=0, coarse=data.train_coarse)
    return _examples(data.train_x[rows[number]], data.train_y[rows[number]])


def test_set() -> Examples:
    data = _load()
    return _examples(data.test_x, data.test_y)
