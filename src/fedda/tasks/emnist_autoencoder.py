"""EMNIST: an autoencoder of handwritten characters with a code of 30 numbers."""

from jax import Array

from fedda import models
from fedda.core import losses
from fedda.data import preprocessing
from fedda.models import autoencoder
from fedda.tasks import Problem
from fedda.tasks.common import chosen_model, classification, federation
from fedda.tasks.config import Config


def ink(x: Array) -> Array:
    """Return the darkness of each pixel: the input and the target of the network."""
    return 1 - preprocessing.scaled(x).reshape(x.shape[0], -1)


@losses.lower_is_better
def mse(outputs: Array, images: Array) -> Array:
    """Return the squared error of a pixel, averaged over an image."""
    return losses.squared_error(outputs, ink(images))


def build(config: Config) -> Problem:
    network = chosen_model(config, {"autoencoder": autoencoder})
    found = federation("emnist", config, columns=("x", "x"))._replace(labels=[])
    return classification(models.with_input(network, ink), found)._replace(
        loss=mse, metrics=(mse,), reduction=config.options["reduction"]
    )
