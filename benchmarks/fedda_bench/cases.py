"""The rounds that `fedda bench` measures: the paper's models on drawn data of the real shapes.

What is learnt does not matter. There are 100 clients with one epoch of examples each, which lie on
the device as those of a real run do.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedda.core import losses
from fedda.core.task import ExampleWise
from fedda.data import digits, inputs
from fedda.data.federation import Ragged, Shards
from fedda.models import Model, autoencoder, cnn, linear, mlp, resnet18, with_input, with_precision
from fedda.models.conv import Convolution, patches_conv
from fedda.tasks import cifar100, emnist, emnist_autoencoder
from fedda_bench.bench import Case

CLIENTS = 100
WORDS, TAGS = 10_000, 500  # that the model of Stack Overflow knows
LONGEST = 64  # words of a text; about 20 is the mean

Column = Array | Ragged
ON_CPU = ("mlp", "cnn-small", "autoencoder")  # which two cores measure in about a minute


def build(name: str, precision: str) -> Case:
    return CASES[name](name, precision)


def _mlp(name: str, precision: str) -> Case:
    def unpack(x: Array) -> Array:
        return x.astype(jnp.float32) / 16

    network = with_precision(mlp(64, 64, digits.NUM_CLASSES), precision)
    x, y = _images(50, (8, 8, 1), 17), _labels(50, digits.NUM_CLASSES)
    return _case(name, with_input(network, unpack), x, y, losses.cross_entropy, 10, 5)


def _cnn(name: str, precision: str, steps: int = 10) -> Case:
    def prepare(x: Array) -> Array:
        return inputs.scaled(x)[..., None]

    def model(convolution: Convolution) -> Model:
        network = cnn(28, 1, classes, convolution)
        return with_input(with_precision(network, precision), prepare)

    classes, examples = len(emnist.LABELS), 20 * steps
    x, y = _images(examples, (28, 28)), _labels(examples, classes)
    case = _case(name, model(patches_conv), x, y, losses.cross_entropy, 20, steps)
    return case._replace(central=model(_usual_convolution()))


def _small_cnn(name: str, precision: str) -> Case:
    return _cnn(name, precision, steps=5)


def _autoencoder(name: str, precision: str) -> Case:
    network = with_precision(autoencoder(), precision)
    x = _images(200, (28, 28))
    model = with_input(network, emnist_autoencoder.ink)
    return _case(name, model, x, x, emnist_autoencoder.mse, 20, 10)


def _logistic(name: str, precision: str) -> Case:
    def bag(x: Array) -> Array:
        return inputs.bag_of_words(x, WORDS, "known")

    network = with_precision(linear(WORDS, TAGS), precision)
    rng = np.random.default_rng(0)
    length = np.clip(rng.poisson(20, 1000 * CLIENTS), 1, LONGEST)
    x, y = _ranks(length, 60_000, LONGEST), _ranks(np.full(len(length), 2), 2_000, 2)
    return _case(name, with_input(network, bag), x, y, losses.tag_cross_entropy, 100, 10)


def _resnet18(name: str, precision: str) -> Case:
    def prepare(x: Array) -> Array:
        return inputs.standardise(inputs.central_crop(x, cifar100.CROP))

    def augment(x: Array, key: Array) -> Array:
        return inputs.standardise(inputs.random_crop_and_flip(x, key, cifar100.CROP))

    def model(convolution: Convolution) -> Model:
        network = resnet18(cifar100.CLASSES, convolution=convolution)
        return with_input(with_precision(network, precision), prepare, augment)

    x, y = _images(100, (32, 32, 3)), _labels(100, cifar100.CLASSES)
    case = _case(name, model(patches_conv), x, y, losses.cross_entropy, 20, 5)
    return case._replace(central=model(_usual_convolution()))


def _usual_convolution() -> Convolution:
    """The fastest for a single model: in a loop on a CPU, that is not XLA's own."""
    return patches_conv if jax.default_backend() == "cpu" else lax.conv_general_dilated


# In the order of memory: what the largest so far has taken is then each one's own.
CASES: dict[str, Callable[[str, str], Case]] = {
    "mlp": _mlp,
    "cnn-small": _small_cnn,
    "cnn": _cnn,
    "autoencoder": _autoencoder,
    "logistic": _logistic,
    "resnet18": _resnet18,
}


def _case(
    name: str, model: Model, x: Column, y: Column, loss: ExampleWise, batch: int, steps: int
) -> Case:
    count = np.full(CLIENTS, batch * steps, np.int32)
    start = np.cumsum(count, dtype=np.int32) - count
    clients = Shards(x, y, jnp.asarray(start), jnp.asarray(count), batch * steps, CLIENTS)
    return Case(name, model, model, clients, loss, batch, steps)


def _images(examples: int, shape: tuple[int, ...], values: int = 256) -> Array:
    """So many examples of each client, as bytes."""
    rng = np.random.default_rng(1)
    return jnp.asarray(rng.integers(0, values, (examples * CLIENTS, *shape), np.uint8))


def _labels(examples: int, classes: int) -> Array:
    rng = np.random.default_rng(2)
    return jnp.asarray(rng.integers(0, classes, examples * CLIENTS, np.int32))


def _ranks(length: np.ndarray, known: int, width: int) -> Ragged:
    """Texts of these lengths, their words drawn by Zipf's law out of so many."""
    rng = np.random.default_rng(3)
    ranks = np.exp(rng.random(int(length.sum())) * np.log(known)).astype(np.uint16)
    start, length = (each.astype(np.int32) for each in (np.cumsum(length) - length, length))
    return Ragged(jnp.asarray(ranks - 1), jnp.asarray(start), jnp.asarray(length), width)
