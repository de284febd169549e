"""A data set of the user: classification if it has classes, else regression."""

import math

import jax.numpy as jnp
from jax import Array

from fedda import models
from fedda.core import losses
from fedda.data import preprocessing
from fedda.errors import InputError
from fedda.tasks import Problem
from fedda.tasks.common import basic_models, chosen_model, classification, federation
from fedda.tasks.config import Config


def prepare(x: Array) -> Array:
    """Scale the bytes of images to [0, 1], and give grey images a channel."""
    x = preprocessing.scaled(x) if x.ndim > 2 else x.astype(jnp.float32)
    return x[..., None] if x.ndim == 3 else x


@losses.lower_is_better
def mean_squared_error(outputs: Array, targets: Array) -> Array:
    return losses.squared_error(outputs, targets.reshape(outputs.shape))


def build(config: Config) -> Problem:
    name = config.options["data"]
    if not name:
        raise InputError(
            "task own needs data=NAME, the name of a data set from `fedda data import NAME PATH`."
        )
    found = federation(name, config)
    x, y = found.test
    outputs = len(found.labels) or math.prod(y.shape[1:])
    network = chosen_model(config, basic_models(tuple(x.shape[1:]), 128, outputs))
    problem = classification(models.with_input(network, prepare), found)
    if found.labels:
        return problem
    return problem._replace(loss=mean_squared_error, metrics=(mean_squared_error,))
