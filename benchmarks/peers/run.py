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
programs use less than a tenth of a core, and is repeated if they used more during it, until a task
has cost `--patience` seconds of waiting and repeating.

Needs the standard library only; the peers have their own interpreters.
"""

import argparse
import json
import os
import platform
import random
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import environments
import processes
import tables
from processes import Peer, PeerError

HERE = Path(__file__).parent
COMMON = {
    **{"clients": 100, "cohort": 10, "sizes": "equal", "steps": 5, "batch": 20},
    **{"rate": 0.1, "beta1": 0.9},
}
TASKS: dict[str, dict[str, Any]] = {
    "emnist": {**COMMON, "model": "cnn", "algorithm": "fedavg", "l2": 0.0},
    "digits": {**COMMON, "model": "mlp", "algorithm": "fedavg", "l2": 0.0, "batch": 10},
    "resnet": {**COMMON, "model": "resnet18", "algorithm": "fedda-sgdm", "l2": 1e-4},
}
# One epoch of clients of unequal sizes. The digits have 50 examples on average.
UNEQUAL = {"emnist": "femnist", "digits": "lognormal:1"}
TASKS |= {f"{task}-unequal": {**TASKS[task], "sizes": sizes} for task, sizes in UNEQUAL.items()}
ONLY_EQUAL = ("torch.func.vmap", "FedLab")  # they stack clients, or take means without weights
# Keywords of `fedda.run`. "as_command": as the command `fedda run` does it, which makes a device of
# every core and spreads a cohort over as many as pay off.
SETTINGS: dict[str, dict[str, Any]] = {
    "fedda": {"as_command": True},
    "fedda, PyTorch module": {"as_command": True, "module": True},
    "fedda, 1 device": {"devices": 1},
}
MOST_ROUNDS, MOST_FOREIGN = 1000, 0.1


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
    environment = None if here else "torch"
    found = {
        name: Plan(None, "peer_fedda.py", (json.dumps(chosen),))
        for name, chosen in settings.items()
    } | {
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
        self.patience = arguments.patience
        self.file = work / f"{task}.npz"
        self.peers: dict[str, Peer] = {}
        self.rows: dict[str, dict[str, Any]] = {}
        subprocess.run(
            [
                arguments.fedda,
                str(HERE / "problem.py"),
                task.removesuffix("-unequal"),
                str(self.file),
                json.dumps(self.settings),
            ],
            check=True,
        )

    def start(self, name: str, plan: Plan) -> None:
        row: dict[str, Any] = {"seconds": [], "spent": [], "foreign": [], "idle": []}
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
            row["first"] = peer.ask("round 2")["seconds"]  # compiles
            self.wait_for_quiet(most=20)
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

    def wait_for_quiet(self, most: float = float("inf")) -> None:
        least = max(0.0, self.patience - most)
        while (before := processes.usage()) is not None and self.patience > least:
            time.sleep(0.5)
            after = processes.usage()
            assert after is not None
            if processes.shares(before, after, self.peers, "").foreign <= MOST_FOREIGN:
                return
            self.patience -= after.when - before.when

    def turn(self, name: str) -> None:
        """Measures once, or until the machine was ours; the turn with the fewest guests counts."""
        row, tries = self.rows[name], []
        while True:
            self.wait_for_quiet()
            before = processes.usage()
            seconds = self.peers[name].ask(f"round {row['rounds']}")["seconds"] / row["rounds"]
            after = processes.usage()
            if before is None or after is None:
                row["seconds"].append(seconds)
                return
            root = self.peers[name].process.pid
            spent = processes.of_tree(after, root) - processes.of_tree(before, root)
            shares = processes.shares(before, after, self.peers, name)
            tries.append((shares, seconds, spent / row["rounds"]))
            if tries[-1][0].foreign <= MOST_FOREIGN or self.patience <= 0:
                break
            self.patience -= after.when - before.when
        shares, seconds, spent = min(tries, key=lambda each: each[0].foreign)
        row["seconds"].append(seconds)
        row["spent"].append(spent)
        row["foreign"].append(shares.foreign)
        for other, idle in shares.idle.items():
            self.rows[other]["idle"].append(idle)

    def close(self) -> None:
        for peer in self.peers.values():
            peer.close()
        self.peers.clear()


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=["emnist", "digits"])
    parser.add_argument("--peers", nargs="+", help="names of the table; otherwise all")
    parser.add_argument("--work", type=Path, help="where environments are; otherwise temporary")
    parser.add_argument("--fedda", default=sys.executable, help="the interpreter that has fedda")
    parser.add_argument("--here", action="store_true", help="fedda and PyTorch of this interpreter")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--repetitions", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="that a turn takes, about")
    parser.add_argument(
        "--patience", type=float, default=600.0, help="seconds, with other programs"
    )
    parser.add_argument("--workers", type=int, default=2, help="where a framework takes several")
    parser.add_argument(
        "--settings", type=json.loads, default=SETTINGS, help="of fedda, by name, as JSON"
    )
    parser.add_argument(
        "--sizes", type=json.loads, default={}, help='instead of a task\'s, as {"cohort": 2}'
    )
    parser.add_argument("--out", type=Path, default=Path("peers"))
    arguments = parser.parse_args()
    if not arguments.here and ("resnet" in arguments.tasks or arguments.precision != "fp32"):
        parser.error("the resnet and bf16 are for --here: the frameworks are given FedAvg in fp32")
    return arguments


def main() -> int:
    arguments = parsed()
    work = arguments.work or Path(tempfile.mkdtemp(prefix="peers-"))
    work.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "command": shlex.join(["python", "benchmarks/peers/run.py", *sys.argv[1:]]),
        "machine": machine(),
        "tasks": {},
    }
    # JAX takes most of a GPU's memory when it starts; PyTorch needs some, and so do other settings.
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", ".3")
    os.environ["FEDDA_COMPILE_CACHE"] = "off"  # the seconds to compile are reported
    chosen = plans(arguments.settings, arguments.workers, arguments.here)
    for task in arguments.tasks:
        (work / f"{task}-weights.npz").unlink(missing_ok=True)  # the first peer writes it anew
        bench = Bench(arguments, work, task)
        try:
            for name, plan in chosen.items():
                if (arguments.peers is None or name in arguments.peers) and not (
                    task.endswith("-unequal") and name in ONLY_EQUAL
                ):
                    bench.start(name, plan)
                    bench.rows[name]["script"] = plan.script
            bench.take_turns()
        finally:
            bench.close()
        results["tasks"][task] = {"settings": bench.settings, "peers": bench.rows}
    if arguments.work is None:
        shutil.rmtree(work)
    arguments.out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    text = tables.report(results)
    arguments.out.with_suffix(".md").write_text(text)
    print(text)
    draw = [arguments.fedda, str(HERE / "figure.py"), str(arguments.out.with_suffix(".json"))]
    if subprocess.run([*draw, str(arguments.out.with_suffix(".png"))]).returncode:
        print("no figure: fedda's interpreter has no Matplotlib", file=sys.stderr)
    return 1 if "WRONG" in text else 0


if __name__ == "__main__":
    sys.exit(main())
