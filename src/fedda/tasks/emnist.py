"""EMNIST: classify handwritten characters into 62 classes. Each writer is a client."""

import string

from jax import Array

from fedda import models
from fedda.data import preprocessing
from fedda.tasks import Problem
from fedda.tasks.common import basic_models, chosen_model, classification, federation
from fedda.tasks.config import Config

LABELS = [*string.digits, *string.ascii_uppercase, *string.ascii_lowercase]


def prepare(x: Array) -> Array:
    """Scale pixels to [0, 1], and give images a channel."""
    return preprocessing.scaled(x)[..., None]


def build(config: Config) -> Problem:
    network = chosen_model(config, basic_models((28, 28), 128, len(LABELS)))
    found = federation("emnist", config)._replace(labels=LABELS)
    return classification(models.with_input(network, prepare), found)
