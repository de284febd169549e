"""Evaluation of a model: over all examples, or for each client.

All examples are evaluated in blocks of one size, by one compiled program, whatever the sizes of the
clients. The sums over the examples of a client are taken on the host, in float64.
"""

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fedda.core.task import ExampleWise
from fedda.core.tree import PyTree
from fedda.data.federation import Shards, checked_pair, from_clients, take_rows
from fedda.data.streaming import Feed
from fedda.data.tabular import Federation
from fedda.errors import InputError, import_extra
from fedda.models import Model
from fedda.simulate import devices
from fedda.simulate.settings import Examples, Test, is_one_pair_a_client
from fedda.simulate.train import Setup, programs

BLOCK = 512  # examples of one call
GROUP = 256  # clients that are brought to the device at once, if their examples are on disk

Measures = Mapping[str, ExampleWise]


@dataclass(frozen=True, repr=False, eq=False)
class ClientMetrics:
    """The metrics of each client, and how they spread.

    A client without examples has no metrics (NaN), and does not count in what is below.

    Attributes:
        clients: The names of the clients, or their numbers.
        examples: How many examples each client has.
        metrics: One value for each client, by the name of the metric.
        higher_is_better: Whether higher values are better, by the name of the metric.
    """

    clients: Sequence[str | int]
    examples: np.ndarray
    metrics: Mapping[str, np.ndarray]
    higher_is_better: Mapping[str, bool] = field(default_factory=dict)

    @property
    def mean(self) -> dict[str, float]:
        """The mean over clients, each of which counts once."""
        return {name: float(np.mean(values)) for name, values in self._present()}

    @property
    def spread(self) -> dict[str, float]:
        """The standard deviation over clients."""
        return {name: float(np.std(values)) for name, values in self._present()}

    @property
    def worst_decile(self) -> dict[str, float]:
        """The mean over the worst tenth of the clients, rounded up to whole clients."""
        return {
            name: float(np.mean(values[: math.ceil(len(values) / 10)]))
            for name, values in self._present()
        }

    def _present(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield each metric with its values, the worst first."""
        for name, values in self.metrics.items():
            ascending = np.sort(values[~np.isnan(values)])
            yield name, ascending if self.higher_is_better.get(name, True) else ascending[::-1]

    def table(self) -> list[dict[str, Any]]:
        """Return one row for each client; `pandas.DataFrame` takes it."""
        values = {name: array.tolist() for name, array in self.metrics.items()}
        return [
            {"client": client, "examples": int(count)}
            | {name: column[number] for name, column in values.items()}
            for number, (client, count) in enumerate(zip(self.clients, self.examples, strict=True))
        ]

    def figure(self, path: str | PathLike[str]) -> None:
        """Draw the sorted values of all clients, with their mean.

        Args:
            path: Where to write the figure. Its ending decides the format, such as .png or .pdf.

        Raises:
            MissingExtraError: Matplotlib is not installed.
        """
        module = import_extra("matplotlib.figure", extra="report", action="draw figures")
        drawn = module.Figure(figsize=(5 * len(self.metrics), 3.5), layout="constrained")
        panels = drawn.subplots(1, len(self.metrics), squeeze=False)[0]
        for panel, (name, values) in zip(panels, self._present(), strict=True):
            panel.plot(
                np.linspace(0, 100, len(values)), values, marker="." if len(values) < 50 else ""
            )
            panel.axhline(self.mean[name], color="0.5", linestyle="--", label="mean over clients")
            panel.set(xlabel="clients in %, the worst first", ylabel=name.replace("_", " "))
            panel.legend(frameon=False)
        drawn.savefig(path, dpi=200)

    def _rows(self) -> list[list[str]]:
        columns = (self.mean, self.spread, self.worst_decile)
        header = ["", "mean", "spread", "worst tenth"]
        return [
            header,
            *([name, *(f"{each[name]:.3g}" for each in columns)] for name in self.metrics),
        ]

    def _title(self) -> str:
        return f"{len(self.clients):,} clients, {int(self.examples.sum()):,} examples"

    def __repr__(self) -> str:
        rows = self._rows()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.rjust, row, widths)).rstrip() for row in rows]
        return "\n".join([self._title(), *lines])

    def _repr_html_(self) -> str:
        cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in self._rows())
        rows = "".join(f"<tr>{row}</tr>" for row in cells)
        return f"<table><caption>{self._title()}</caption>{rows}</table>"


@devices.compile_cache()
def evaluate(
    model: Model,
    params: PyTree,
    data: Test | Mapping[Any, Examples] | Federation,
    metrics: Sequence[ExampleWise],
    per_client: bool = False,
) -> dict[str, float] | ClientMetrics:
    """Evaluate a model.

    Args:
        model: The model.
        params: Its parameters, such as `result.params`.
        data: A pair of arrays `(x, y)`; or a list of pairs, one for each client; or a dictionary
            from client to pair; or a federation, of which the test examples are taken.
        metrics: Functions of `(outputs, y)`, as `fedda.run` takes them. Losses are metrics too.
        per_client: Whether to evaluate each client. Decorate a metric of your own with
            `fedda.losses.lower_is_better` if it is one.

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
    if callable(metrics) or not metrics or not all(hasattr(each, "__name__") for each in metrics):
        raise InputError("metrics must be a list of named functions, as def makes them.")
    measures = {metric.__name__: metric for metric in metrics}
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


def evaluated_clients(setup: Setup, params: PyTree) -> dict[str, Any]:
    """Return the loss and the metrics of each client after a run, as JSON has them.

    Args:
        setup: The run. Clients are evaluated on their test examples if it has some for each client,
            else on the examples that they are trained with.
        params: The parameters.
    """
    tested = setup.test_clients is not None
    shards = setup.test_clients if setup.test_clients is not None else setup.shards
    task, count = setup.task, np.asarray(shards.count)
    sums = _client_sums(task.model, task.measures, devices.here(params), shards)
    return {
        "on": "test" if tested else "train",
        "metrics": {
            name: [value if math.isfinite(value) else None for value in values.tolist()]
            for name, values in _ratios(sums).items()
        },
        "clients": list(setup.names) or list(range(len(count))),
        "examples": count.tolist(),
    }


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
    for clients, part in _parts(shards):
        count = np.asarray(part.count)[: len(clients)]
        start = np.asarray(part.start)[: len(clients)]
        owner = np.repeat(clients, count)
        rows = np.arange(len(owner)) + np.repeat(start - (np.cumsum(count) - count), count)
        for first in range(0, len(rows), BLOCK):
            some = rows[first : first + BLOCK]
            block = np.resize(some, BLOCK).astype(np.int32)  # repeats fill the last one
            values = jax.device_get(program(params, (part.x, part.y), block))
            for sums, pair in zip(total, values, strict=True):
                for added, array in zip(sums, pair, strict=True):
                    numbers = np.asarray(array[: len(some)], np.float64)
                    np.add.at(added, owner[first : first + BLOCK], numbers)
    return {name: (above, below) for name, (above, below) in zip(measures, total, strict=True)}


def _parts(shards: Shards | Feed) -> Iterator[tuple[np.ndarray, Shards]]:
    """Yield some clients and their examples on the device, until all were there."""
    if isinstance(shards, Shards):
        yield np.arange(shards.num_clients), shards
        return
    for first in range(0, shards.num_clients, GROUP):
        clients = np.arange(first, min(first + GROUP, shards.num_clients))
        yield clients, shards.gather(clients, slots=GROUP)
