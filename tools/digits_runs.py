"""Write docs/digits/runs.json, the runs behind the README's table and the algorithms' figures.

fedda compare --all --seeds 5 --out runs/digits
python tools/digits_runs.py runs/digits

It also draws docs/digits/metric.png, the README's picture. Without a directory it draws alone.
"""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from fedda.algorithms import registry
from fedda.cli.compare import COMPARED
from fedda.reports import figures
from fedda.reports.runs import read_runs
from fedda.reports.statistics import Curve

COMMAND = "fedda compare --all --seeds 5 --out runs/digits"
PATH = Path(__file__).parents[1] / "docs/digits/runs.json"


def record_runs(directory: str) -> None:
    """Read a comparison and write the accuracy of every run by round, and the bytes it sent."""
    record: dict[str, Any] = {"command": COMMAND, "rounds": [], "bytes": {}, "accuracy": {}}
    for run in read_runs([directory]):
        rows = run.evaluations
        record["rounds"] = [row["round"] for row in rows]
        record["bytes"][run.algorithm] = rows[-1]["bytes_up"] + rows[-1]["bytes_down"]
        seeds = record["accuracy"].setdefault(run.algorithm, [])
        seeds.append([round(row["accuracy"], 5) for row in rows])
    text = json.dumps(record).replace("], [", "],\n  [").replace('], "', '],\n"')
    PATH.write_text(text + "\n", encoding="utf-8")


def draw() -> None:
    """Draw the accuracy of the algorithms that `fedda compare` compares, and of all seeds."""
    record = json.loads(PATH.read_text())
    curves = []
    for name in COMPARED:
        seeds = np.array(record["accuracy"][name])
        spread = (column.tolist() for column in (seeds.mean(0), seeds.min(0), seeds.max(0)))
        curves.append(Curve(registry.variants()[name].label, record["rounds"], *spread))
    curves.sort(key=lambda curve: -curve.mean[-1])
    scale = figures.choose_scale(curves, higher_is_better=True)
    panel = figures.Panel(
        name="metric",
        x_label="round",
        y_label="test accuracy, log scale of 1 - accuracy",
        lines=figures.lines_of(curves),
        scale=scale,
        y_range=figures.late_range(curves, scale),
    )
    figures.draw([panel], PATH.parent, "metric")


if __name__ == "__main__":
    for directory in sys.argv[1:]:
        record_runs(directory)
    draw()
