"""Parts that several tasks share: models by name, a federation of stored data, classification."""

import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from fedda.core import losses
from fedda.data import partition, streaming
from fedda.data.datasets import open_dataset
from fedda.data.federation import Shards, all_clients, from_partition, num_rows
from fedda.data.preparation import Preparation
from fedda.data.readers.table import stored_preparation
from fedda.data.store import Split, Store
from fedda.data.streaming import XY, Columns, Feed
from fedda.errors import InputError, unknown
from fedda.models import Model, cnn, linear, mlp, with_precision
from fedda.tasks import Problem
from fedda.tasks.config import Config

_LARGEST = 2**31  # rows, or values of ragged rows, that int32 can number


class Federation(NamedTuple):
    """The clients to train on, a test set, and their origin."""

    shards: Shards | Feed
    test: tuple[Any, Any]
    labels: list[str]  # names of the classes; empty if targets are not classes
    data: Mapping[str, Any] = {}  # for the results
    names: Sequence[str] = ()  # of the clients, if the files name them
    preparation: Preparation | None = None  # how the columns of a table became features
    test_clients: Callable[[], Shards] | None = None  # the test examples of each client

    def __repr__(self) -> str:
        return f"Federation({self.shards}, {num_rows(self.test[1]):,} test examples)"


def classification(model: Model, federation: Federation) -> Problem:
    """Return a classification problem."""
    return Problem(
        model=model,
        loss=losses.cross_entropy,
        metrics=(losses.accuracy,),
        **federation._asdict(),
    )


def chosen_model(config: Config, kinds: Mapping[str, Callable[[], Model]]) -> Model:
    """Return the model of a configuration.

    Call this before the data are loaded, so that a wrong name is refused at once.
    """
    if config.model not in kinds:
        raise unknown(f"model of {config.task}", config.model, kinds)
    return with_precision(kinds[config.model](), config.precision)


def basic_models(
    shape: tuple[int, ...], hidden: int, outputs: int
) -> dict[str, Callable[[], Model]]:
    """Return a linear model, a perceptron and, for square images, a convolutional network."""
    features = math.prod(shape)
    kinds = {
        "linear": lambda: linear(features, outputs),
        "mlp": lambda: mlp(features, hidden, outputs),
    }
    if len(shape) in (2, 3) and shape[0] == shape[1]:
        kinds["cnn"] = lambda: cnn(shape[0], shape[2] if len(shape) == 3 else 1, outputs)
    return kinds


def federation(
    name: str, config: Config, columns: Columns = XY, paper_clients: int = 0
) -> Federation:
    """Load a data set whose examples have one shape, with the partition of a configuration.

    Args:
        name: The data set.
        config: The configuration: its `partition`, `partition_seed`, `clients` and `data_gb`.
        columns: The columns of the inputs and the targets.
        paper_clients: The number of clients, if neither the files nor the configuration set it.
    """
    store = open_dataset(name)
    split, test = store.splits["train"], store.splits["test"]
    if any(split.fields[column].length is not None for column in columns):
        raise InputError(
            f"{config.task} needs examples of one shape, but {name} contains texts. Use the task "
            f"{name}."
        )
    how = config.partition
    if how == "paper":
        how = "user" if split.num_clients > 1 else "pachinko:0.1"
    if how == "user":
        shards = as_stored(name, split, config, columns=columns)
    else:
        stored = split.num_clients if split.num_clients > 1 else paper_clients
        shards = _redrawn(how, split, config, config.clients or stored, columns)
    prepared = stored_preparation(store)
    about_columns = {} if prepared is None else {"preparation": json.loads(prepared.to_json())}
    examples = streaming.union(test, columns=columns)
    shared = how == "user" and {*test.clients} <= {*split.clients}
    return Federation(
        shards=shards,
        test=examples,
        labels=_labels(store),
        data=provenance(name, store) | {"partition": how} | about_columns,
        names=split.clients if how == "user" else (),
        preparation=prepared,
        test_clients=partial(_divided, examples, split, test) if shared else None,
    )


def _divided(examples: tuple[Any, Any], train: Split, test: Split) -> Shards:
    """Return the test examples of each training client, which may have none."""
    place = {name: number for number, name in enumerate(test.clients)}
    places = np.array([place.get(name, -1) for name in train.clients])
    count = np.where(places < 0, 0, test.count[places])
    start = (np.cumsum(test.count) - test.count)[places]
    x, y = (jnp.asarray(column) for column in examples)
    return all_clients(x, y, start, count)


def _labels(store: Store) -> list[str]:
    """Return the names of the classes, or their numbers if the files name none."""
    if "labels.txt" in store.meta["files"]:
        return store.text("labels.txt").splitlines()
    values = [split.fields["y"].values for split in store.splits.values()]
    if values[0].dtype.kind not in "iu" or values[0].ndim > 1:
        return []
    return [str(label) for label in range(1 + max(int(labels.max()) for labels in values))]


def as_stored(
    name: str, split: Split, config: Config, most: int | None = None, columns: Columns = XY
) -> Shards | Feed:
    """Return the clients that the files name: on the device if they fit there, else on disk."""
    if split.num_clients == 1:
        raise InputError(
            f"{name} was imported from files that name no clients. Choose a partition: "
            "partition=iid or partition=dirichlet:0.3, and clients=100."
        )
    if config.clients not in (0, split.num_clients):
        raise InputError(
            f"{name} has {split.num_clients} clients, got clients={config.clients}. Leave clients "
            "out, or choose another partition: partition=iid or partition=dirichlet:0.3."
        )
    fields = [split.fields[column] for column in set(columns)]
    largest = max(len(field.values) for field in fields)
    if sum(field.nbytes for field in fields) <= config.data_gb * 1e9 and largest < _LARGEST:
        return streaming.resident(split, most, columns)
    return Feed(split, most, columns)


def _redrawn(how: str, split: Split, config: Config, clients: int, columns: Columns) -> Shards:
    """Divide all examples of a split among new clients. They must fit on the device."""
    if not clients:
        raise InputError(
            f"partition={how} divides the examples among new clients, so it needs their number. "
            "Give it, for example clients=100."
        )
    names = {*columns, "y"} | ({"coarse"} & split.fields.keys())
    whole = {name: np.asarray(split.fields[name].values) for name in names}
    parts = partition.split(how, whole["y"], clients, config.partition_seed, whole.get("coarse"))
    x, y = (whole[name] for name in columns)
    return from_partition(x, y, parts)


def provenance(name: str, store: Store) -> dict[str, Any]:
    """Return the description of the data for a result."""
    files = json.dumps(store.meta["files"], sort_keys=True).encode()
    return {"name": name, "words": store.meta["words"], "sha256": hashlib.sha256(files).hexdigest()}
