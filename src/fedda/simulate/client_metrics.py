"""The metrics of each client, and how they spread."""

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from typing import Any

import numpy as np

from fedda.errors import import_extra
from fedda.storage.schema import NUMBER_OR_NULL

# What a file holds, see `fedda.storage.schema`.
SCHEMA = {
    "on": str,
    "metrics": {...: [NUMBER_OR_NULL]},
    "lower_is_better": [str],
    "clients": [(str, int)],
    "examples": [int],
}


@dataclass(frozen=True, repr=False, eq=False)
class ClientMetrics:
    """The metrics of each client, and how they spread.

    A client without examples has no metrics (NaN), and does not count in the statistics.

    Attributes:
        clients: The names of the clients, or their numbers.
        examples: How many examples each client has.
        metrics: One value for each client, by the name of the metric.
        higher_is_better: Whether higher values are better, by the name of the metric.
        on: After a run, which examples were evaluated: "test" or "train".
    """

    clients: Sequence[str | int]
    examples: np.ndarray
    metrics: Mapping[str, np.ndarray]
    higher_is_better: Mapping[str, bool] = field(default_factory=dict)
    on: str = ""

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
        on = {"": "", "test": " to test on", "train": " to train on"}[self.on]
        return f"{len(self.clients):,} clients, {int(self.examples.sum()):,} examples{on}"

    def to_json(self) -> dict[str, Any]:
        """Return plain values, as the files of a run have them. NaN is None there."""
        return {
            "on": self.on,
            "metrics": {
                name: [value if math.isfinite(value) else None for value in values.tolist()]
                for name, values in self.metrics.items()
            },
            "lower_is_better": [name for name, yes in self.higher_is_better.items() if not yes],
            "clients": list(self.clients),
            "examples": self.examples.tolist(),
        }

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> "ClientMetrics":
        """Return the metrics that `to_json` has made plain."""
        return cls(
            clients=values["clients"],
            examples=np.array(values["examples"]),
            metrics={
                name: np.array(column, np.float64) for name, column in values["metrics"].items()
            },
            higher_is_better=dict.fromkeys(values["lower_is_better"], False),
            on=values["on"],
        )

    def __repr__(self) -> str:
        rows = self._rows()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.rjust, row, widths)).rstrip() for row in rows]
        return "\n".join([self._title(), *lines])

    def _repr_html_(self) -> str:
        cells = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in self._rows())
        rows = "".join(f"<tr>{row}</tr>" for row in cells)
        return f"<table><caption>{self._title()}</caption>{rows}</table>"
