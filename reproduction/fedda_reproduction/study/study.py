"""Run the study: a file for each condition, which is filled in method by method.

What a file holds is never computed again, unless the protocol or the version of the algorithm
changed. An interrupted study continues with the method that it was at.
"""

import dataclasses
import hashlib
import json
import multiprocessing
import os
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import jax

from fedda.algorithms import registry
from fedda.errors import InputError
from fedda.simulate import devices
from fedda.storage import interrupts
from fedda.storage.files import write_whole
from fedda.storage.provenance import device
from fedda_reproduction.study import design, federations, fedmoments, training
from fedda_reproduction.study.design import AXES, METHODS, Axis, Condition, Method, Point
from fedda_reproduction.study.federations import Federation

ROOT = Path(__file__).parents[3]
CODE = ("src", "pyproject.toml", "reproduction/fedda_reproduction", "reproduction/protocol.md")
WAVES = 2

Report = Callable[[str], object]
Record = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Plan:
    """What to run. The small form tries the program; its results are no evidence."""

    conditions: Sequence[Condition] = design.CONDITIONS
    methods: Sequence[str] = tuple(METHODS)
    seeds: int = design.SEEDS
    small: bool = False


SMALL = Plan(design.SMALL_CONDITIONS, design.SMALL_METHODS, seeds=3, small=True)


# --------------------------------------------------------------------------------------- provenance


def digest(root: Path = ROOT) -> str:
    """Return a hash of the files that the results depend on."""
    total = hashlib.sha256()
    for name in CODE:
        path = root / name
        files = [path] if path.is_file() else sorted(path.rglob("*"))
        for file in files:
            if file.suffix in (".py", ".toml", ".md", ".csv"):
                total.update(file.relative_to(root).as_posix().encode() + b"\0")
                total.update(file.read_bytes())
    return total.hexdigest()[:16]


def commit() -> str:
    """Return the commit of the study's code; it ends in `-dirty` if a file was changed since.

    On a copy without git it is `unknown`: `digest` then shows which commit it is a copy of.
    """
    if not (ROOT / ".git").exists():
        return "unknown"
    head = _git("rev-parse", "HEAD")
    return head + ("-dirty" if _git("status", "--porcelain", "--", *CODE) else "")


