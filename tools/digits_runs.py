"""Write docs/digits/runs.json, the runs behind the README's table and the algorithms' figures.

fedda compare --all --seeds 5 --out runs/digits
python tools/digits_runs.py runs/digits
"""

import json
import sys
from pathlib import Path
from typing import Any

from fedda.reports.runs import read_runs

COMMAND = "fedda compare --all --seeds 5 --out runs/digits"


def main(directory: str) -> None:
    """Read a comparison and write the accuracy of every run by round, and the bytes it sent."""
    record: dict[str, Any] = {"command": COMMAND, "rounds": [], "bytes": {}, "accuracy": {}}
    for run in read_runs([directory]):
        rows = run.evaluations
        record["rounds"] = [row["round"] for row in rows]
        record["bytes"][run.algorithm] = rows[-1]["bytes_up"] + rows[-1]["bytes_down"]
        seeds = record["accuracy"].setdefault(run.algorithm, [])
        seeds.append([round(row["accuracy"], 5) for row in rows])
    text = json.dumps(record).replace("], [", "],\n  [").replace('], "', '],\n"')
    path = Path(__file__).parents[1] / "docs/digits/runs.json"
    path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])
