"""Write docs/digits/curves.json, the curves on the pages of the algorithms.

fedda compare --all --seeds 5 --out runs/digits
python tools/digits_curves.py runs/digits
"""

import json
import statistics
import sys
from pathlib import Path

from fedda.reports.runs import read_runs

COMMAND = "fedda compare --all --seeds 5 --out runs/digits"


def main(directory: str) -> None:
    """Read a comparison and write the mean accuracy of each algorithm by round."""
    found: dict[str, list[list[float]]] = {}
    for run in read_runs([directory]):
        found.setdefault(run.algorithm, []).append([row["accuracy"] for row in run.evaluations])
        rounds = [row["round"] for row in run.evaluations]
    record = {
        "command": COMMAND,
        "seeds": len(found["fedavg"]),
        "rounds": rounds,
        "accuracy": {
            name: [round(statistics.mean(values), 4) for values in zip(*seeds, strict=True)]
            for name, seeds in found.items()
        },
    }
    text = json.dumps(record).replace('], "', '],\n  "').replace('{"', '{\n  "')
    (Path(__file__).parents[1] / "docs/digits/curves.json").write_text(text + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
