"""Measure seconds and bytes of a deployed round: fedda's algorithms, and Flower's own FedAvg.

    python benchmarks/flower_overhead.py [ROUNDS]

A SuperLink and three SuperNodes on loopback, under TLS and with node keys, as in
`examples/flower-digits`: the same nodes, model, data and local work for all. Bytes are those that
the SuperLink counts for a run. A round, with its evaluation, lasts from the log entry of the round
before to its own.
"""

import importlib
import itertools
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from fedda.reports.tables import markdown_table

HERE = Path(__file__).parent
EXAMPLE = HERE.parent / "examples" / "flower-digits"
DESCRIPTION = """
[project]
name = "flower-fedavg"
version = "1.0.0"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "fedda"

[tool.flwr.app.components]
serverapp = "flower_fedavg:server_app"
clientapp = "flower_fedavg:client_app"

[tool.flwr.app.config]
rounds = 1
nodes = 1
out = ""
"""


class Cost(NamedTuple):
    """Cost of a round; bytes are of all clients together."""

    seconds: float
    shortest: float
    longest: float
    kilobytes_down: float
    kilobytes_up: float


def flower_fedavg(directory: Path) -> Path:
    """Make a Flower app of Flower's own FedAvg, and return its directory."""
    shutil.copytree(EXAMPLE / "flower_digits", directory / "flower_digits")
    shutil.copy(HERE / "flower_fedavg.py", directory)
    (directory / "pyproject.toml").write_text(DESCRIPTION)
    return directory


def round_ends(path: Path, rounds: int) -> list[float]:
    """Wait for all rounds in a log; return the times at which their entries appeared."""
    ends: list[float] = []
    while len(ends) < rounds:
        time.sleep(0.05)
        done = path.read_text().count("\n") if path.exists() else 0
        ends += [time.monotonic()] * (done - len(ends))
    return ends


def measure(federation: Any, app: Path, out: Path, **config: Any) -> Cost:
    """Run an app on a federation, and measure its rounds."""
    federation.app = app
    run = federation.submit({**config, "out": str(out)})
    ends = round_ends(out / "metrics.jsonl", config["rounds"])
    federation.wait(run)
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["loss"] < rows[0]["loss"], "it has learnt nothing"
    seconds = [after - before for before, after in itertools.pairwise(ends)]
    traffic = federation.status(run)["network-traffic"]
    return Cost(
        seconds=statistics.median(seconds),
        shortest=min(seconds),
        longest=max(seconds),
        kilobytes_down=traffic["outbound-bytes"] / config["rounds"] / 1000,
        kilobytes_up=traffic["inbound-bytes"] / config["rounds"] / 1000,
    )


def main() -> None:
    sys.path.insert(0, str(EXAMPLE))
    Federation = importlib.import_module("federation").Federation
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 10
    costs: dict[str, Cost] = {}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        app = flower_fedavg(directory / "app")
        with Federation(directory / "federation") as federation:
            size = {"rounds": rounds, "nodes": federation.nodes}
            costs["Flower's FedAvg"] = measure(federation, app, directory / "flower", **size)
            for algorithm in ("fedavg", "fedda-sgdm"):
                out = directory / algorithm
                costs[algorithm] = measure(federation, EXAMPLE, out, algorithm=algorithm, **size)
    header = ["", "seconds a round", "shortest", "longest", "kB down", "kB up"]
    rows = [[label, *(f"{number:.1f}" for number in cost)] for label, cost in costs.items()]
    print(markdown_table([header, *rows]))


if __name__ == "__main__":
    main()
