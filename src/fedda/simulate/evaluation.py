"""Evaluation of a model: over all examples, or for each client.

All examples are evaluated in blocks of one size, by one compiled program, whatever the sizes of the
clients. The sums over the examples of a client are taken on the host, in float64.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedda.core.losses import as_measures
from fedda.core.task import ExampleWise, Task
from fedda.core.tree import PyTree
from fedda.data.federation import Shards, checked_pair, from_clients, take_rows
from fedda.data.streaming import Block, Feed
from fedda.data.tabular import Federation
from fedda.errors import InputError
from fedda.models import Model
from fedda.simulate import devices
from fedda.simulate.client_metrics import ClientMetrics
from fedda.simulate.settings import Examples, Test, is_one_pair_a_client
from fedda.simulate.train import Setup, programs
from fedda.storage import interrupts

BLOCK = 512  # examples of one call
GROUP = 256  # clients that are brought to the device at once, if their examples are on disk

Measures = Mapping[str, ExampleWise]


@devices.compile_cache()
def evaluate(
    model: Model,
    params: PyTree,
    data: Test | Mapping[Any, Examples] | Federation,
    metrics: Sequence[ExampleWise | str],
    per_client: bool = False,
) -> dict[str, float] | ClientMetrics:
    """Evaluate a model.

    Args:
        model: The model.
        params: Its parameters, such as `result.params`.
        data: A pair of arrays `(x, y)`; or a list of pairs, one for each client; or a dictionary
            from client to pair; or a federation, whose test examples are used.
        metrics: Functions of `(outputs, y)` or names, as `fedda.run` takes them. Losses are metrics
            too.
        per_client: Whether to evaluate each client. If lower values of your own metric are better,
            decorate it with `fedda.losses.lower_is_better`.

    Returns:
        The metrics over all examples, by name; or those of each client, with their mean, their
        spread and the worst tenth.

    Raises:
        InputError: An argument is wrong.

    Example:
        >>> import fedda, numpy as np
        >>> model = fedda.Model(init=lambda key: np.ones(()), apply=lambda params, x: params * x)
        >>> clients = {"north": ([[1.0], [2.0]], [[1.0], [2.0]]), "south": ([[3.0]], [[5.0]])}
        >>> error = fedda.losses.squared_error
        >>> print(f"{fedda.evaluate(model, 1.0, clients, [error])['squared_error']:.3f}")
        1.333
        >>> fedda.evaluate(model, 1.0, clients, [error], per_client=True)
        2 clients, 3 examples
                       mean  spread  worst tenth
        squared_error     2       2            4
    """
    names: Sequence[Any] = ()
    if isinstance(data, Federation):
        data = dict(zip(data.names, data.test, strict=True))
    if isinstance(data, Mapping):
        shards, names = from_clients(data), list(data)
    elif is_one_pair_a_client(data):
        shards = from_clients(data)
    elif per_client:
        raise InputError(
            "per_client needs examples of clients: a list of pairs (x, y), a dictionary from "
            f"client to (x, y), or a federation; got {type(data).__name__}. Give one of these."
        )
    else:
        shards = from_clients([checked_pair(data, "data")])
    named = as_measures(metrics)
    if callable(named) or not named or not all(hasattr(each, "__name__") for each in named):
        raise InputError('metrics must be a list of named functions or of names: ["accuracy"].')
    measures = {metric.__name__: metric for metric in named}
    sums = _client_sums(model, measures, params, shards)
    if not per_client:
        return {name: float(above.sum() / below.sum()) for name, (above, below) in sums.items()}
    return ClientMetrics(
        clients=names or range(shards.num_clients),
        examples=np.asarray(shards.count),
        metrics=_ratios(sums),
        higher_is_better={name: is_higher_better(metric) for name, metric in measures.items()},
    )


def is_higher_better(metric: ExampleWise) -> bool:
    """Return whether higher values are better; `losses.lower_is_better` marks other metrics."""
    return bool(getattr(metric, "higher_is_better", True))


def metric_settings(metrics: Sequence[ExampleWise]) -> dict[str, list[str]]:
    """Return the names of metrics, as the settings of a result hold them."""
    lower = [metric.__name__ for metric in metrics if not is_higher_better(metric)]
    return {"metrics": [metric.__name__ for metric in metrics], "lower_is_better": lower}


def evaluated_clients(setup: Setup, params: PyTree) -> ClientMetrics:
    """Return the loss and the metrics of each client after a run.

    Args:
        setup: The run. Clients are evaluated on their test examples if it has some for each client,
            else on the examples that they are trained with.
        params: The parameters.
    """
    tested = setup.test_clients is not None
    shards = setup.test_clients if setup.test_clients is not None else setup.shards
    task, count = setup.task, np.asarray(shards.count)
    sums = _client_sums(task.model, task.measures, devices.here(params), shards)
    better = {name: is_higher_better(measure) for name, measure in task.measures.items()}
    return ClientMetrics(
        clients=list(setup.names) or range(len(count)),
        examples=count,
        metrics=_ratios(sums),
        higher_is_better=better | {"loss": False},
        on="test" if tested else "train",
    )


@programs
def _block_sums(task: Task, params: PyTree, block: Block) -> dict[str, tuple[Array, Array]]:
    return task.sums(params, *block)


def evaluate_blocks(task: Task, params: PyTree, blocks: Iterable[Block]) -> dict[str, float]:
    """Return the loss and the metrics on a test set that is brought to the device in blocks.

    The sums over blocks are in float64.
    """
    total = dict.fromkeys(task.measures, np.zeros(2))
    for sums in _fetched_late(_block_sums(task)(params, block) for block in blocks):
        interrupts.check()
        for name, pair in sums.items():
            total[name] = total[name] + np.asarray(pair, np.float64)
    return {name: float(above / below) for name, (above, below) in total.items()}


def _fetched_late(results: Iterable[PyTree]) -> Iterator[PyTree]:
    """Fetch each result from the device after the work for the next one has been started.

    So the host reads the next examples while the device computes.
    """
    for before, _ in pairwise(chain(results, [None])):
        yield jax.device_get(before)


Sums = dict[str, tuple[np.ndarray, np.ndarray]]


def _ratios(sums: Sums) -> dict[str, np.ndarray]:
    with np.errstate(invalid="ignore", divide="ignore"):
        return {name: above / below for name, (above, below) in sums.items()}


@programs
def _values(
    model: Model,
    measures: tuple[ExampleWise, ...],
    params: PyTree,
    columns: Any,
    rows: Array,
) -> list[tuple[Array, Array]]:
    """Return the numerator and the denominator of each measure for each of these rows."""
    x, y = take_rows(columns, rows)
    outputs = model.apply(params, x)
    found = [measure(outputs, y) for measure in measures]
    ones = jnp.ones(rows.shape)
    return [values if isinstance(values, tuple) else (values, ones) for values in found]


def _client_sums(model: Model, measures: Measures, params: PyTree, shards: Shards | Feed) -> Sums:
    """Return the sums of numerators and denominators over the examples of each client."""
    total = np.zeros((len(measures), 2, shards.num_clients))
    program = _values(model, tuple(measures.values()))

    def started() -> Iterator[tuple[np.ndarray, Any]]:
        for clients, part in _parts(shards):
            count = np.asarray(part.count)[: len(clients)]
            start = np.asarray(part.start)[: len(clients)]
            owner = np.repeat(clients, count)
            rows = np.arange(len(owner)) + np.repeat(start - (np.cumsum(count) - count), count)
            for first in range(0, len(rows), BLOCK):
                some = rows[first : first + BLOCK]
                block = np.resize(some, BLOCK).astype(np.int32)  # repeats fill the last one
                yield owner[first : first + BLOCK], program(params, (part.x, part.y), block)

    for owner, values in _fetched_late(started()):
        for sums, pair in zip(total, values, strict=True):
            for added, array in zip(sums, pair, strict=True):
                np.add.at(added, owner, np.asarray(array[: len(owner)], np.float64))
    return {name: (above, below) for name, (above, below) in zip(measures, total, strict=True)}


def _parts(shards: Shards | Feed) -> Iterator[tuple[np.ndarray, Shards]]:
    """Yield the clients in groups, with their examples on the device."""
    if isinstance(shards, Shards):
        yield np.arange(shards.num_clients), shards
        return
    for first in range(0, shards.num_clients, GROUP):
        clients = np.arange(first, min(first + GROUP, shards.num_clients))
        yield clients, shards.gather(clients, slots=GROUP)
