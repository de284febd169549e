"""The rounds that `fedda bench` measures: the paper's models on random data of the real shapes.

What is learnt does not matter. There are 100 clients with one epoch of examples each, which lie on
the device as those of a real run do.
"""

import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from fedda.core import losses
from fedda.core.task import ExampleWise
from fedda.data import digits, preprocessing
from fedda.data.federation import Ragged, Shards, all_clients, num_rows
from fedda.errors import InputError, unknown
from fedda.models import Model, autoencoder, cnn, linear, mlp, resnet18, with_input, with_precision
from fedda.models.conv import Convolution, patches_conv
from fedda.tasks import cifar100, emnist, emnist_autoencoder
from fedda_bench.bench import Case

CLIENTS = 100
WORDS, TAGS = 10_000, 500  # vocabulary of the model of Stack Overflow
LONGEST = 64  # words of a text; the mean is about 20

Column = Array | Ragged


def _mlp(precision: str) -> Case:
    network = with_precision(mlp(64, 64, digits.NUM_CLASSES), precision)
    model = with_input(network, lambda x: x.astype(jnp.float32) / 16)
    x, y = _images(50, (8, 8, 1), 17), _labels(50, digits.NUM_CLASSES)
    return _case([model], x, y, losses.cross_entropy, batch=10, steps=5)


def _cnn(precision: str, steps: int) -> Case:
    def model(convolution: Convolution) -> Model:
        network = with_precision(cnn(28, 1, classes, convolution), precision)
        return with_input(network, lambda x: preprocessing.scaled(x)[..., None])

    classes = len(emnist.LABELS)
    x, y = _images(20 * steps, (28, 28)), _labels(20 * steps, classes)
    models = [model(convolution) for convolution in _convolutions()]
    return _case(models, x, y, losses.cross_entropy, batch=20, steps=steps)


def _autoencoder(precision: str) -> Case:
    model = with_input(with_precision(autoencoder(), precision), emnist_autoencoder.ink)
    x = _images(200, (28, 28))
    return _case([model], x, x, emnist_autoencoder.mse, batch=20, steps=10)


def _logistic(precision: str) -> Case:
    network = with_precision(linear(WORDS, TAGS), precision)
    model = with_input(network, lambda x: preprocessing.bag_of_words(x, WORDS, "known"))
    length = np.clip(np.random.default_rng(0).poisson(20, 1000 * CLIENTS), 1, LONGEST)
    x, y = _ranks(length, 60_000, LONGEST), _ranks(np.full(len(length), 2), 2_000, 2)
    return _case([model], x, y, losses.tag_cross_entropy, batch=100, steps=10)


def _resnet18(precision: str) -> Case:
    def prepare(x: Array) -> Array:
        return preprocessing.standardise(preprocessing.central_crop(x, cifar100.CROP))

    def augment(x: Array, key: Array) -> Array:
        return preprocessing.standardise(preprocessing.random_crop_and_flip(x, key, cifar100.CROP))

    def model(convolution: Convolution) -> Model:
        network = resnet18(cifar100.CLASSES, convolution=convolution)
        return with_input(with_precision(network, precision), prepare, augment)

    x, y = _images(100, (32, 32, 3)), _labels(100, cifar100.CLASSES)
    models = [model(convolution) for convolution in _convolutions()]
    return _case(models, x, y, losses.cross_entropy, batch=20, steps=5)


CASES: Mapping[str, Callable[[str], Case]] = {
    "mlp": _mlp,
    "cnn-small": partial(_cnn, steps=5),
    "cnn": partial(_cnn, steps=10),
    "autoencoder": _autoencoder,
    "logistic": _logistic,
    "resnet18": _resnet18,
}
ON_CPU = ("mlp", "cnn-small", "autoencoder")  # which two cores measure in about a minute


def with_sizes(case: Case, sizes: str) -> Case:
    """Return a case whose clients have unequal sizes and take one epoch.

    Args:
        case: The case of equal clients.
        sizes: `lognormal:SIGMA`, with the mean of the equal clients; `femnist`, those of the 396
            writers in LEAF's sample; or `stackexchange`, those of 3,610 users of seven sites, of
            whose posts at most 100 count.

    Raises:
        InputError: There are no such sizes.
    """
    known = json.loads(Path(__file__).with_name("sizes.json").read_text())
    name, _, sigma = sizes.partition(":")
    middle = (np.arange(CLIENTS) + 0.5) / CLIENTS  # the sizes in the middle of equal parts
    if name == "lognormal" and re.fullmatch(r"\d+(\.\d+)?", sigma):
        normal = [statistics.NormalDist().inv_cdf(share) for share in middle]
        draws = np.exp(float(sigma) * np.array(normal))
        count = draws * case.batch * case.steps / draws.mean()
    elif sizes in known:
        number, clients = (
            np.array(list(map(int, part))) for part in zip(*known[sizes].items(), strict=True)
        )
        count = np.quantile(np.repeat(number, clients), middle, method="nearest")
    else:
        raise unknown("value of --sizes", sizes, ["lognormal:1", *known])
    count = np.maximum(np.rint(count), 1).astype(np.int32)
    rows = num_rows(case.clients.y)  # random, so clients may have some in common
    if count.max() > rows:
        raise InputError(
            f"--sizes {sizes} needs {count.max()} examples, {rows} are there. Lower it."
        )
    start = np.random.default_rng(0).integers(0, rows - count + 1)
    shards = all_clients(case.clients.x, case.clients.y, start, count)
    steps = max(1, round(count.mean() / case.batch))
    return case._replace(clients=shards, steps=steps, sizes=sizes)


def _convolutions() -> tuple[Convolution, Convolution]:
    """Return the convolution for many models at once, and the fastest for a single model.

    On a CPU, XLA's convolution is slow in a loop.
    """
    on_cpu = jax.default_backend() == "cpu"
    return patches_conv, patches_conv if on_cpu else lax.conv_general_dilated


def _case(
    models: Sequence[Model], x: Column, y: Column, loss: ExampleWise, *, batch: int, steps: int
) -> Case:
    """Return the case of one model, or of one for federated and one for centralised training."""
    size = batch * steps
    start, count = size * jnp.arange(CLIENTS, dtype=jnp.int32), jnp.full(CLIENTS, size, jnp.int32)
    clients = Shards(x=x, y=y, start=start, count=count, max_count=size, num_clients=CLIENTS)
    return Case(models[0], models[-1], clients=clients, loss=loss, batch=batch, steps=steps)


def _images(examples: int, shape: tuple[int, ...], values: int = 256) -> Array:
    """Draw images for every client, as bytes."""
    rng = np.random.default_rng(1)
    return jnp.asarray(rng.integers(0, values, (examples * CLIENTS, *shape), np.uint8))


def _labels(examples: int, classes: int) -> Array:
    rng = np.random.default_rng(2)
    return jnp.asarray(rng.integers(0, classes, examples * CLIENTS, np.int32))


def _ranks(length: np.ndarray, known: int, width: int) -> Ragged:
    """Draw texts of these lengths, with words of a vocabulary by Zipf's law."""
    rng = np.random.default_rng(3)
    ranks = np.exp(rng.random(int(length.sum())) * np.log(known)).astype(np.uint16)
    start = jnp.asarray((np.cumsum(length) - length).astype(np.int32))
    return Ragged(jnp.asarray(ranks - 1), start, jnp.asarray(length.astype(np.int32)), width)
