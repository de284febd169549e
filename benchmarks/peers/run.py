"""One federated round in fedda and in other simulators, measured side by side.

    python benchmarks/peers/run.py [--work DIR] [--tasks emnist digits] [--out peers]
    python benchmarks/peers/run.py --here --tasks emnist resnet --precision bf16

The first makes an environment for each framework out of the package index, in DIR. The second, for
a machine that has no index, compares fedda with PyTorch in this interpreter, on its GPU if it sees
one. Either writes OUT.json, OUT.md and, with Matplotlib in fedda's interpreter, OUT.png.

All peers begin with the same weights and have the same clients in memory. Every client has exactly
the examples that it visits in a round; all frameworks draw cohorts and shuffle clients as they
usually do, and none evaluates. There is no dropout, so that they do the same arithmetic: each takes
one round on given batches, whose weights must be those of fedda. Then they take turns, one working
while the others wait, as many rounds at a time as take about `--seconds`. A turn begins when other
programs use less than a tenth of a core (or after `--patience` seconds), and is repeated, at most
three times, if they used more during it.

Needs the standard library only; the peers have their own interpreters.
"""

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import environments
import processes
from processes import Peer, PeerError

HERE = Path(__file__).parent
COMMON = {"clients": 100, "cohort": 10, "steps": 5, "batch": 20, "rate": 0.1, "beta1": 0.9}
TASKS: dict[str, dict[str, Any]] = {
    "emnist": {**COMMON, "model": "cnn", "algorithm": "fedavg", "l2": 0.0},
    "digits": {**COMMON, "model": "mlp", "algorithm": "fedavg", "l2": 0.0, "batch": 10},
    "resnet": {**COMMON, "model": "resnet18", "algorithm": "fedda-sgdm", "l2": 1e-4},
}
TITLES = {
    "emnist": "EMNIST CNN (1,206,590 parameters)",
    "digits": "Digits perceptron 64-64-10",
    "resnet": "ResNet-18 (11,227,812 parameters), 24x24",
}
# More keywords of `fedda.run`; "virtual" is the number of devices that XLA makes of the CPU.
SETTINGS: dict[str, dict[str, Any]] = {
    "fedda": {},
    "fedda, 2 devices": {"virtual": 2, "devices": 2},
    "fedda, 2 devices, chunk 1": {"virtual": 2, "devices": 2, "chunk": 1},
}
MOST_ROUNDS, MOST_FOREIGN, MOST_TRIES = 1000, 0.1, 4


class Plan(NamedTuple):
    """How a peer is started."""

    environment: str | None  # None: that of fedda
    script: str
    arguments: tuple[str, ...] = ()
    variables: dict[str, str] = {}  # noqa: RUF012  # never changed


def virtual(devices: int) -> dict[str, str]:
    flags = os.environ.get("XLA_FLAGS", "")
    return {"XLA_FLAGS": f"{flags} --xla_force_host_platform_device_count={devices}"}


def plans(settings: dict[str, dict[str, Any]], workers: int, here: bool) -> dict[str, Plan]:
    def fedda(chosen: dict[str, Any]) -> Plan:
        keywords = {key: value for key, value in chosen.items() if key != "virtual"}
        variables = virtual(chosen["virtual"]) if "virtual" in chosen else {}
        return Plan(None, "peer_fedda.py", (json.dumps(keywords),), variables)

    environment = None if here else "torch"
    found = {name: fedda(chosen) for name, chosen in settings.items()} | {
        "PyTorch loop": Plan(environment, "peer_torch_loop.py", ("1",)),
        "torch.func.vmap": Plan(environment, "peer_torch_vmap.py"),
    }
    if here:
        return found
    n = str(workers)
    return found | {
        f"PyTorch loop, {n} processes": Plan("torch", "peer_torch_loop.py", (n,)),
        "pfl-research": Plan("pfl", "peer_pfl.py", ("1",)),
        f"pfl-research, {n} workers": Plan("pfl", "peer_pfl.py", (n,)),
        "FedLab": Plan("fedlab", "peer_fedlab.py"),
        "FedJAX": Plan("fedjax", "peer_fedjax.py", ("1",)),
        "FedJAX, JAX of 2024": Plan("fedjax-2024", "peer_fedjax.py", ("1",)),
        f"FedJAX, JAX of 2024, {n} devices": Plan(
            "fedjax-2024", "peer_fedjax.py", (n,), virtual(workers)
        ),
        f"Flower, {n} actors": Plan("flower", "peer_flower.py", (n,)),
    }


def machine() -> dict[str, Any]:
    names = [
        line.partition(":")[2].strip()
        for line in (
            Path("/proc/cpuinfo").read_text() if platform.system() == "Linux" else ""
        ).splitlines()
        if line.startswith("model name")
    ]
    return {
        "system": platform.platform(),
        "processor": names[0] if names else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
    }


