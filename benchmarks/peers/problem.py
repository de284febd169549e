"""Writes the federation and the weights that all peers start with, with fedda's environment.

    python problem.py TASK FILE SETTINGS

TASK names the data, FILE is a .npz, SETTINGS is JSON: how many clients there are, their sizes, and
the other fields of `protocol.Problem`. Every client visits each of its examples once in a round, so
the frameworks agree on what a round is whether they count in steps or in epochs. One round is
written out: the clients and batches that fedda draws in its first.
"""

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, random
from protocol import Problem, local_work, split

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


# The numbers of training images of 396 writers of FEMNIST: 100 quantiles.
FEMNIST = (
    *(4, 9, 18, 24, 37, 48, 63, 69, 85, 92, 95, 102, 108, 113, 116, 120, 123, 124, 125, 127, 128),
    *(130, 133, 133, 135, 135, 136, 137, 138, 138, 138, 139, 140, 141, 143, 143, 144, 144, 144),
    *(145, 145, 145, 146, 147, 148, 148, 149, 149, 149, 150, 150, 151, 151, 151, 152, 152, 152),
    *(153, 153, 153, 153, 153, 154, 154, 154, 155, 155, 155, 155, 156, 156, 156, 156, 157, 157),
    *(157, 158, 158, 158, 158, 159, 159, 159, 160, 160, 160, 160, 161, 161, 162, 162, 162, 162),
    *(162, 163, 163, 163, 164, 164, 165),
)


def counts(sizes: str, clients: int, mean: int) -> np.ndarray:
    """The number of examples of each client: "equal", "femnist", or "lognormal:SIGMA"."""
    rng = np.random.default_rng(SEED)
    if sizes == "femnist":
        return rng.choice(FEMNIST, clients, replace=clients > len(FEMNIST))
    sigma = float(sizes.partition(":")[2] or 0)
    drawn = rng.lognormal(-(sigma**2) / 2, sigma, clients)
    return np.maximum(1, np.rint(mean * drawn)).astype(int)


def examples(task: str, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Digits are real, drawn with replacement; the others are a random picture a class, spoilt."""
    rng = np.random.default_rng(SEED)
    if task == "digits":
        from fedda.data import digits

        data = digits.load()
        rows = rng.integers(0, len(data.train_y), count)
        x = data.train_x.reshape(len(data.train_x), -1)
        return (x[rows] / 16).astype(np.float32), data.train_y[rows].astype(np.int32)
    shape, classes = {"emnist": ((28, 28, 1), 62), "resnet": ((24, 24, 3), 100)}[task]
    y = rng.integers(0, classes, count, dtype=np.int32)
    pictures = rng.random((classes, *shape)) < 0.3
    spoilt = rng.random((count, *shape), dtype=np.float32) < 0.1
    x = (pictures[y] ^ spoilt).astype(np.float32)
    return (x if task == "emnist" else (x - x.mean()) / x.std()), y


def drawn(
    model: Model, clients: list[tuple[np.ndarray, np.ndarray]], settings: dict[str, Any]
) -> tuple[np.ndarray, list[np.ndarray]]:
    """The clients of fedda's first round, and the rows that they visit, in order."""
    setup, _ = api.prepare(
        settings["algorithm"],
        model,
        clients,
        losses.cross_entropy,
        cohort=settings["cohort"],
        batch=settings["batch"],
        **local_work(settings),
    )
    cohort = draw_cohort(SEED, 0, len(clients), settings["cohort"])
    key = random.key(SEED)
    for number in (1, 0, 0):  # the rounds of a run, its first round, the first exchange of that
        key = random.fold_in(key, number)
    shards = from_clients(clients)
    most = -(-shards.max_count // settings["batch"])

    @jax.jit
    @jax.vmap
    def batches(client: Array) -> tuple[Array, Array]:
        own = setup.task.batches(shards.shard(client), random.fold_in(key, client))
        steps = jax.vmap(own.at)(jnp.arange(most))
        return steps.rows.reshape(-1), steps.mask.reshape(-1)

    return cohort, [
        rows[mask] for rows, mask in zip(*map(np.asarray, batches(cohort)), strict=True)
    ]


def main() -> None:
    task, path, text = sys.argv[1:]
    settings = json.loads(text)
    count = counts(
        settings["sizes"], settings.pop("clients"), settings["steps"] * settings["batch"]
    )
    x, y = examples(task, count.sum())
    model = network(settings["model"], settings["l2"])
    cohort, rows = drawn(model, split(x, y, count), settings)
    weights = {
        f"weights/{name}": leaf for name, leaf in named(model.init(random.key(SEED))).items()
    }
    arrays = {"x": x, "y": y, "count": count, "cohort": cohort, "rows": np.concatenate(rows)}
    np.savez(path, settings=json.dumps(settings), **arrays, **weights)


if __name__ == "__main__":
    main()