def _git(*words: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise InputError(f"the study needs git, to note the commit: {error}") from None
    return done.stdout.strip()


# ---------------------------------------------------------------------------------------------- run


class Task(NamedTuple):
    """What one process computes at a time: a wave of a method, or its final runs."""

    condition: Condition
    method: str
    seeds: int
    points: Sequence[Point]  # of a wave; the chosen one, for the final runs
    wave: int | None  # None: the final runs

    def __str__(self) -> str:
        what = "seeds" if self.wave is None else f"wave {self.wave + 1}"
        return f"{self.condition.name}, {METHODS[self.method].label}: {what}"


def run(
    plan: Plan,
    folder: Path,
    seconds: float | None = None,
    report: Report = print,
    workers: int = 1,
) -> list[str]:
    """Make what is missing.

    Args:
        plan: The conditions and methods.
        folder: Where the files are.
        seconds: After this time, nothing more is begun.
        report: Called with a line for each step.
        workers: The number of processes.

    Returns:
        The conditions that could not be run, and why.

    Raises:
        InputError: The code differs from its commit, so nobody could repeat the runs.
    """
    found = commit()
    if found.endswith("-dirty") and not plan.small:
        raise InputError(
            "the code of the study has changes that are not committed, so nobody could repeat its "
            "runs. Commit them first. fedda study --small runs without a commit."
        )
    until = None if seconds is None else time.monotonic() + seconds
    folder.mkdir(parents=True, exist_ok=True)
    origin = {
        "commit": found,
        "code": digest(),
        "device": device(),
        "jax": jax.__version__,
    }
    works = [_Work(plan, condition, folder, origin) for condition in plan.conditions]

    def late() -> bool:
        interrupts.check()
        return until is not None and time.monotonic() > until

    if workers > 1:
        return _with_processes(works, workers, late, report)
    failed = []
    for work in works:
        try:
            while not late() and (task := next(iter(work.missing()), None)):
                report(work.accept(task, execute(task)))
        except InputError as error:  # such as data that are not on this machine
            failed.append(f"{work.condition.name}: {error}")
            report(failed[-1])
    return failed


def _with_processes(
    works: Sequence["_Work"], workers: int, late: Callable[[], bool], report: Report
) -> list[str]:
    """Run the tasks in processes. A process that is free takes the first condition with a task."""
    failed: dict[str, str] = {}
    pending: dict[Future[Record], tuple[_Work, Task]] = {}
    context = multiprocessing.get_context("spawn")
    number = context.Value("i", 0)
    with ProcessPoolExecutor(workers, context, _start_worker, (number,)) as pool:

        def begin() -> None:
            for work in works:
                if work.condition.name in failed:
                    continue
                for task in work.missing():
                    if len(pending) == workers:
                        return
                    if (work, task) not in pending.values():
                        pending[pool.submit(execute, task)] = (work, task)

        begin()
        while pending and not late():
            done, _ = wait(pending, timeout=1.0, return_when=FIRST_COMPLETED)
            for future in done:
                work, task = pending.pop(future)
                name = work.condition.name
                try:
                    report(work.accept(task, future.result()))
                except InputError as error:
                    if name not in failed:
                        failed[name] = f"{name}: {error}"
                        report(failed[name])
            begin()
        # What runs now is finished and kept.
        pool.shutdown(cancel_futures=True)
        for future, (work, task) in pending.items():
            if not future.cancelled() and future.exception() is None:
                report(work.accept(task, future.result()))
    return list(failed.values())


def _start_worker(number: Any) -> None:
    """Give the process a core of its own, where the system can."""
    with number.get_lock():
        mine, number.value = number.value, number.value + 1
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[mine % len(cores)]})
    devices.start_up()


@lru_cache(maxsize=2)
def _loaded(condition: Condition, seeds: int) -> Federation:
    return federations.load(condition, seeds)


def execute(task: Task) -> Record:
    """Compute a task; return its scores and the seconds it took."""
    began = time.monotonic()
    method, federation = METHODS[task.method], _loaded(task.condition, task.seeds)
    if task.wave is None:
        scores: Record = training.ended(
            task.condition, method, federation, task.points[0], task.seeds
        )
    else:
        scores = training.tuned(task.condition, method, federation, task.points)
    return {"scores": scores, "seconds": round(time.monotonic() - began, 1)}


