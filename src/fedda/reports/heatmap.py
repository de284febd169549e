"""The heat map of a sweep over two hyper-parameters: the result of each pair of values."""

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from fedda.reports.figures import new_figure, save


def write(summary: Mapping[str, Any], path: Path) -> bool:
    """Draw the heat map of a sweep as PNG, if it has two axes and Matplotlib is installed.

    Points that failed are grey.

    Args:
        summary: The content of the sweep's `summary.json`.
        path: The file to write.

    Returns:
        Whether the file was written.
    """
    axes = [name for name, values in summary["grid"].items() if len(values) > 1]
    if len(axes) != 2 or find_spec("matplotlib") is None:
        return False
    values = table(summary, *axes)
    figure = new_figure(1.6 + 0.9 * values.shape[1], 1.4 + 0.6 * values.shape[0])
    plot = figure.add_subplot(xlabel=axes[1], ylabel=axes[0])
    colours = "viridis" if summary["higher_is_better"] else "viridis_r"
    plot.set_facecolor("0.85")  # the colour of points without a result
    plot.imshow(values, cmap=colours, aspect="auto", origin="lower")
    readable = {"facecolor": "white", "alpha": 0.7, "linewidth": 0}  # on any colour
    for (row, column), value in np.ndenumerate(values):
        text = f"{value:.3g}".replace("nan", "-")
        plot.text(column, row, text, ha="center", va="center", bbox=readable)
    plot.set_yticks(range(values.shape[0]), summary["grid"][axes[0]])
    plot.set_xticks(range(values.shape[1]), summary["grid"][axes[1]])
    plot.set_title(f"{summary['algorithm']} on {summary['task']}: {summary['by']}", fontsize=10)
    save(figure, path)
    return True


def table(summary: Mapping[str, Any], down: str, across: str) -> np.ndarray:
    """Return the results by the values of two hyper-parameters; NaN where there is none."""
    rows, columns = (summary["grid"][name] for name in (down, across))
    values = np.full((len(rows), len(columns)), np.nan)
    for point in summary["ranking"]:
        result = point[summary["by"]]
        if point["failures"] == 0 and result is not None:
            hyper = point["hyper"]
            values[rows.index(hyper[down]), columns.index(hyper[across])] = result
    return values
