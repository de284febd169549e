"""Figures as PNG and PDF: the palette, the style of the axes, curves over seeds, and saving.

The same curves can be plotted on a web page: see `fedda.reports.html`.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedda.errors import import_extra
from fedda.reports.statistics import Curve
from fedda.storage.files import naming

# Okabe and Ito's colours without black and yellow, which are invisible on a dark or a light page.
# Four more, because a figure of the paper has ten methods. Further lines have another dash.
COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F"),
    *("#8A63D2", "#8A8D0F", "#D81B60", "#A0664F"),
)
BLUE, ORANGE, GREEN, PINK, YELLOW, SKY, GREY = COLOURS[:7]
DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}  # ours and Matplotlib's
FADED = "#8C8C8C"  # the colour of lines in the background, for light and dark pages
MOST_COLOURS = 8  # if there are more lines than this, only the first FEW have a colour
FEW = 5

# The scales of a vertical axis: linear, logarithmic, or logarithmic in 1 - value, which separates
# accuracies near 1.
LINEAR, LOG, LOG_ERROR = "linear", "log", "log error"
EARLY = 0.1  # the share of the training whose values may be outside of the axes

# For each scale: from a value to its place on the axis, and back.
_PLACES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    LINEAR: (lambda value: value, lambda place: place),
    LOG: (np.log10, lambda place: 10.0**place),
    LOG_ERROR: (
        lambda value: -np.log10(np.maximum(1 - value, 1e-12)),
        lambda place: 1 - 10.0**-place,
    ),
}


class Line(NamedTuple):
    """A curve and how it is drawn."""

    curve: Curve
    style: int  # number of its colour and dash
    thick: bool = False  # and in front of the others
    faded: bool = False  # grey, and behind the other lines


class Panel(NamedTuple):
    """One pair of axes with its curves."""

    name: str  # of the files, and of the element on a page
    x_label: str
    y_label: str
    lines: Sequence[Line]
    scale: str = LINEAR  # of the vertical axis
    markers: bool = False  # mark every point, on a logarithmic horizontal axis
    title: str = ""  # shown in files only: a page has headings
    y_range: tuple[float, float] | None = None  # of the vertical axis; None shows all values

    @property
    def band_opacity(self) -> float:
        """The opacity of the bands, which overlap if there are many."""
        return min(0.15, max(0.06, 0.5 / len(self.lines)))

    @property
    def x_ticks(self) -> list[float]:
        """Ticks at some of the points, the last first, with enough room for labels on a phone."""
        ticks: list[float] = []
        for x in sorted({x for line in self.lines for x in line.curve.x}, reverse=True):
            if not ticks or x < ticks[-1] / 1.8:
                ticks.append(x)
        return ticks


def line_style(number: int) -> tuple[str, str]:
    """Return the colour of a line, and its dash as a key of `DASHES`."""
    return COLOURS[number % len(COLOURS)], list(DASHES)[number // len(COLOURS) % len(DASHES)]


def metric_label(key: str) -> str:
    """Return the name of a metric as axes show it."""
    return {"mse": "MSE", "train_loss": "training loss"}.get(key, key.replace("_", " "))


def sentence_case(text: str) -> str:
    """Capitalise the first letter. Unlike `str.capitalize`, do not change MSE."""
    return text[0].upper() + text[1:]


def lines_of(curves: Sequence[Curve]) -> list[Line]:
    """Return the curves as lines. If there are many, only the first few have colours."""
    most = FEW if len(curves) > MOST_COLOURS else len(curves)
    return [Line(curve, number, faded=number >= most) for number, curve in enumerate(curves)]


def choose_scale(curves: Iterable[Curve], higher_is_better: bool) -> str:
    """Return a scale on which the curves are separated.

    Values that differ by more than a factor of ten need a logarithmic axis, because a diverging
    method or the untrained model would need most of a linear axis. If higher values are better, the
    distance to 1 is used.
    """
    means = [mean for curve in curves for mean in curve.mean if math.isfinite(mean)]
    if not means:
        return LINEAR
    low, high = min(means), max(means)
    if higher_is_better:
        return LOG_ERROR if low >= 0 and 0 < 10 * (1 - high) < 1 - low else LINEAR
    return LOG if 0 < 10 * low < high else LINEAR


def late_range(curves: Iterable[Curve], scale: str) -> tuple[float, float] | None:
    """Return the range of the means after the first tenth of each curve, with a small margin.

    The first evaluations would need most of the axis. The result is None if there are no two
    different finite values.
    """
    to_place, to_value = _PLACES[scale]
    late = [
        mean
        for curve in curves
        for x, mean in zip(curve.x, curve.mean, strict=True)
        if x >= EARLY * curve.x[-1] and math.isfinite(mean)
    ]
    if not late or min(late) == max(late):
        return None
    low, high = (float(to_place(value)) for value in (min(late), max(late)))
    room = 0.04 * (high - low)
    return float(to_value(low - room)), float(to_value(high + room))


def spread(wanted: Sequence[float], gap: float, end: float) -> list[float]:
    """Return positions for labels at the ends of lines.

    They are near the wanted positions, in the same order, with a gap between them and, if there is
    room, below `end`.
    """
    order = sorted(range(len(wanted)), key=wanted.__getitem__)
    placed = list(wanted)
    for before, i in pairwise(order):
        placed[i] = max(placed[i], placed[before] + gap)
    for i in reversed(order):
        placed[i] = min(placed[i], end)
        end = placed[i] - gap
    return placed


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
        # Without a date, the same figure gives the same file.
        undated = {"CreationDate": None} if path.suffix == ".pdf" else {}
        with naming(path):
            figure.savefig(path, dpi=dpi, metadata=undated)
    return list(paths)


def draw(panels: Sequence[Panel], directory: Path, name: str, pdf: bool = False) -> list[Path]:
    """Draw panels side by side as `name`.png, and on request also as `name`.pdf.

    The lines of a single panel have their names at their ends, if they end at one place. Otherwise
    there is one legend below all panels.
    """
    labels = {line.curve.label for panel in panels for line in panel.lines if not line.faded}
    width = 7.2 if len(panels) == 1 else 3.5 * len(panels)
    columns = max(1, int(12 * width / (max(map(len, labels)) + 8)))  # 12 letters are an inch
    columns = math.ceil(len(labels) / math.ceil(len(labels) / columns))  # no last row of one
    ends = {x for panel in panels for line in panel.lines for x in line.curve.x[-1:]}
    named = len(panels) == 1 and len(ends) == 1
    figure = new_figure(width, 4.2 if named else 3.8 + 0.2 * math.ceil(len(labels) / columns))
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        axes.set(xlabel=panel.x_label, ylabel=panel.y_label, title=panel.title)
        _draw_lines(axes, panel)
        _set_scale(axes, panel)
        style_axes(axes)
        if named:
            _name_ends(axes, panel)
    if not named:
        legend_below(figure, columns)
    suffixes = ("png", "pdf") if pdf else ("png",)
    return save(figure, *(directory / f"{name}.{suffix}" for suffix in suffixes))


def _draw_lines(axes: Any, panel: Panel) -> None:
    for line in panel.lines:
        colour, dash = look(line)
        style: dict[str, Any] = {"color": colour, "linestyle": DASHES[dash]}
        style |= {"marker": "o"} if panel.markers else {}
        style |= {"linewidth": 3, "zorder": 3} if line.thick else {}
        # Matplotlib lists no label that begins with an underscore.
        style |= {"linewidth": 0.8, "zorder": 1, "label": "_"} if line.faded else {}
        label, x, mean, low, high = line.curve
        axes.plot(x, mean, **{"label": label, **style})
        if not line.faded:
            axes.fill_between(x, low, high, color=colour, alpha=panel.band_opacity, lw=0)


def _set_scale(axes: Any, panel: Panel) -> None:
    if panel.scale == LOG:
        axes.set_yscale("log")
    elif panel.scale == LOG_ERROR:
        axes.set_yscale("function", functions=_PLACES[LOG_ERROR])
        powers = [10.0**-power for power in range(9)]
        ticks = [1 - digit * power for power in powers for digit in (1, 0.7, 0.5, 0.3, 0.2)]
        axes.set_yticks(ticks, [f"{tick:.6g}" for tick in ticks])
        axes.minorticks_off()
    if panel.markers:
        axes.set_xscale("log")
        axes.set_xticks(panel.x_ticks, [f"{x:g}" for x in panel.x_ticks], minor=False)
        axes.minorticks_off()
    if panel.y_range is not None:
        axes.set_ylim(*panel.y_range)


def _name_ends(axes: Any, panel: Panel) -> None:
    to_places = axes.transScale + axes.transLimits  # from data to shares of the axes
    drawn = []
    for line in panel.lines:
        points = zip(line.curve.x, line.curve.mean, strict=True)
        if finite := [point for point in points if math.isfinite(point[1])]:
            drawn.append((line, finite[-1]))
    wanted = [min(1.0, max(0.0, float(to_places.transform(point)[1]))) for _, point in drawn]
    size, gap = (9, 0.047) if len(drawn) <= 2 * MOST_COLOURS else (7, 0.036)
    places = spread(wanted, gap, 1 - gap / 2)
    for (line, point), place in zip(drawn, places, strict=True):
        colour, _ = look(line)
        axes.annotate(
            line.curve.label,
            xy=point,
            xytext=(1.05, place),
            textcoords="axes fraction",
            va="center",
            fontsize=size,
            color=FADED if line.faded else "black",
            parse_math=False,
            arrowprops={"arrowstyle": "-", "color": colour, "lw": 0.8, "relpos": (0, 0.5)},
        )


def look(line: Line) -> tuple[str, str]:
    """Return the colour and the dash of a line."""
    return (FADED, "solid") if line.faded else line_style(line.style)
