"""Draws what `run.py` measured: `figure.py RESULTS.json FIGURE.png`."""

import json
import statistics
import sys
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
from matplotlib import pyplot as plt

OURS, THEIRS = "#c2410c", "#64748b"


def main() -> None:
    source, target = (Path(name) for name in sys.argv[1:])
    results = json.loads(source.read_text())
    tasks = results["tasks"]
    most = max(len(result["peers"]) for result in tasks.values())
    figure, panels = plt.subplots(
        1,
        len(tasks),
        figsize=(6.5 * len(tasks), 1.2 + 0.34 * most),
        squeeze=False,
        layout="constrained",
    )
    for panel, (task, result) in zip(panels[0], tasks.items(), strict=True):
        rows = {name: row for name, row in result["peers"].items() if row["seconds"]}
        names = sorted(rows, key=lambda name: -statistics.median(rows[name]["seconds"]))
        for place, name in enumerate(names):
            seconds = rows[name]["seconds"]
            color = OURS if rows[name]["script"] == "peer_fedda.py" else THEIRS
            median = statistics.median(seconds)
            panel.plot(seconds, [place] * len(seconds), "o", color=color, alpha=0.35, mew=0)
            panel.plot([median], [place], "|", color=color, markersize=16, markeredgewidth=3)
        panel.set_yticks(range(len(names)), names)
        panel.set_xscale("log")
        panel.set_xlabel("seconds a round (points: turns; bars: medians)")
        panel.set_title(f"{task}, {result['settings']['precision']}", loc="left")
        panel.grid(axis="x", which="both", alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    where = results["machine"]
    figure.supxlabel(f"{results['date']}, {where['cores']} cores", fontsize="small")
    figure.savefig(target, dpi=150)


if __name__ == "__main__":
    main()
