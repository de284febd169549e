"""Scikit-learn's digits, split over clients as the configuration says."""

import jax.numpy as jnp
from jax import Array

from fedda import models
from fedda.core import losses
from fedda.data import digits, partition
from fedda.data.federation import from_partition
from fedda.models import cnn, linear, mlp
from fedda.tasks import Problem
from fedda.tasks.common import chosen_model
from fedda.tasks.config import Config


def build(config: Config) -> Problem:
    model = chosen_model(
        config,
        {
            "linear": lambda: linear(64, digits.NUM_CLASSES),
            "mlp": lambda: mlp(64, 64, digits.NUM_CLASSES),
            "cnn": lambda: cnn(8, 1, digits.NUM_CLASSES),
        },
    )
    data = digits.load()
    parts = partition.split(
        config.partition, data.train_y, config.clients, config.partition_seed, data.train_coarse
    )

    def unpack(x: Array) -> Array:  # pixels are stored as the whole numbers 0..16
        return x.astype(jnp.float32) / 16

    return Problem(
        model=models.with_input(model, unpack),
        shards=from_partition(data.train_x, data.train_y, parts),
        test=(data.test_x, data.test_y),
        loss=losses.cross_entropy,
        metrics=(losses.accuracy,),
        higher_is_better=True,
        labels=[str(digit) for digit in range(digits.NUM_CLASSES)],
    )
