"""The figures of `fedda theory`, drawn from its record alone."""

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fedda.reports import figures
from fedda.reports.figures import Line, Panel
from fedda.reports.statistics import Curve
from fedda_reproduction.theory.adam_ratios import COHORTS, EVERYBODY, PAPER
from fedda_reproduction.theory.verdicts import NEARER, Row, select

# Numbers of line styles, of one meaning in all figures.
FEDDA, LOCAL, OTHER, QUIET = 0, 1, 2, 6
STYLES = {"decoupled": FEDDA, "local": LOCAL}
NAMES = {"decoupled": "decoupled (FedDA)", "local": "local momentum"}
LOGARITHMIC: Row = {"scale": figures.LOG, "markers": True}


def draw(record: Row, directory: Path) -> list[Path]:
    """Write every figure as PNG; return the paths."""
    deviation = record["deviation"]
    panels = {
        "deviation": _momenta(deviation["curves"]),
        "nearer": _nearer(deviation),
        "orders": _orders(*list(record["orders"].items())[-1]),
        "equations": _equations(*list(record["orders"].items())[-1]),
        "growth": _growth(record["growth"]),
        "ratios": _ratios(record["ratios"]),
    }
    if "network" in record:
        curves = record["network"]["curves"]
        panels["network"] = _momenta({name: curves[name] for name in curves if "warm" in name})
    return [path for name in panels for path in figures.draw(panels[name], directory, name)]


def _panel(title: str, x_label: str, y_label: str, lines: Iterable[Any], **options: Any) -> Panel:
    """Return a panel of lines, each given as a label, a style, x and values.

    A value may be a list of three: its lower end, its middle and its upper end.
    """
    drawn = []
    for label, style, x, values in lines:
        rows = [value if isinstance(value, list) else [value] * 3 for value in values]
        low, mean, high = (list(column) for column in zip(*rows, strict=True))
        drawn.append(Line(Curve(label=label, x=x, mean=mean, low=low, high=high), style))
    settings = {"title": title, "x_label": x_label, "y_label": y_label, **options}
    return Panel(name="", lines=drawn, **settings)


def _column(rows: Sequence[Row], key: str) -> list[Any]:
    return [row[key] for row in rows]


def _momenta(panels: Row) -> list[Panel]:
    labels = "local steps t", "distance to centralised momentum"
    return [
        _panel(title, *labels, _of_momenta(curves["t"], curves), **LOGARITHMIC)
        for title, curves in panels.items()
    ]


def _of_momenta(x: list[float], values: Row) -> list[Any]:
    return [(NAMES[name], style, x, values[name]) for name, style in STYLES.items()]


def _nearer(deviation: Row) -> list[Panel]:
    panels = []
    for T, key in NEARER.items():
        lines = []
        for style, setting in enumerate(itertools.product(deviation["curves"], (0.5, 0.9))):
            family, beta = setting
            rows = select(deviation["grid"], family=family, beta=beta, clients=4, start="warm")
            shares = [row[key][0] for row in rows]
            lines.append((f"{family}, beta {beta:g}", style, _column(rows, "eta"), shares))
        labels = f"T = {T}", "eta L_g", "share where local is nearer"
        panels.append(_panel(*labels, lines, markers=True, y_range=(-0.03, 1.03)))
    return panels


def _orders(family: str, orders: Row) -> list[Panel]:
    panels = []
    for x in ("eta", "T - 1"):
        lines = []
        for name, style in {"FedDA": FEDDA, "local momentum": LOCAL, "FedAvg": OTHER}.items():
            measured = orders["federated"][name][f"fixed time, {x}"]
            lines.append((name, style, measured["x"], measured["error"]))
        panels.append(_panel(family, x, "distance to centralised model", lines, **LOGARITHMIC))
    return panels


def _equations(family: str, orders: Row) -> list[Panel]:
    labels = "time", "distance to the centralised solution"
    return [
        _panel(f"{method}, {family}", *labels, _of_momenta(solved["tau"], solved))
        for method, solved in orders["equations"].items()
    ]


def _growth(rows: Sequence[Row]) -> list[Panel]:
    etas = _column(rows, "eta")
    rates = {name: [row[f"{name}, equation"][0] for row in rows] for name in STYLES}
    lines = _of_momenta(etas, rates)
    for key, style in (("printed", QUIET), ("corrected", OTHER)):
        lines.append((f"lambda+ {key}", style, etas, _column(rows, key)))
    return [_panel("", "eta", "rate of growth", lines, **LOGARITHMIC)]


def _ratios(ratios: Row) -> list[Panel]:
    label, curves = "|m̂| / √v̂", ratios["curves"]
    medians = select(curves["rows"], clients=EVERYBODY, rates=PAPER)
    lines = [
        (f"T = {row['T']}", style, curves["round"], row["medians"])
        for style, row in enumerate(medians, 7)
    ]
    panels = [_panel("median, full batches", "round", label, lines, **LOGARITHMIC)]
    for clients in (EVERYBODY, COHORTS):
        rows = select(ratios["grid"], clients=clients, rates=PAPER)
        steps = _column(rows, "T")
        lines = [(label, FEDDA, steps, [row["quantiles"][::2] for row in rows])]
        for key, style, name in (
            ("scale", LOCAL, "P : G, measured"),
            ("constant", OTHER, "P : G of constant gradients"),
            ("noise", QUIET, "P : G of white noise"),
        ):
            lines.append((name, style, steps, _column(rows, key)))
        panels.append(_panel(clients, "T", "", lines, y_range=(0.003, 3), **LOGARITHMIC))
    return panels
