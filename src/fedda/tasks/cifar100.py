"""CIFAR-100 with the ResNet-18 of the FedOpt experiments, or a small network for a laptop."""

from jax import Array

from fedda import models
from fedda.data import preprocessing
from fedda.models import cnn, resnet18
from fedda.tasks import Problem
from fedda.tasks.common import chosen_model, classification, federation
from fedda.tasks.config import Config

CROP = 24
CLASSES = 100


def build(config: Config) -> Problem:
    options = config.options
    network = chosen_model(
        config,
        {
            "resnet18": lambda: resnet18(CLASSES, affine=options["affine"], l2=options["l2"]),
            "cnn": lambda: cnn(CROP, 3, CLASSES),
        },
    )

    def prepare(x: Array) -> Array:
        return preprocessing.standardise(preprocessing.central_crop(x, CROP))

    def augment(x: Array, key: Array) -> Array:
        return preprocessing.standardise(preprocessing.random_crop_and_flip(x, key, CROP))

    model = models.with_input(network, prepare, augment if options["augment"] else None)
    return classification(model, federation("cifar100", config, paper_clients=500))