class _Work:
    """The work on one condition, and its file."""

    def __init__(self, plan: Plan, condition: Condition, folder: Path, origin: Record) -> None:
        self.plan, self.condition, self.origin = plan, condition, origin
        self.path = folder / f"{condition.name}.json"
        self.cell = read(self.path) if self.path.exists() else {}
        identity = _plain(
            {
                "condition": condition._asdict(),
                "seeds": plan.seeds,
                "lanes": design.LANES,
                "axes": {name: [axis.low, axis.high] for name, axis in AXES.items()},
            }
        )
        if self.cell.get("identity") != identity:
            self.cell = {"identity": identity, "methods": {}}
        self.methods = [METHODS[name] for name in plan.methods]
        self.records: Record = self.cell["methods"]
        for method in self.methods:
            if self.records.get(method.name, {}).get("version") != version(method):
                self.records[method.name] = {"version": version(method), "waves": []}
        self._name_commit()

    def _name_commit(self) -> None:
        """Name the commit of results from a copy of this code without git."""
        if self.origin["commit"].endswith("-dirty"):
            return
        for record in self.records.values():
            for part in (*record["waves"], record.get("finals", {})):
                if (part.get("commit"), part.get("code")) == ("unknown", self.origin["code"]):
                    part["commit"] = self.origin["commit"]
                    write(self.path, self.cell)

    def missing(self) -> list[Task]:
        """Return the tasks that can be computed now; none if the condition is complete."""
        axes: dict[str, Axis] = dict(AXES)
        before = None
        for number in range(WAVES):
            points = design.wave(axes, number, before)
            tasks = [
                Task(self.condition, method.name, self.plan.seeds, points, number)
                for method in self.methods
                if self._wave(method, number, points) is None
            ]
            if tasks:
                return tasks
            at = [
                end
                for method in self.methods
                for end in design.ends(
                    chosen(self.records[method.name], number + 1), axes, method.coordinates
                )
            ]
            self.cell[f"ends of wave {number + 1}"] = sorted({f"{axis} {end}" for axis, end in at})
            before, axes = axes, design.widened(axes, at)
            if before == axes:
                break
        return list(self._finals())

    def _wave(self, method: Method, number: int, points: Sequence[Point]) -> Record | None:
        waves: list[Record] = self.records[method.name]["waves"]
        return waves[number] if len(waves) > number and waves[number]["points"] == points else None

    def _finals(self) -> Iterator[Task]:
        for method in self.methods:
            record = self.records[method.name]
            if record.get("chosen") != chosen(record) or "endings" not in record:
                point = [chosen(record)]
                yield Task(self.condition, method.name, self.plan.seeds, point, wave=None)

    def accept(self, task: Task, result: Record) -> str:
        """Write the result of a task; return a line about it."""
        record, seconds = self.records[task.method], result["seconds"]
        date = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        origin = {**self.origin, "date": date, "seconds": seconds}
        if task.wave is None:
            record |= {"chosen": task.points[0], "endings": result["scores"], "finals": origin}
        else:  # what followed another wave of this number is no longer of use
            wave = {"points": task.points, **result["scores"], **origin}
            record["waves"][task.wave :] = [wave]
        write(self.path, self.cell)
        return f"{task}, {seconds:.0f} s"


def chosen(record: Mapping[str, Any], waves: int | None = None) -> Point:
    """Return the point with the highest held-out metric; of equal ones, with the lowest loss.

    Args:
        record: The record of a method.
        waves: How many waves to look at; all by default.
    """
    point: Point = best(record, waves)[2]
    return point


def best(record: Mapping[str, Any], waves: int | None = None) -> tuple[float, float, Point]:
    """Return the held-out metric, the negative loss and the chosen point, as `chosen` does."""
    rows = [
        (metric, -loss, point)
        for wave in record["waves"][:waves]
        for metric, loss, point in zip(wave["metric"], wave["loss"], wave["points"], strict=True)
        if metric is not None and loss is not None
    ]
    if not rows:
        raise InputError("no point of the method is finite.")
    return max(rows, key=lambda row: row[:2])


def version(method: Method) -> str:
    """Return what identifies the method's program: the algorithm's version and its options."""
    name, number = method.name, fedmoments.VERSION
    if isinstance(method.algorithm, str):
        name, number = method.algorithm, registry.variants()[method.algorithm].version
    text = json.dumps([name, number, dict(method.options), sorted(method.coordinates)])
    return f"{name} {number} {hashlib.sha256(text.encode()).hexdigest()[:8]}"


# -------------------------------------------------------------------------------------------- files


def write(path: Path, cell: Record) -> None:
    """Write a condition's file: a line for each method, so that git can compare them."""
    lines = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in cell["methods"].items()]
    rest = [
        f"{json.dumps(name)}: {json.dumps(value)}"
        for name, value in cell.items()
        if name != "methods"
    ]
    text = "{\n" + ",\n".join(rest) + ',\n"methods": {\n' + ",\n".join(lines) + "\n}}\n"
    write_whole(path, text)


def read(path: Path) -> Record:
    """Return the content of a condition's file."""
    try:
        content: Record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(
            f"{path} is damaged: {error}. Delete it, and run the study again."
        ) from None
    return content


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))
