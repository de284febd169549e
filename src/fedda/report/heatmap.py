"""A map of a sweep over two hyper-parameters: what was reached with each pair of values."""

import math
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from fedda.storage.files import naming


def write(summary: Mapping[str, Any], path: Path) -> bool:
    """Draws the map of a sweep's summary, if it has two axes and matplotlib is here to draw it.

    Points of earlier rungs, which were not trained for all rounds, and those that failed are grey.
    """
    axes = {name: values for name, values in summary["grid"].items() if len(values) > 1}
    if len(axes) != 2 or find_spec("matplotlib") is None:
        return False
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    values = table(summary, *axes)
    figure = Figure(figsize=(1.6 + 0.9 * values.shape[1], 1.4 + 0.6 * values.shape[0]))
    plot = figure.add_subplot()
    reverse = "" if summary["higher_is_better"] else "_r"
    colours = colormaps[f"viridis{reverse}"].with_extremes(bad="0.85")
    plot.imshow(values, cmap=colours, aspect="auto", origin="lower")
    middle = (np.nanmin(values) + np.nanmax(values)) / 2 if not np.isnan(values).all() else 0.0
    for (row, column), value in np.ndenumerate(values):
        light = (value < middle) == summary["higher_is_better"]
        words = "-" if math.isnan(value) else f"{value:.3g}"
        color = "black" if math.isnan(value) or not light else "white"
        plot.text(column, row, words, ha="center", va="center", color=color)
    (down, rows), (across, columns) = axes.items()
    plot.set_xticks(range(len(columns)), [f"{value:g}" for value in columns])
    plot.set_yticks(range(len(rows)), [f"{value:g}" for value in rows])
    plot.set_xlabel(across)
    plot.set_ylabel(down)
    plot.set_title(f"{summary['algorithm']} on {summary['task']}: {summary['by']}", fontsize=10)
    figure.tight_layout()
    with naming(path):
        figure.savefig(path, dpi=150)
    return True


def table(summary: Mapping[str, Any], down: str, across: str) -> np.ndarray:
    """What was reached, by the values of two names; not a number where nothing was."""
    rows, columns = (summary["grid"][name] for name in (down, across))
    values = np.full((len(rows), len(columns)), np.nan)
    for point in summary["ranking"]:
        reached = point[summary["by"]]
        if point["failures"] == 0 and reached is not None:
            place = rows.index(point["hyper"][down]), columns.index(point["hyper"][across])
            values[place] = reached
    return values
