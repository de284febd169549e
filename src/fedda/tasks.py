"""The tasks the command knows by name: data, model, loss and metrics, ready to train."""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from fedda import losses, models
from fedda.config import Config
from fedda.data import digits, partition
from fedda.data.shards import Shards, from_partition
from fedda.errors import unknown
from fedda.models import Model
from fedda.models.cnn import cnn
from fedda.models.linear import linear
from fedda.models.mlp import mlp
from fedda.task import ExampleWise


class Problem(NamedTuple):
    """A federation and what it is to learn."""

    model: Model
    shards: Shards
    test: tuple[Any, Any]
    loss: ExampleWise
    metrics: tuple[ExampleWise, ...]  # the first is the one results are judged by
    higher_is_better: bool
    histogram: np.ndarray  # [clients, classes]


# Cached, so that all runs of a comparison share one federation and one compiled program.
@lru_cache(maxsize=4)
def _digits(model: str, split: str, split_seed: int, clients: int) -> Problem:
    kinds: dict[str, Callable[[], Model]] = {
        "linear": lambda: linear(64, 10),
        "mlp": lambda: mlp(64, 64, 10),
        "cnn": lambda: cnn(8, 1, 10),
    }
    if model not in kinds:
        raise unknown("model of digits", model, kinds)
    data = digits.load()
    parts = partition.split(split, data.train_y, clients, split_seed, data.train_coarse)

    def unpack(x: Array) -> Array:  # pixels are stored as the whole numbers 0..16
        return x.astype(jnp.float32) / 16

    return Problem(
        model=models.with_input(kinds[model](), unpack),
        shards=from_partition(data.train_x, data.train_y, parts),
        test=(jnp.asarray(data.test_x), jnp.asarray(data.test_y)),
        loss=losses.cross_entropy,
        metrics=(losses.accuracy,),
        higher_is_better=True,
        histogram=partition.label_histogram(data.train_y, parts, digits.NUM_CLASSES),
    )


TASKS: dict[str, tuple[str, Callable[[Config], Problem]]] = {
    "digits": (
        "1,797 handwritten digits of 8x8 pixels, 10 classes, bundled with scikit-learn",
        lambda config: _digits(
            config.model, config.partition, config.partition_seed, config.clients
        ),
    ),
}


def load(config: Config) -> Problem:
    """The problem a configuration names."""
    if config.task not in TASKS:
        raise unknown("task", config.task, TASKS)
    _, build = TASKS[config.task]
    return build(config)
