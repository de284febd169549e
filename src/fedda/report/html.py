"""What a web page of results is made of: plots, tables, facts, and the page around them.

A page loads nothing: it can be mailed, archived and opened without a network. It serves a phone and
a wide screen, light and dark. What is drawn for the page can be drawn as PNG and PDF as well.
"""

import importlib
import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from fedda.report.statistics import Curve
from fedda.storage.files import naming

# Okabe and Ito's colours, less black and yellow, which vanish on a dark or a light page; then four
# more, since a figure of the paper has ten methods. Eleven colours and four dashes have no common
# factor, so 44 lines differ before a pair comes again.
COLOURS = (
    *("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F"),
    *("#8A63D2", "#8A8D0F", "#D81B60", "#A0664F"),
)
DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}  # and what matplotlib has for it

# Newer Plotly releases add a button that uploads the figure, hence a list of what is allowed.
_PLOTLY_CONFIG = {
    "responsive": True,
    "displaylogo": False,
    "displayModeBar": True,
    "modeBarButtons": [["toImage", "zoom2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
    "showSendToCloud": False,
}


class Drawn(NamedTuple):
    """A curve, and how it is drawn."""

    curve: Curve
    style: int  # the number of its colour and dash
    thick: bool = False  # and above the others


class Panel(NamedTuple):
    """One pair of axes with its curves."""

    name: str  # of the element and the files
    x_label: str
    y_label: str
    lines: Sequence[Drawn]
    log_y: bool = False
    few: bool = False  # points: each is marked, and named on a logarithmic horizontal axis
    title: str = ""  # in files; a page has its own headings
    shown: tuple[float, float] | None = None  # of the vertical axis, where something leaves it


def style(number: int) -> tuple[str, str]:
    """The colour and the dash of a line."""
    return COLOURS[number % len(COLOURS)], list(DASHES)[number % len(DASHES)]


def words(key: str) -> str:
    """What a metric is called in labels."""
    return {"mse": "MSE", "train_loss": "training loss"}.get(key, key.replace("_", " "))


def headed(text: str) -> str:
    """As a heading begins; `capitalize` would write MSE small."""
    return text[0].upper() + text[1:]


def spans(curves: Iterable[Curve]) -> bool:
    """Whether only a logarithmic axis shows them all.

    Neither a method that diverges nor the untrained model may flatten the rest against the axis.
    """
    means = [mean for curve in curves for mean in curve.mean if math.isfinite(mean)]
    return bool(means) and 0 < min(means) < max(means) / 10


# ------------------------------------------------------------------------------------------ figures


def draw(panels: Sequence[Panel], directory: Path, name: str) -> list[Path]:
    """Draws panels side by side as `name`.png and `name`.pdf: means, bands, and one legend."""
    labels = [line.curve.label for panel in panels for line in panel.lines]
    columns = max(1, min(3, 80 // (max(map(len, labels)) + 8))) * len(panels)
    if len(panels) > 1:  # a wide legend has no last row of one
        columns = math.ceil(len(set(labels)) / math.ceil(len(set(labels)) / columns))
    height = 3.8 + 0.2 * math.ceil(len(set(labels)) / columns)
    figure = extra("matplotlib.figure").Figure(
        figsize=(6.4 if len(panels) == 1 else 3.5 * len(panels), height), layout="constrained"
    )
    legend: dict[str, Any] = {}
    for number, panel in enumerate(panels, start=1):
        axes = figure.add_subplot(
            1, len(panels), number, xlabel=panel.x_label, ylabel=panel.y_label, title=panel.title
        )
        for curve, index, thick in panel.lines:
            colour, dash = style(index)
            (line,) = axes.plot(
                curve.x,
                curve.mean,
                color=colour,
                linestyle=DASHES[dash],
                label=curve.label,
                marker="o" if panel.few else None,
                **({"linewidth": 3, "zorder": 3} if thick else {}),
            )
            legend.setdefault(curve.label, line)
            axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.15, lw=0)
        if panel.log_y:
            axes.set_yscale("log")
        if panel.few:
            axes.set_xscale("log")
            axes.set_xticks(_ticks(panel), [f"{x:g}" for x in _ticks(panel)], minor=False)
            axes.minorticks_off()
        if panel.shown is not None:
            axes.set_ylim(*panel.shown)
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(
        handles=list(legend.values()), loc="outside lower center", ncols=columns, frameon=False
    )
    return save(figure, directory, name)


def save(figure: Any, directory: Path, name: str) -> list[Path]:
    """Writes a figure of matplotlib as PNG and PDF."""
    files = [directory / f"{name}.{suffix}" for suffix in ("png", "pdf")]
    for path in files:
        with naming(path):
            figure.savefig(path, dpi=200)
    return files


def extra(name: str) -> Any:
    """A module that only figures need."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            "figures need matplotlib and plotly: pip install 'fedda[report]'"
        ) from error


def plot(panel: Panel, first: bool) -> str:
    """An interactive plot; the `first` of a page brings the program that draws them all."""
    drawn: str = extra("plotly.io").to_html(
        _plotly_figure(panel),
        config=_PLOTLY_CONFIG,
        include_plotlyjs=first,
        full_html=False,
        default_height=f"{400 + 14 * len(panel.lines)}px",
        div_id=f"plot-{panel.name}",
    )
    return f"<div class='plot'>{drawn}</div>"


def _ticks(panel: Panel) -> list[float]:
    """Where there are points, the last first; on a phone two labels need half a scale between."""
    ticks: list[float] = []
    for x in sorted({x for line in panel.lines for x in line.curve.x}, reverse=True):
        if not ticks or x < ticks[-1] / 1.8:
            ticks.append(x)
    return ticks


def _vertical(panel: Panel) -> dict[str, Any]:
    """The axis of values, as Plotly counts: a logarithmic one by exponents.

    It has labels at 1, 2 and 5, if these are few; all in full, for Plotly shortens some to a digit.
    """
    shown = {} if panel.shown is None else {"range": list(panel.shown)}
    if not panel.log_y:
        return shown
    means = [mean for line in panel.lines for mean in line.curve.mean if math.isfinite(mean)]
    low, high = panel.shown or (min(means), max(means))
    few = {"dtick": "D2"} if high < 1000 * low else {}
    exponents = {name: list(map(math.log10, ends)) for name, ends in shown.items()}
    return {"type": "log", "tickformat": "~g"} | few | exponents


def _plotly_figure(panel: Panel) -> dict[str, Any]:
    traces: list[dict[str, Any]] = []
    mode = "lines+markers" if panel.few else "lines"
    for index, (curve, number, thick) in enumerate(panel.lines):
        colour, dash = style(number)
        name = escape(curve.label)  # Plotly reads a subset of HTML in names
        common = {"type": "scatter", "mode": "lines", "legendgroup": str(index), "name": name}
        finite = [i for i, mean in enumerate(curve.mean) if math.isfinite(mean)]
        if any(curve.low[i] < curve.high[i] for i in finite):
            outline = [(curve.x[i], curve.low[i]) for i in finite]
            outline += [(curve.x[i], curve.high[i]) for i in reversed(finite)]
            band = {
                "x": [x for x, _ in outline],
                "y": [y for _, y in outline],
                "fill": "toself",
                "fillcolor": colour,
                "opacity": 0.15,
                "line": {"width": 0},
                "hoverinfo": "skip",
                "showlegend": False,
            }
            traces.append(common | band)
        line = {"color": colour, "dash": dash, "width": 4 if thick else 2}
        above = {"zorder": 1} if thick else {}
        traces.append(common | {"mode": mode, "x": curve.x, "y": curve.mean, "line": line} | above)
    # One page serves light and dark: half-transparent grey shows on both, and CSS colours the text.
    clear, faint, grey = (f"rgba(128, 128, 128, {alpha})" for alpha in (0, 0.3, 0.8))
    axis = {"automargin": True, "gridcolor": faint, "zerolinecolor": faint}
    layout = {
        "template": "none",  # the default is several kilobytes in each plot
        "paper_bgcolor": clear,
        "plot_bgcolor": clear,
        "font": {"family": "system-ui, sans-serif", "size": 13},
        # Plotly leaves out a label that has no room, and the last stands half in the margin.
        "margin": {"l": 8, "r": 24, "t": 36, "b": 8},
        "xaxis": axis
        | {"title": {"text": escape(panel.x_label)}}
        | {"exponentformat": "none", "separatethousands": True}
        | ({"type": "log", "tickvals": _ticks(panel), "tickangle": 0} if panel.few else {}),
        "yaxis": axis | {"title": {"text": escape(panel.y_label)}} | _vertical(panel),
        "legend": {"orientation": "h", "x": 0, "y": 0, "yref": "container", "yanchor": "bottom"},
        "modebar": {"bgcolor": clear, "color": grey, "activecolor": COLOURS[0]},
        "dragmode": False,  # on a phone a finger that crosses a plot must scroll the page
        "showlegend": True,
        "hoverlabel": {"namelength": -1},
    }
    return {"data": traces, "layout": layout}


# --------------------------------------------------------------------------------------------- HTML


def table(lines: Sequence[Sequence[str]], name: str) -> str:
    """A table under its header, which scrolls in its own box where the page is narrow."""

    def cells(line: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in line) + "</tr>\n"

    header, *body = lines
    return (
        f"<div class='scroll'><table id='{escape(name)}'>\n"
        f"<thead>{cells(header, 'th')}</thead>\n"
        f"<tbody>{''.join(cells(line, 'td') for line in body)}</tbody>\n"
        "</table></div>"
    )


def details(heading: str, facts: Iterable[tuple[str, Any]]) -> str:
    """Names and values that unfold under a heading."""
    lines = "".join(
        f"<dt>{escape(key)}</dt><dd>{escape(str(value))}</dd>\n" for key, value in facts
    )
    return f"<details><summary>{escape(heading)}</summary>\n<dl>\n{lines}</dl></details>\n"


def document(title: str, body: str, css: str = "") -> str:
    """The whole page: its `body` is HTML, its `css` comes after that of all pages."""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{escape(title)}</title>
<style>{_CSS}{css}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
{body}
</main>
</body>
</html>
"""


_CSS = """
:root { --ink: #1f2328; --quiet: #59636e; --line: #d1d9e0; --page: #fff; --band: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --quiet: #9198a1; --line: #3d444d; --page: #0d1117; --band: #161b22; }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif;
}
main { max-width: 80rem; margin: 0 auto; padding: 1.5rem 1rem 4rem; overflow-wrap: anywhere; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: 0 0 .5rem; }
h2 { font-size: 1.15rem; margin: 2.5rem 0 .5rem; }
.small { color: var(--quiet); font-size: .9rem; }
.notes { padding-left: 1.2rem; font-size: .9rem; }
/* A shadow where the table goes on; at its end it brings along what covers the shadow. */
.scroll {
  overflow-x: auto; margin-top: 1.5rem; background:
    linear-gradient(to left, var(--page) 1rem, transparent) right / 2rem 100% no-repeat local,
    linear-gradient(to left, var(--line), transparent) right / 1rem 100% no-repeat scroll;
}
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .5rem; text-align: right; border-bottom: 1px solid var(--line); }
th { font-weight: 600; vertical-align: bottom; overflow-wrap: normal; }
@media (max-width: 40rem) { th, td { padding: .4rem .25rem; } }
td { white-space: nowrap; }
th:first-child, td:first-child {
  position: sticky; left: 0; background: var(--page); text-align: left; padding-left: 0;
  white-space: normal; min-width: 7.5rem;
}
details { border-bottom: 1px solid var(--line); }
summary { padding: .5rem 0; cursor: pointer; }
dl {
  display: grid; grid-template-columns: minmax(6rem, max-content) 1fr; gap: .15rem 1rem;
  margin: 0 0 1rem; padding: .75rem 1rem; background: var(--band); font-size: .85rem;
}
dt { color: var(--quiet); }
dd { margin: 0; font-family: ui-monospace, monospace; }
@media print {  /* paper does not scroll */
  .scroll { overflow: visible; background: none; }
  table { font-size: .7rem; }
  th, td { padding: .2rem .3rem; overflow-wrap: normal; }
  td:last-child { white-space: normal; }
  .modebar { display: none; }
  figure, .plot, tr, li { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
}
.plot :is(.xtick, .ytick, .g-xtitle, .g-ytitle, .legend) text { fill: var(--ink) !important; }
"""