class Bench:
    """The peers of one task, started one after the other; those that fail are told, and left."""

    def __init__(self, arguments: argparse.Namespace, work: Path, task: str) -> None:
        self.arguments, self.work, self.task = arguments, work, task
        self.settings = TASKS[task] | {"precision": arguments.precision} | arguments.sizes
        self.file = work / f"{task}.npz"
        self.peers: dict[str, Peer] = {}
        self.rows: dict[str, dict[str, Any]] = {}
        subprocess.run(
            [
                arguments.fedda,
                str(HERE / "problem.py"),
                task,
                str(self.file),
                json.dumps(self.settings),
            ],
            check=True,
        )

    def start(self, name: str, plan: Plan) -> None:
        row: dict[str, Any] = {"seconds": [], "foreign": [], "idle": []}
        self.rows[name] = row
        log = self.work / f"{self.task}-{name.replace(' ', '-').replace(',', '')}.log"
        try:
            python = self.arguments.fedda
            if plan.environment is not None:
                python = environments.interpreter(plan.environment, self.work)
            command = [python, str(HERE / plan.script), str(self.file), *plan.arguments]
            peer = Peer(command, plan.variables, log)
            self.peers[name] = peer
            row |= peer.hear(processes.STARTS_WITHIN)
            row |= peer.ask(f"check {self.work / self.task}-weights.npz")
            peer.ask("round 2")  # compiles
            self.wait_for_quiet()
            guess = min(peer.ask("round 2")["seconds"] / 2 for _ in range(3))
            row["rounds"] = max(1, min(MOST_ROUNDS, round(self.arguments.seconds / guess)))
            peer.ask(f"round {row['rounds']}")
            print(f"{self.task}: {name}: {guess:.3g} s a round", file=sys.stderr, flush=True)
        except (PeerError, environments.InstallError) as error:
            self.give_up(name, error)

    def give_up(self, name: str, error: Exception) -> None:
        self.rows[name]["error"] = str(error)
        print(f"{self.task}: {name}: {error}", file=sys.stderr, flush=True)
        if name in self.peers:
            self.peers.pop(name).close()

    def take_turns(self) -> None:
        order = list(self.peers)
        random.Random(0).shuffle(order)
        for repetition in range(self.arguments.repetitions):
            for name in order[repetition % len(order) :] + order[: repetition % len(order)]:
                if name in self.peers:
                    try:
                        self.turn(name)
                    except PeerError as error:
                        self.give_up(name, error)

    def wait_for_quiet(self) -> None:
        deadline = time.monotonic() + self.arguments.patience
        while (before := processes.usage()) is not None and time.monotonic() < deadline:
            time.sleep(0.5)
            after = processes.usage()
            assert after is not None
            if processes.shares(before, after, self.peers, "").foreign <= MOST_FOREIGN:
                return

    def turn(self, name: str) -> None:
        """Measures once, or until the machine was ours; the turn with the fewest guests counts."""
        row, tries = self.rows[name], []
        for _ in range(MOST_TRIES):
            self.wait_for_quiet()
            before = processes.usage()
            seconds = self.peers[name].ask(f"round {row['rounds']}")["seconds"] / row["rounds"]
            after = processes.usage()
            if before is None or after is None:
                row["seconds"].append(seconds)
                return
            tries.append((processes.shares(before, after, self.peers, name), seconds))
            if tries[-1][0].foreign <= MOST_FOREIGN:
                break
        shares, seconds = min(tries, key=lambda each: each[0].foreign)
        row["seconds"].append(seconds)
        row["foreign"].append(shares.foreign)
        for other, idle in shares.idle.items():
            self.rows[other]["idle"].append(idle)

    def close(self) -> None:
        for peer in self.peers.values():
            peer.close()
        self.peers.clear()


def allowed(row: dict[str, Any], precision: str) -> float:
    """How far a peer's weights may be from fedda's, as a share of how far they moved."""
    if precision == "bf16":
        return 0.1  # it has eight bits
    return 1e-3 if "cpu" in row["device"].lower() else 2e-2  # TF32


def verdict(row: dict[str, Any], precision: str) -> str:
    if not row["after"] < row["before"]:
        return "WRONG: the loss did not fall"
    if row["deviation"] is None:
        return "-"
    far = row["deviation"] > allowed(row, precision)
    return f"{'WRONG: ' if far else ''}{row['deviation']:.0e}"


def duration(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1e3 * seconds:.3g} ms"


