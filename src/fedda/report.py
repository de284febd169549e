"""Tables, figures and a web page that compare runs.

This module sees result files only, so a report never depends on how its runs were made.
"""

import importlib
import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from fedda.files import write_whole
from fedda.results import (
    Curve,
    Row,
    Run,
    curves,
    group,
    markdown,
    measure,
    megabytes,
    read_runs,
    table,
    text_table,
)

__all__ = [
    "Report",
    "Row",
    "Run",
    "figures",
    "html",
    "markdown",
    "read_runs",
    "table",
    "text_table",
    "write",
]

# Okabe and Ito's colours, less black and yellow, which vanish on a dark or a light page. Seven
# colours and four dashes have no common factor, so 28 lines differ before a pair comes again.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
_DASHES = ("solid", "dash", "dot", "dashdot")
_MATPLOTLIB_DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-."}

# Newer Plotly releases add a button that uploads the figure, hence a list of what is allowed.
_PLOTLY_CONFIG = {
    "responsive": True,
    "displaylogo": False,
    "displayModeBar": True,
    "modeBarButtons": [["toImage", "zoom2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
    "showSendToCloud": False,
}


class Report(NamedTuple):
    """What `write` wrote, and what a reader of it should know."""

    files: list[Path]
    notes: list[str]


class _Panel(NamedTuple):
    name: str
    x_label: str
    y_label: str
    log: bool
    curves: list[Curve]


def write(
    paths: Sequence[str | Path], directory: str | Path, threshold: float | None = None
) -> Report:
    """Write `table.md`, the figures and `report.html` of the runs at or below `paths`."""
    runs = read_runs(paths)
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    notes = _notes(runs)
    rows = table(runs, threshold)
    listed = "".join(f"- {note}\n" for note in notes)
    text = f"{markdown(rows)}\n{_how_to_read(rows[0], threshold)}\n"
    write_whole(directory / "table.md", f"{text}\n{listed}" if notes else text)
    drawn = figures(runs, directory)
    html(runs, directory / "report.html", threshold)
    return Report([directory / "report.html", directory / "table.md", *drawn], notes)


def figures(runs: Sequence[Run], directory: str | Path) -> list[Path]:
    """Draw the curves as PNG and PDF: mean over seeds, and a band from lowest to highest."""
    figure_module = _import("matplotlib.figure")
    files = []
    for panel in _panels(runs):
        longest = max(len(curve.label) for curve in panel.curves)
        columns = max(1, min(3, 80 // (longest + 8)))
        height = 3.8 + 0.2 * math.ceil(len(panel.curves) / columns)
        figure = figure_module.Figure(figsize=(6.4, height), layout="constrained")
        axes = figure.add_subplot(xlabel=panel.x_label, ylabel=panel.y_label)
        for index, curve in enumerate(panel.curves):
            colour, dash = _style(index)
            axes.plot(
                curve.x,
                curve.mean,
                color=colour,
                linestyle=_MATPLOTLIB_DASHES[dash],
                label=curve.label,
            )
            axes.fill_between(curve.x, curve.low, curve.high, color=colour, alpha=0.15, lw=0)
        if panel.log:
            axes.set_yscale("log")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside lower center", ncols=columns, frameon=False)
        for suffix in ("png", "pdf"):
            files.append(Path(directory) / f"{panel.name}.{suffix}")
            figure.savefig(files[-1], dpi=200)
    return files


def html(runs: Sequence[Run], path: str | Path, threshold: float | None = None) -> None:
    """Write one page with the table, interactive curves and each run's details.

    The page loads nothing: it can be mailed, archived and opened without a network.
    """
    plotly_io = _import("plotly.io")
    plots = []
    for number, panel in enumerate(_panels(runs)):
        plot = plotly_io.to_html(
            _plotly_figure(panel),
            config=_PLOTLY_CONFIG,
            include_plotlyjs=number == 0,
            full_html=False,
            default_height=f"{400 + 14 * len(panel.curves)}px",
            div_id=f"plot-{panel.name}",
        )
        heading = escape(f"{panel.y_label} by {panel.x_label}".capitalize())
        plots.append(f"<h2>{heading}</h2>\n<div class='plot'>{plot}</div>")
    rows = table(runs, threshold)
    title = escape(f"Federated algorithms on {runs[0].config['task']}")
    notes = "".join(f"<li>{escape(note)}</li>" for note in _notes(runs))
    details = "".join(
        _html_details(label, run) for label, members in group(runs).items() for run in members
    )
    page = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>{_CSS}</style>
</head>
<body>
<main>
<h1>{title}</h1>
<p>{escape(_what_was_run(runs))}</p>
{_html_table(text_table(rows))}
<p class="small">{escape(_how_to_read(rows[0], threshold))}</p>
{f"<h2>Notes</h2><ul class='notes'>{notes}</ul>" if notes else ""}
{"".join(plots)}
<h2>Runs</h2>
{details}
</main>
</body>
</html>
"""
    write_whole(Path(path), page)


def _panels(runs: Sequence[Run]) -> list[_Panel]:
    metric, higher_is_better = measure(runs)

    def panel(name: str, key: str, x_label: str, log: bool) -> _Panel:
        drawn = curves(runs, key, megabytes if name == "megabytes" else lambda row: row["round"])
        means = [mean for curve in drawn for mean in curve.mean if math.isfinite(mean)]
        # A diverging method must be shown, and must not flatten the others against the axis.
        log = log and bool(means) and 0 < min(means) < max(means) / 100
        return _Panel(name, x_label, key.replace("_", " "), log, drawn)

    return [
        panel("metric", metric, "round", not higher_is_better),
        panel("train_loss", "train_loss", "round", True),
        panel("megabytes", metric, "megabytes up and down", not higher_is_better),
    ]


def _style(index: int) -> tuple[str, str]:
    return _COLOURS[index % len(_COLOURS)], _DASHES[index % len(_DASHES)]


def _plotly_figure(panel: _Panel) -> dict[str, Any]:
    traces: list[dict[str, Any]] = []
    for index, curve in enumerate(panel.curves):
        colour, dash = _style(index)
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
        line = {"color": colour, "dash": dash, "width": 2}
        traces.append(common | {"x": curve.x, "y": curve.mean, "line": line})
    # One page serves light and dark: half-transparent grey shows on both, and CSS colours the text.
    clear, faint, grey = (f"rgba(128, 128, 128, {alpha})" for alpha in (0, 0.3, 0.8))
    axis = {"automargin": True, "gridcolor": faint, "zerolinecolor": faint}
    layout = {
        "template": "none",  # the default is several kilobytes in each plot
        "paper_bgcolor": clear,
        "plot_bgcolor": clear,
        "font": {"family": "system-ui, sans-serif", "size": 13},
        "margin": {"l": 8, "r": 8, "t": 36, "b": 8},
        "xaxis": axis | {"title": {"text": escape(panel.x_label)}},
        "yaxis": axis
        | {"title": {"text": escape(panel.y_label)}}
        | ({"type": "log", "dtick": 1} if panel.log else {}),
        "legend": {"orientation": "h", "x": 0, "y": 0, "yref": "container", "yanchor": "bottom"},
        "modebar": {"bgcolor": clear, "color": grey, "activecolor": _COLOURS[0]},
        "dragmode": False,  # on a phone a finger that crosses a plot must scroll the page
        "showlegend": True,
        "hoverlabel": {"namelength": -1},
    }
    return {"data": traces, "layout": layout}


def _what_was_run(runs: Sequence[Run]) -> str:
    def values(key: str) -> str:
        found = {str(run.config[key]): None for run in runs if key in run.config}
        return " or ".join(found)

    seeds = ", ".join(map(str, sorted({run.seed for run in runs})))
    parts = [f"Task {values('task')}"]
    if partition := values("partition"):
        parts.append(f"partition {partition}")
    if cohort := values("cohort"):
        of = f" of {clients}" if (clients := values("clients")) else ""
        parts.append(f"{cohort}{of} clients a round")
    if rounds := values("rounds"):
        parts.append(f"{rounds} rounds")
    return f"{', '.join(parts)}; seeds {seeds}."


def _how_to_read(row: Row, threshold: float | None) -> str:
    text = (
        f"{row.metric.capitalize()} at the end, and its mean over the last {row.last} evaluations: "
        f"{'higher' if row.higher_is_better else 'lower'} is better. Mean ± sample standard "
        "deviation over seeds; non-finite clients and skipped rounds are totals."
    )
    if threshold is None and row.threshold is not None:
        share = "95 % of the highest" if row.higher_is_better else "105 % of the lowest"
        text += f" The threshold {row.threshold:g} is {share} mean of last {row.last}, rounded."
    return text + " Bands in the figures span the seeds."


def _html_table(lines: list[list[str]]) -> str:
    def cells(line: list[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in line) + "</tr>\n"

    header, *body = lines
    return (
        "<div class='scroll'><table id='results'>\n"
        f"<thead>{cells(header, 'th')}</thead>\n"
        f"<tbody>{''.join(cells(line, 'td') for line in body)}</tbody>\n"
        "</table></div>"
    )


def _html_details(label: str, run: Run) -> str:
    facts: dict[str, Any] = {"directory": run.path, "notes": "; ".join(run.notes) or "none"}
    if run.summary is not None:
        facts |= {key: run.summary.get(key) for key in ("parameters", "device", "commit")}
        for key, style in (("seconds", ".1f"), ("versions", "")):
            parts = run.summary.get(key, {}).items()
            facts[key] = ", ".join(f"{name} {part:{style}}" for name, part in parts)
    lines = "".join(
        f"<dt>{escape(key)}</dt><dd>{escape(str(value))}</dd>\n"
        for key, value in [*facts.items(), *run.config.items()]
    )
    state = ", unfinished" if run.summary is None else ""
    heading = escape(f"{label}, seed {run.seed}{state}")
    return f"<details><summary>{heading}</summary>\n<dl>\n{lines}</dl></details>\n"


def _notes(runs: Sequence[Run]) -> list[str]:
    notes = [note for run in runs for note in run.notes]
    for key in ("partition", "clients", "cohort", "rounds", "model", "batch", "local_work"):
        values = sorted({str(run.config.get(key)) for run in runs})
        if len(values) > 1:
            notes.append(f"not one setting: runs differ in {key} ({', '.join(values)})")
    return notes


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            "figures need matplotlib and plotly: pip install 'fedda[report]'"
        ) from error


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
.small { color: var(--quiet); font-size: .85rem; }
.notes { padding-left: 1.2rem; font-size: .9rem; }
.scroll { overflow-x: auto; margin-top: 1.5rem; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .4rem .5rem; text-align: right; border-bottom: 1px solid var(--line); }
th { font-weight: 600; vertical-align: bottom; overflow-wrap: normal; }
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
.plot :is(.xtick, .ytick, .g-xtitle, .g-ytitle, .legend) text { fill: var(--ink) !important; }
"""
