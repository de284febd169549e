"""The data of a condition in blocks: one for tuning, and one for each seed.

All blocks are in one federation, so that runs on different blocks are one program: client `i` of
block `k` has the number `k * clients + i`. Every block has the same shapes.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import random

from fedda.core import losses
from fedda.core.task import ExampleWise
from fedda.data import digits, partition, streaming
from fedda.data.datasets import open_dataset
from fedda.data.federation import Shards, all_clients
from fedda.models import Model
from fedda.simulate.cohort import draw_cohort
from fedda_reproduction.study.design import Condition

HELD_OUT = 0.2  # the share of a client's examples that tuning is judged by
STRIDE = 1000  # the seed of a run is its block times this

Examples = tuple[np.ndarray, np.ndarray]


class Federation(NamedTuple):
    """A condition's data and model.

    Attributes:
        shards: All clients of all blocks.
        clients: The number of clients of a block.
        held_out: The examples by which settings are chosen, left out of the first block.
        tests: The test examples of each block; only those of the seeds' blocks are used.
        model: The network.
        loss: The loss of an example.
        metric: What is compared; higher is better.
    """

    shards: Shards
    clients: int
    held_out: Examples
    tests: Sequence[Examples]
    model: Model
    loss: ExampleWise
    metric: ExampleWise

    def sample(self, seed: int, number: int, population: int, size: int) -> np.ndarray:
        """Draw a cohort from the block of a run."""
        return draw_cohort(seed, number, self.clients, size) + seed // STRIDE * self.clients


def network(
    features: int, hidden: int, outputs: int, prepare: Callable[[Any], Any] = jnp.asarray
) -> Model:
    """Return a perceptron with one hidden layer, or a linear model if `hidden` is 0.

    Its weights come from one draw of random numbers, which compiles faster than one for each layer.
    """
    sizes = [(features, hidden), (hidden, outputs)] if hidden else [(features, outputs)]

    def init(key: Any) -> Any:
        uniform = random.uniform(key, (sum(n * m for n, m in sizes),), minval=-1, maxval=1)
        layers, start = [], 0
        for n, m in sizes:
            scale = np.float32(np.sqrt(6 / (n + m)))  # Glorot and Bengio
            kernel = scale * uniform[start : start + n * m].reshape(n, m)
            layers.append({"kernel": kernel, "bias": jnp.zeros(m)})
            start += n * m
        return tuple(layers)

    def apply(params: Any, x: Any) -> Any:
        x = prepare(x).reshape(x.shape[0], -1)
        *first, last = params
        for layer in first:
            x = jax.nn.relu(x @ layer["kernel"] + layer["bias"][None])
        return x @ last["kernel"] + last["bias"][None]

    return Model(init, apply)


def load(condition: Condition, seeds: int) -> Federation:
    """Return the data of a condition, with a block for tuning and one for each seed.

    Raises:
        InputError: The data set was not imported.
    """
    return _LOADERS[condition.task](condition, seeds + 1)


def _joined(blocks: Sequence[Sequence[Examples]], most: int, **parts: Any) -> Federation:
    """Return the federation of these blocks, of clients with up to `most` examples each.

    In the first block, the last examples of each client are held out.
    """
    clients, count, start, held, rows = len(blocks[0]), [], [], [], 0
    for number, block in enumerate(blocks):
        for x, y in block:
            kept = len(y) - round(HELD_OUT * len(y)) if number == 0 else len(y)
            if number == 0:
                held.append((x[kept:], y[kept:]))
            count.append(kept)
            start.append(rows)
            rows += len(y)
    x, y = _concatenated([pair for block in blocks for pair in block])
    # One size for all seeds and kinds of clients, so that they share a program.
    shards = replace(
        all_clients(jnp.asarray(x), jnp.asarray(y), np.array(start), np.array(count)),
        max_count=most,
        even=False,
    )
    return Federation(shards=shards, clients=clients, held_out=_concatenated(held), **parts)


def _concatenated(pairs: Sequence[Examples]) -> Examples:
    return np.concatenate([x for x, _ in pairs]), np.concatenate([y for _, y in pairs])


# ------------------------------------------------------------------------------------------ digits

DIGITS_CLIENTS, DIGITS_MOST = 100, 96


@lru_cache(maxsize=1)
def _digits_network() -> Model:
    return network(64, 32, digits.NUM_CLASSES, lambda x: x.astype(jnp.float32) / 16)


def _digits(condition: Condition, blocks: int) -> Federation:
    data = digits.load()
    how = "iid" if condition.variety == "inf" else f"dirichlet:{condition.variety}"
    made = []
    for block in range(blocks):
        rng = np.random.default_rng([block, 1])
        parts = partition.split(how, data.train_y, DIGITS_CLIENTS, 10_000 + block)
        mixed = [rng.permutation(rows)[:DIGITS_MOST] for rows in parts]
        made.append([(data.train_x[rows], data.train_y[rows]) for rows in mixed])
    return _joined(
        made, DIGITS_MOST, tests=[(data.test_x, data.test_y)] * blocks, model=_digits_network(),
        loss=losses.cross_entropy, metric=losses.accuracy,
    )  # fmt: skip


# --------------------------------------------------------------------------------------- synthetic

FEATURES, CLASSES, SYNTHETIC_CLIENTS, SYNTHETIC_MOST, TESTED = 60, 10, 30, 200, 50


@lru_cache(maxsize=1)
def _synthetic_network() -> Model:
    return network(FEATURES, 0, CLASSES)


def _synthetic(condition: Condition, blocks: int) -> Federation:
    """FedProx's synthetic(alpha, beta). A block draws new examples of the same clients."""
    alpha, beta = map(float, condition.variety.split(","))
    rng = np.random.default_rng(2020)
    sizes = np.minimum(50 + rng.lognormal(4, 2, SYNTHETIC_CLIENTS).astype(int), SYNTHETIC_MOST)
    rule_means = alpha * rng.normal(size=SYNTHETIC_CLIENTS)
    centres = beta * rng.normal(size=SYNTHETIC_CLIENTS)
    rules = rng.normal(rule_means[:, None, None], 1, (SYNTHETIC_CLIENTS, FEATURES + 1, CLASSES))
    means = rng.normal(centres[:, None], 1, (SYNTHETIC_CLIENTS, FEATURES))
    deviations = np.arange(1, FEATURES + 1) ** -0.6

    def draw(block: int, client: int, number: int) -> Examples:
        noise = np.random.default_rng([block, client]).normal(size=(number, FEATURES))
        x = (means[client] + deviations * noise).astype(np.float32)
        scores = x.astype(float) @ rules[client, :-1] + rules[client, -1]
        return x, np.argmax(scores, 1).astype(np.int32)

    made, tests = [], []
    for block in range(blocks):
        drawn = [draw(block, client, size + TESTED) for client, size in enumerate(sizes)]
        made.append([(x[TESTED:], y[TESTED:]) for x, y in drawn])
        tests.append(_concatenated([(x[:TESTED], y[:TESTED]) for x, y in drawn]))
    return _joined(
        made, SYNTHETIC_MOST, tests=tests, model=_synthetic_network(),
        loss=losses.cross_entropy, metric=losses.accuracy,
    )  # fmt: skip