def table(task: str, result: dict[str, Any]) -> str:
    settings, rows = result["settings"], result["peers"]
    medians = {
        name: statistics.median(row["seconds"]) for name, row in rows.items() if row["seconds"]
    }
    ours = [name for name in medians if rows[name]["script"] == "peer_fedda.py"]
    best = min(ours or medians, key=lambda name: medians[name])
    worked = len(next(iter(rows.values()))["seconds"])
    lines = [
        f"### {TITLES[task]}",
        "",
        f"{settings['algorithm']}, {settings['clients']} clients, cohort {settings['cohort']}, "
        f"{settings['steps']} steps of {settings['batch']}, {settings['precision']}; medians of "
        f"{worked} turns. Ratios are to `{best}`.",
        "",
        "| | a round | from - to | ratio | weights differ by | cores used while it waits |",
        "|:--|--:|--:|--:|--:|--:|",
    ]
    for name in sorted(rows, key=lambda name: medians.get(name, float("inf"))):
        row = rows[name]
        if name not in medians:
            lines.append(f"| {name} | not measured: {row.get('error', '')} | | | | |")
            continue
        idle = f"{statistics.mean(row['idle']):.2f}" if row["idle"] else ""
        cells = [
            duration(medians[name]),
            f"{duration(min(row['seconds']))} - {duration(max(row['seconds']))}",
            f"{medians[name] / medians[best]:.2f}",
            verdict(row, settings["precision"]),
            idle,
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    foreign = [share for row in rows.values() for share in row["foreign"]]
    if foreign:
        lines += [
            "",
            f"Other programs used {statistics.mean(foreign):.2f} cores on average during a turn, "
            f"{max(foreign):.2f} at most.",
        ]
    return "\n".join(lines)


def report(results: dict[str, Any]) -> str:
    versions: dict[str, str] = {}
    for result in results["tasks"].values():
        for name, row in result["peers"].items():
            if "versions" in row:
                packages = ", ".join(f"{key} {value}" for key, value in row["versions"].items())
                versions[name] = f"{packages}; {row['device']}"
    where = results["machine"]
    head = (
        f"{results['date']}, {where['cores']} cores ({where['processor']}), {where['system']}.\n"
        f"`{results['command']}`"
    )
    tail = "\n".join(f"- {name}: {text}" for name, text in versions.items())
    parts = [table(task, result) for task, result in results["tasks"].items()]
    return "\n\n".join([head, *parts, tail]) + "\n"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["emnist", "digits"])
    parser.add_argument("--peers", nargs="+", help="names of the table; otherwise all")
    parser.add_argument("--work", type=Path, help="where environments are; otherwise temporary")
    parser.add_argument("--fedda", default=sys.executable, help="the interpreter that has fedda")
    parser.add_argument("--here", action="store_true", help="fedda and PyTorch of this interpreter")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="that a turn takes, about")
    parser.add_argument("--patience", type=float, default=20.0, help="seconds, with other programs")
    parser.add_argument("--workers", type=int, default=2, help="where a framework takes several")
    parser.add_argument(
        "--settings", type=json.loads, help=f"of fedda, by name; otherwise {json.dumps(SETTINGS)}"
    )
    parser.add_argument(
        "--sizes", type=json.loads, default={}, help='instead of a task\'s, as {"cohort": 2}'
    )
    parser.add_argument("--out", type=Path, default=Path("peers"))
    arguments = parser.parse_args()
    if arguments.settings is None:
        arguments.settings = {"fedda": {}} if arguments.here else SETTINGS
    if not arguments.here and ("resnet" in arguments.tasks or arguments.precision != "fp32"):
        parser.error("the resnet and bf16 are for --here: the frameworks are given FedAvg in fp32")
    return arguments


def main() -> int:
    arguments = parsed()
    work = arguments.work or Path(tempfile.mkdtemp(prefix="peers-"))
    work.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python", *sys.argv]),
        "machine": machine(),
        "tasks": {},
    }
    # JAX takes most of a GPU's memory when it starts; PyTorch needs some, and so do other settings.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", ".3")
    chosen = plans(arguments.settings, arguments.workers, arguments.here)
    for task in arguments.tasks:
        (work / f"{task}-weights.npz").unlink(missing_ok=True)  # the first peer writes it anew
        bench = Bench(arguments, work, task)
        try:
            for name, plan in chosen.items():
                if arguments.peers is None or name in arguments.peers:
                    bench.start(name, plan)
                    bench.rows[name]["script"] = plan.script
            bench.take_turns()
        finally:
            bench.close()
        results["tasks"][task] = {"settings": bench.settings, "peers": bench.rows}
    if arguments.work is None:
        shutil.rmtree(work)
    arguments.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    text = report(results)
    arguments.out.with_suffix(".md").write_text(text)
    print(text)
    draw = [arguments.fedda, str(HERE / "figure.py"), str(arguments.out.with_suffix(".json"))]
    if subprocess.run([*draw, str(arguments.out.with_suffix(".png"))]).returncode:
        print("no figure: fedda's interpreter has no Matplotlib", file=sys.stderr)
    return 1 if "WRONG" in text else 0


if __name__ == "__main__":
    sys.exit(main())
