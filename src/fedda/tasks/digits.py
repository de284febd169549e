"""Scikit-learn's digits, divided among clients."""

import jax.numpy as jnp
from jax import Array

from fedda import models
from fedda.data import digits, partition
from fedda.data.federation import from_partition
from fedda.tasks import Problem
from fedda.tasks.common import Federation, basic_models, chosen_model, classification
from fedda.tasks.config import Config


def unpack(x: Array) -> Array:
    """Scale pixels, which are stored as the whole numbers 0..16, to [0, 1]."""
    return x.astype(jnp.float32) / 16


def build(config: Config) -> Problem:
    network = chosen_model(config, basic_models((8, 8), 64, digits.NUM_CLASSES))
    data = digits.load()
    parts = partition.split(
        config.partition, data.train_y, config.clients, config.partition_seed, data.train_coarse
    )
    found = Federation(
        shards=from_partition(data.train_x, data.train_y, parts),
        test=(data.test_x, data.test_y),
        labels=[str(digit) for digit in range(digits.NUM_CLASSES)],
    )
    return classification(models.with_input(network, unpack), found)