# ------------------------------------------------------------------------------------------ EMNIST

WRITER_MOST = 60  # examples that a block draws from a writer
WRITTEN = 62


@lru_cache(maxsize=1)
def _emnist_network() -> Model:
    return network(14 * 14, 32, WRITTEN, lambda x: 1 - x.astype(jnp.float32) / 255)


def _halved(images: np.ndarray) -> np.ndarray:
    """Return images of 14x14 pixels: means of four pixels, as whole numbers."""
    x = np.asarray(images)
    x = x * 255 if x.dtype.kind == "f" else x
    small = x.reshape(-1, 14, 2, 14, 2).astype(np.float32).mean((2, 4))
    return np.rint(small).astype(np.uint8)


def _emnist(condition: Condition, blocks: int) -> Federation:
    """The writers of EMNIST. A block draws some of the training examples of every writer."""
    store = open_dataset("emnist")
    split, test = store.splits["train"], store.splits["test"]
    images, labels = _halved(split.fields["x"].values), np.asarray(split.fields["y"].values)
    starts = np.cumsum(split.count) - split.count
    made = []
    for block in range(blocks):
        rng = np.random.default_rng([block, 2])
        rows = [
            start + rng.permutation(count)[:WRITER_MOST]
            for start, count in zip(starts, split.count, strict=True)
        ]
        made.append([(images[own], labels[own].astype(np.int32)) for own in rows])
    x, y = streaming.union(test)
    tests = [(_halved(np.asarray(x)), np.asarray(y).astype(np.int32))] * blocks
    return _joined(
        made, WRITER_MOST, tests=tests, model=_emnist_network(),
        loss=losses.cross_entropy, metric=losses.accuracy,
    )  # fmt: skip


# ---------------------------------------------------------------------------------- Stack Exchange

WORDS, TAGS, USER_MOST = 500, 50, 20


@lru_cache(maxsize=1)
def _stackexchange_network() -> Model:
    return network(WORDS, 0, TAGS, lambda x: 10 * x.astype(jnp.float32))


def _stackexchange(condition: Condition, blocks: int) -> Federation:
    """Tags of posts, of the most frequent words and tags only. A block draws some of every user."""
    from fedda.data.preprocessing import bag_of_words

    store = open_dataset("stackexchange")

    def dense(split: Any) -> Examples:
        x, y = streaming.union(split)
        bag = jax.jit(lambda rows: bag_of_words(x[rows], vocabulary=WORDS, denominator="known"))
        rows = np.arange(y.shape[0])
        parts = [np.asarray(bag(part), np.float16) for part in np.array_split(rows, 64)]
        tags = np.asarray(y[jnp.asarray(rows)])
        hot = np.zeros((len(rows), TAGS), np.int8)
        places = np.nonzero(tags < TAGS)
        hot[places[0], tags[places].astype(int)] = 1
        return np.concatenate(parts), hot

    x, y = dense(store.splits["train"])
    count = store.splits["train"].count
    starts = np.cumsum(count) - count
    chosen = np.flatnonzero(count >= 5)
    made = []
    for block in range(blocks):
        rng = np.random.default_rng([block, 3])
        rows = [starts[user] + rng.permutation(count[user])[:USER_MOST] for user in chosen]
        made.append([(x[own], y[own]) for own in rows])
    return _joined(
        made, USER_MOST, tests=[dense(store.splits["test"])] * blocks,
        model=_stackexchange_network(), loss=_tags_loss, metric=_tags_recall,
    )  # fmt: skip


def _tags_loss(outputs: Any, y: Any) -> Any:
    """Return the sum over tags of the logistic losses."""
    return (jax.nn.softplus(outputs) - outputs * y.astype(outputs.dtype)).sum(-1)


def _tags_recall(outputs: Any, y: Any) -> Any:
    """Return the hits among the five highest outputs, and the number of tags."""
    best = jax.lax.top_k(outputs, 5)[1]
    hits = jnp.take_along_axis(y, best, -1).astype(outputs.dtype).sum(-1)
    return hits, y.astype(outputs.dtype).sum(-1)


_LOADERS: dict[str, Callable[[Condition, int], Federation]] = {
    "digits": _digits,
    "synthetic": _synthetic,
    "emnist": _emnist,
    "stackexchange": _stackexchange,
}
