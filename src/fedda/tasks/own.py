"""A federation that a user imported: classification if its labels are whole numbers."""

import math

import jax.numpy as jnp
from jax import Array

from fedda import models
from fedda.core import losses
from fedda.data import inputs
from fedda.errors import InputError
from fedda.models import cnn, linear, mlp
from fedda.tasks import Problem
from fedda.tasks.common import chosen_model, federation
from fedda.tasks.config import Config


def prepare(x: Array) -> Array:
    """The bytes of images become numbers in [0, 1], and grey images get a channel."""
    x = inputs.scaled(x) if x.ndim > 2 else x.astype(jnp.float32)
    return x[..., None] if x.ndim == 3 else x


def mean_squared_error(outputs: Array, targets: Array) -> Array:
    return losses.squared_error(outputs, targets.reshape(outputs.shape))


def build(config: Config) -> Problem:
    name = config.options["data"]
    if not name:
        raise InputError(
            "task own needs data=NAME: the name of a federation from `fedda data import NAME PATH`."
        )
    found = federation(name, config)
    x, y = found.test
    shape = tuple(x.shape[1:])
    classes = len(found.labels)
    features, outputs = math.prod(shape), classes or math.prod(y.shape[1:])
    square = len(shape) in (2, 3) and shape[0] == shape[1]
    kinds = {
        "linear": lambda: linear(features, outputs),
        "mlp": lambda: mlp(features, 128, outputs),
    }
    if square:
        kinds["cnn"] = lambda: cnn(shape[0], shape[2] if len(shape) == 3 else 1, outputs)
    return Problem(
        model=models.with_input(chosen_model(config, kinds), prepare),
        shards=found.shards,
        test=found.test,
        loss=losses.cross_entropy if classes else mean_squared_error,
        metrics=(losses.accuracy,) if classes else (mean_squared_error,),
        higher_is_better=bool(classes),
        labels=found.labels,
        data=found.data,
    )
