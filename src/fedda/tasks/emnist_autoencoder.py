"""EMNIST characters, each writer a client: to draw it again from 30 numbers."""

from jax import Array

from fedda import models
from fedda.core import losses
from fedda.data import inputs
from fedda.models import autoencoder
from fedda.tasks import Problem
from fedda.tasks.common import chosen_model, federation
from fedda.tasks.config import Config


def ink(x: Array) -> Array:
    """How dark each pixel is: an image as the network sees it, and as it should come out."""
    return 1 - inputs.scaled(x).reshape(x.shape[0], -1)


def mse(outputs: Array, images: Array) -> Array:
    """The squared error of a pixel, averaged over an image."""
    return losses.squared_error(outputs, ink(images))


def build(config: Config) -> Problem:
    network = chosen_model(config, {"autoencoder": autoencoder})
    found = federation("emnist", config, columns=("x", "x"))
    return Problem(
        model=models.with_input(network, ink),
        shards=found.shards,
        test=found.test,
        loss=mse,
        metrics=(mse,),
        higher_is_better=False,
        labels=(),
        reduction=config.options["reduction"],
        data=found.data,
    )
