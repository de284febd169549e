"""What tasks have in common: a model by name, and a federation out of a store."""

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from fedda.data import partition, streaming
from fedda.data.datasets import open_dataset
from fedda.data.federation import Shards, from_partition
from fedda.data.store import Split, Store
from fedda.data.streaming import XY, Columns, Feed
from fedda.errors import InputError, unknown
from fedda.models import Model, with_precision
from fedda.tasks.config import Config

_LARGEST = 2**31  # rows, and parts of ragged rows, that the device can count


def chosen_model(config: Config, kinds: Mapping[str, Callable[[], Model]]) -> Model:
    """The model that a configuration names; asked for before the data, which take longer."""
    if config.model not in kinds:
        raise unknown(f"model of {config.task}", config.model, kinds)
    return with_precision(kinds[config.model](), config.precision)


class Federation(NamedTuple):
    """A store's training clients, its test set, and where they are from."""

    shards: Shards | Feed
    test: tuple[Any, Any]
    data: dict[str, Any]
    labels: list[str]  # the names of the classes; of targets that are not classes, none


def federation(
    name: str, config: Config, columns: Columns = XY, paper_clients: int = 0
) -> Federation:
    """A store of examples of one shape, its clients as they are or drawn anew.

    If the files name no clients, `paper_clients` are drawn unless the configuration says how many.
    """
    store = open_dataset(name)
    split, test = store.splits["train"], store.splits["test"]
    if any(split.fields[column].length is not None for column in columns):
        raise InputError(
            f"{config.task} needs examples of one shape, but {name} holds texts. Use the task of "
            "that name."
        )
    how = config.partition
    if how == "paper":
        how = "user" if split.num_clients > 1 else "pachinko:0.1"
    data = provenance(name, store) | {"partition": how}
    if how == "user":
        shards = as_stored(name, split, config, columns=columns)
    else:
        stored = split.num_clients if split.num_clients > 1 else paper_clients
        shards = _redrawn(how, split, config, config.clients or stored, columns)
    return Federation(shards, streaming.union(test, columns=columns), data, _labels(store))


def _labels(store: Store) -> list[str]:
    """The names of the classes if the files have some, else their numbers."""
    if "labels.txt" in store.meta["files"]:
        return store.text("labels.txt").splitlines()
    values = [split.fields["y"].values for split in store.splits.values()]
    if values[0].dtype.kind not in "iu" or values[0].ndim > 1:
        return []
    return [str(label) for label in range(1 + max(int(each.max()) for each in values))]


def as_stored(
    name: str, split: Split, config: Config, most: int | None = None, columns: Columns = XY
) -> Shards | Feed:
    """The clients as the files name them: on the device if they fit, else fed to it."""
    if split.num_clients == 1:
        raise InputError(
            f"{name} was imported from files that name no clients. Choose how to split it: "
            "partition=iid or partition=dirichlet:0.3, and clients=100."
        )
    if config.clients not in (0, split.num_clients):
        raise InputError(
            f"{name} has {split.num_clients} clients, got clients={config.clients}. Leave clients "
            "out, or choose how to split the data anew: partition=iid or partition=dirichlet:0.3."
        )
    fields = [split.fields[column] for column in set(columns)]
    largest = max(len(field.values) for field in fields)
    if sum(field.nbytes for field in fields) <= config.data_gb * 1e9 and largest < _LARGEST:
        return streaming.resident(split, most, columns)
    return Feed(split, most, columns)


def _redrawn(how: str, split: Split, config: Config, clients: int, columns: Columns) -> Shards:
    """All examples of a split, dealt out anew. They must fit on the device."""
    if not clients:
        raise InputError(
            f"partition={how} deals the examples out anew: say to how many, with clients=100."
        )
    names = {*columns, "y"} | ({"coarse"} & split.fields.keys())
    whole = {name: np.asarray(split.fields[name].values) for name in names}
    parts = partition.split(how, whole["y"], clients, config.partition_seed, whole.get("coarse"))
    x, y = (whole[name] for name in columns)
    return from_partition(x, y, parts)


def provenance(name: str, store: Store) -> dict[str, Any]:
    """What a result says of the data it was made with."""
    files = json.dumps(store.meta["files"], sort_keys=True).encode()
    return {"name": name, "words": store.meta["words"], "sha256": hashlib.sha256(files).hexdigest()}
