"""A small stored federation, and a model of it."""

import jax
import numpy as np

from fedda.data import store
from fedda.data.store import Rows, Source
from fedda.models import Model

COUNTS = [3, 0, 7, 1, 12, 5, 2, 9]


def written(path, ragged, counts=COUNTS):
    rng = np.random.default_rng(0)
    clients = []
    for number, count in enumerate(counts):
        x = rng.integers(0, 9, (count, 4)).astype(np.uint8)
        if ragged:
            length = rng.integers(0, 6, count)
            x = Rows(rng.integers(0, 9, length.sum()).astype(np.uint16), length)
        clients.append((f"c{number}", {"x": x, "y": rng.random(count).astype(np.float32)}))
    rng.shuffle(clients)  # on disk they lie in any order
    return store.write(path, Source({"train": clients}), {}).splits["train"]


def bag(x):
    """Counts of the numbers 0..8 in a row, padded or not."""
    return jax.nn.one_hot(x, 9).sum(1)


MODEL = Model(
    lambda key: {"w": jax.random.normal(key, (9,))},
    lambda params, x: bag(x) @ params["w"] / 10,
)
