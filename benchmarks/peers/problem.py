"""Writes the federation and the weights that all peers start with, with fedda's environment.

    python problem.py TASK FILE SETTINGS

TASK names the data, FILE is a .npz, SETTINGS is JSON: how many clients there are, and the other
fields of `protocol.Problem`. Every client has as many examples as it visits in a round, so the
frameworks agree on what a round is whether they count in steps or in epochs. One round is written
out: the clients and batches that fedda draws in its first.
"""

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from protocol import Problem

from fedda import api
from fedda.core import losses
from fedda.data.federation import from_clients
from fedda.models import Model, cnn, mlp, resnet18
from fedda.simulate.cohort import draw_cohort

SEED = 0


def network(name: str, l2: float) -> Model:
    """A model of fedda without dropout: then all frameworks do the same arithmetic."""
    model: Model = {
        "cnn": lambda: cnn(28, 1, 62),
        "mlp": lambda: mlp(64, 64, 10),
        "resnet18": lambda: resnet18(l2=l2),
    }[name]()
    return model._replace(train=None)


def named(tree: Any) -> dict[str, Any]:
    """The leaves of a tree of parameters by their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {"/".join(str(entry.key) for entry in path): leaf for path, leaf in leaves}


def model_of(problem: Problem) -> Model:
    """Fedda's model, which starts with the problem's weights."""
    model = network(problem.model, problem.l2)
    structure = jax.tree.structure(model.shapes())
    names = named(model.shapes())

    def init(key: Any) -> Any:
        return jax.tree.unflatten(structure, [problem.weights[name] for name in names])

    return model._replace(init=init)


def examples(task: str, clients: int, each: int) -> tuple[np.ndarray, np.ndarray]:
    """Digits are real, drawn with replacement; the others are a random picture a class, spoilt."""
    rng = np.random.default_rng(SEED)
    if task == "digits":
        from fedda.data import digits

        data = digits.load()
        rows = rng.integers(0, len(data.train_y), (clients, each))
        x = data.train_x.reshape(len(data.train_x), -1)
        return (x[rows] / 16).astype(np.float32), data.train_y[rows].astype(np.int32)
    shape, classes = {"emnist": ((28, 28, 1), 62), "resnet": ((24, 24, 3), 100)}[task]
    y = rng.integers(0, classes, (clients, each), dtype=np.int32)
    pictures = rng.random((classes, *shape)) < 0.3
    spoilt = rng.random((clients, each, *shape), dtype=np.float32) < 0.1
    x = (pictures[y] ^ spoilt).astype(np.float32)
    return (x if task == "emnist" else (x - x.mean()) / x.std()), y


def drawn(
    model: Model, x: np.ndarray, y: np.ndarray, settings: dict[str, Any]
) -> tuple[np.ndarray, np.ndarray]:
    """The clients of fedda's first round, and the rows of their batches."""
    setup, _ = api.prepare(
        settings["algorithm"],
        model,
        list(zip(x, y, strict=True)),
        losses.cross_entropy,
        cohort=settings["cohort"],
        batch=settings["batch"],
        local_work=settings["steps"],
    )
    clients = draw_cohort(SEED, 0, len(x), settings["cohort"])
    key = random.key(SEED)
    for number in (1, 0, 0):  # the rounds of a run, its first round, the first exchange of that
        key = random.fold_in(key, number)
    shards = from_clients(zip(x, y, strict=True))

    @jax.jit
    @jax.vmap
    def rows(client: Array) -> Array:
        batches = setup.task.batches(shards.shard(client), random.fold_in(key, client))
        steps = jnp.arange(settings["steps"])
        return jax.vmap(lambda step: batches.at(step).rows)(steps).reshape(-1)

    return clients, np.asarray(rows(clients))


def main() -> None:
    task, path, text = sys.argv[1:]
    settings = json.loads(text)
    x, y = examples(task, settings.pop("clients"), settings["steps"] * settings["batch"])
    model = network(settings["model"], settings["l2"])
    clients, rows = drawn(model, x, y, settings)
    weights = {
        f"weights/{name}": leaf for name, leaf in named(model.init(random.key(SEED))).items()
    }
    np.savez(path, x=x, y=y, clients=clients, rows=rows, settings=json.dumps(settings), **weights)


if __name__ == "__main__":
    main()
