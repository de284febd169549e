"""Run the study: a file for each condition, which is filled in method by method.

What a file holds is never computed again, unless the protocol or the version of the algorithm
changed. An interrupted study continues with the method that it was at.
"""

import dataclasses
import hashlib
import json
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedda.algorithms import registry
from fedda.errors import InputError
from fedda.storage import interrupts
from fedda.storage.files import write_whole
from fedda.storage.provenance import device, versions
from fedda_reproduction.study import design, federations, fedmoments, training
from fedda_reproduction.study.design import AXES, METHODS, Axis, Condition, Method, Point
from fedda_reproduction.study.federations import Federation

ROOT = Path(__file__).parents[3]
PROTOCOL = ROOT / "reproduction" / "protocol.md"
CODE = ("src", "pyproject.toml", "reproduction/fedda_reproduction", "reproduction/protocol.md")

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


def commit() -> str:
    """Return the commit of the study's code; it ends in `-dirty` if a file was changed since."""
    head = _git("rev-parse", "HEAD")
    return head + ("-dirty" if _git("status", "--porcelain", "--", *CODE) else "")


def _git(*words: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(ROOT), *words], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise InputError(
            f"the study needs git and a clone of the repository, to note the commit: {error}"
        ) from None
    return done.stdout.strip()


def run(
    plan: Plan, folder: Path, seconds: float | None = None, report: Report = print
) -> list[str]:
    """Make what is missing.

    Args:
        plan: The conditions and methods.
        folder: Where the files are.
        seconds: After this time, nothing more is begun.
        report: Called with a line for each step.

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
    failed = []
    folder.mkdir(parents=True, exist_ok=True)
    for condition in plan.conditions:
        if until is not None and time.monotonic() > until:
            break
        try:
            _Work(plan, condition, folder, found, until, report).run()
        except InputError as error:  # such as data that are not on this machine
            failed.append(f"{condition.name}: {error}")
            report(failed[-1])
    return failed


@dataclasses.dataclass
class _Work:
    """The work on one condition."""

    plan: Plan
    condition: Condition
    folder: Path
    commit: str
    until: float | None
    report: Report
    federation: Federation | None = None

    def run(self) -> None:
        path = self.folder / f"{self.condition.name}.json"
        cell = read(path) if path.exists() else {}
        identity = {
            "condition": self.condition._asdict(),
            "seeds": self.plan.seeds,
            "lanes": design.LANES,
            "axes": {name: axis._asdict() for name, axis in AXES.items()},
        }
        if cell.get("identity") != _plain(identity):
            cell = {"identity": _plain(identity), "methods": {}}
        records = cell["methods"]
        methods = [METHODS[name] for name in self.plan.methods]
        for method in methods:
            if records.get(method.name, {}).get("version") != version(method):
                records[method.name] = {"version": version(method), "waves": []}

        def save() -> None:
            write(path, cell)

        axes: dict[str, Axis] = dict(AXES)
        before = None
        for number in range(2):
            points = design.wave(axes, number, before)
            for method in methods:
                waves = records[method.name]["waves"]
                if len(waves) > number and waves[number]["points"] == points:
                    continue
                if self.late():
                    return
                began = time.monotonic()
                scores = training.tuned(self.condition, method, self.data(), points)
                del waves[number:]
                records[method.name].pop("endings", None)
                waves.append({"points": points, **scores, **self.origin(began)})
                save()
                self.told(method, f"wave {number + 1}", began)
            at = [
                end
                for method in methods
                for end in design.ends(chosen(records[method.name]), axes, method.coordinates)
            ]
            cell[f"ends of wave {number + 1}"] = sorted({f"{name} {end}" for name, end in at})
            before, axes = axes, design.widened(axes, at)
            if before == axes:
                break
        for method in methods:
            record = records[method.name]
            if "endings" in record:
                continue
            if self.late():
                return
            began = time.monotonic()
            record["chosen"] = chosen(record)
            record["endings"] = training.ended(
                self.condition, method, self.data(), record["chosen"], self.plan.seeds
            )
            record["finals"] = self.origin(began)
            save()
            self.told(method, "seeds", began)

    def data(self) -> Federation:
        if self.federation is None:
            self.federation = federations.load(self.condition, self.plan.seeds)
        return self.federation

    def late(self) -> bool:
        interrupts.check()
        return self.until is not None and time.monotonic() > self.until

    def origin(self, began: float) -> Record:
        return {
            "commit": self.commit,
            "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "seconds": round(time.monotonic() - began, 1),
            "device": device(),
            "jax": versions()["jax"],
        }

    def told(self, method: Method, what: str, began: float) -> None:
        took = time.monotonic() - began
        self.report(f"{self.condition.name}, {method.label}: {what}, {took:.0f} s")


def chosen(record: Mapping[str, Any]) -> Point:
    """Return the point with the highest held-out metric; of equal ones, with the lowest loss."""
    rows = [
        (metric, -loss, point)
        for wave in record["waves"]
        for metric, loss, point in zip(wave["metric"], wave["loss"], wave["points"], strict=True)
        if metric is not None and loss is not None
    ]
    if not rows:
        raise InputError("no point of the method is finite.")
    point: Point = max(rows, key=lambda row: row[:2])[2]
    return point


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
