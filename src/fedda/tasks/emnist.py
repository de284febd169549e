"""EMNIST characters, each writer a client: to tell which of 62 it is."""

import string

from jax import Array

from fedda import models
from fedda.core import losses
from fedda.data import inputs
from fedda.models import cnn, linear, mlp
from fedda.tasks import Problem
from fedda.tasks.common import chosen_model, federation
from fedda.tasks.config import Config

LABELS = string.digits + string.ascii_uppercase + string.ascii_lowercase


def build(config: Config) -> Problem:
    network = chosen_model(
        config,
        {
            "cnn": lambda: cnn(28, 1, len(LABELS)),
            "linear": lambda: linear(784, len(LABELS)),
            "mlp": lambda: mlp(784, 128, len(LABELS)),
        },
    )

    def prepare(x: Array) -> Array:
        return inputs.scaled(x)[..., None]

    found = federation("emnist", config)
    return Problem(
        model=models.with_input(network, prepare),
        shards=found.shards,
        test=found.test,
        loss=losses.cross_entropy,
        metrics=(losses.accuracy,),
        higher_is_better=True,
        labels=LABELS,
        data=found.data,
    )
