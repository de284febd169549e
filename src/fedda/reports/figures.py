"""Figures as PNG and PDF: the palette, the style of the axes, curves over seeds, and saving.

The same curves can be plotted on a web page: see `fedda.reports.html`.
"""

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedda.errors import import_extra
from fedda.reports.statistics import Curve
from fedda.storage.files import naming

# Okabe and Ito's colours, less black and yellow, which vanish on a dark or a light page; then four
# more, since a figure of the paper has ten methods. Eleven colours and four dashes have no common
# factor, so 44 lines differ before a pair comes again.
COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F"),
    *("#8A63D2", "#8A8D0F", "#D81B60", "#A0664F"),
)
BLUE, ORANGE, GREEN, PINK, YELLOW, SKY, GREY = COLOURS[:7]
DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}  # Plotly's and Matplotlib's


class Line(NamedTuple):
    """A curve and how it is drawn."""

    curve: Curve
    style: int  # number of its colour and dash
    thick: bool = False  # and in front of the others


class Panel(NamedTuple):
    """One pair of axes with its curves."""

    name: str  # of the files, and of the element on a page
    x_label: str
    y_label: str
    lines: Sequence[Line]
    log_y: bool = False
    markers: bool = False  # mark every point, on a logarithmic horizontal axis
    title: str = ""  # shown in files only: a page has headings
    y_range: tuple[float, float] | None = None  # of the vertical axis, where curves leave it

    @property
    def x_ticks(self) -> list[float]:
        """Ticks at the points, the last first; on a phone, labels need a factor between them."""
        ticks: list[float] = []
        for x in sorted({x for line in self.lines for x in line.curve.x}, reverse=True):
            if not ticks or x < ticks[-1] / 1.8:
                ticks.append(x)
        return ticks


def line_style(number: int) -> tuple[str, str]:
    """Return the colour of a line, and its dash as a key of `DASHES`."""
    return COLOURS[number % len(COLOURS)], list(DASHES)[number % len(DASHES)]


def metric_label(key: str) -> str:
    """Return the name of a metric as axes show it."""
    return {"mse": "MSE", "train_loss": "training loss"}.get(key, key.replace("_", " "))


def sentence_case(text: str) -> str:
    """Raise the first letter. Unlike `str.capitalize`, leave MSE as it is."""
    return text[0].upper() + text[1:]


def needs_log_axis(curves: Iterable[Curve]) -> bool:
    """Return whether a linear axis would flatten most curves against its edge.

    A method that diverges, or the untrained model, would do that.
    """
    means = [mean for curve in curves for mean in curve.mean if math.isfinite(mean)]
    return bool(means) and 0 < min(means) < max(means) / 10


def new_figure(width: float, height: float) -> Any:
    """Return an empty Matplotlib figure. Sizes are in inches."""
    module = import_extra("matplotlib.figure", extra="report", action="draw figures")
    return module.Figure(figsize=(width, height), layout="constrained")


def style_axes(axes: Any) -> None:
    """Draw a faint grid and no frame."""
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def legend_below(figure: Any, columns: int) -> None:
    """Draw one legend for all axes of a figure."""
    shown: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            shown.setdefault(label, handle)
    figure.legend(shown.values(), shown, loc="outside lower center", ncols=columns, frameon=False)


def save(figure: Any, *paths: Path, dpi: int = 200) -> list[Path]:
    """Write a figure to these files, whose suffixes choose PNG or PDF. Return the paths."""
    for path in paths:
        # A date in the file would make the same figure differ from day to day.
        undated = {"CreationDate": None} if path.suffix == ".pdf" else {}
        with naming(path):
            figure.savefig(path, dpi=dpi, metadata=undated)
    return list(paths)


def draw(panels: Sequence[Panel], directory: Path, name: str) -> list[Path]:
    """Draw panels side by side as `name`.png and `name`.pdf, with one legend below them."""
    labels = {line.curve.label for panel in panels for line in panel.lines}
    width = 6.4 if len(panels) == 1 else 3.5 * len(panels)
    columns = max(1, int(12 * width / (max(map(len, labels)) + 8)))  # 12 letters are an inch
    columns = math.ceil(len(labels) / math.ceil(len(labels) / columns))  # no last row of one
    figure = new_figure(width, 3.8 + 0.2 * math.ceil(len(labels) / columns))
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        axes.set(xlabel=panel.x_label, ylabel=panel.y_label, title=panel.title)
        for curve, number, thick in panel.lines:
            colour, dash = line_style(number)
            look: dict[str, Any] = {"color": colour, "linestyle": DASHES[dash]}
            look |= {"marker": "o"} if panel.markers else {}
            look |= {"linewidth": 3, "zorder": 3} if thick else {}
            axes.plot(curve.x, curve.mean, label=curve.label, **look)
            axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.15, lw=0)
        if panel.log_y:
            axes.set_yscale("log")
        if panel.markers:
            axes.set_xscale("log")
            axes.set_xticks(panel.x_ticks, [f"{x:g}" for x in panel.x_ticks], minor=False)
            axes.minorticks_off()
        if panel.y_range is not None:
            axes.set_ylim(*panel.y_range)
        style_axes(axes)
    legend_below(figure, columns)
    return save(figure, directory / f"{name}.png", directory / f"{name}.pdf")
