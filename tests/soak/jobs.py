"""The work that is disturbed: how it is begun or continued, and what it must leave in the end."""

import importlib
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from soak.processes import Process, fedda

SMALL = ["model=linear", "clients=12", "cohort=3", "eval_every=1"]
Start = Callable[..., Process]


def end_of(run: Path) -> bytes:
    """The arrays of the last checkpoint of a run, without times and checksum."""
    (last,) = sorted(run.glob("checkpoints/round-*"), key=lambda path: int(path.name[6:]))[-1:]
    return last.read_bytes().partition(b"\n")[2][:-32]


def rows_of(run: Path, name: str = "metrics.jsonl") -> bytes:
    """The complete lines of a file of rows."""
    path = run / name
    content = path.read_bytes() if path.exists() else b""
    return content[: content.rfind(b"\n") + 1]


class Job:
    """Work with an undisturbed result, to which all others are compared.

    Attributes:
        work: Seconds of processor time that it takes undisturbed.
        expected: What it leaves.
    """

    def __init__(self, folder: Path, words: list[str]) -> None:
        self.folder, self.words = folder, words
        self.prepare()
        whole = folder / "whole"
        ended = self.start(whole).result()
        assert ended.code == 0, ended
        # With compiled programs of the first: only those after it take as long as all others will.
        shutil.rmtree(whole)
        ended = self.start(whole).result()
        assert ended.code == 0, ended
        self.work, self.expected = ended.work, self.left(whole)

    def prepare(self) -> None:
        """Write what the work needs."""

    def start(self, place: Path, **environment: str) -> Process:
        """Begin the work in a folder, or continue it."""
        raise NotImplementedError

    def left(self, place: Path) -> Any:
        """Return what finished work has left, without times."""
        raise NotImplementedError

    def check(self, place: Path) -> None:
        """Check what unfinished work has left: no round is lost in between, or doubled."""

    def log(self, place: Path) -> Path:
        return self.folder / f"{place.name}.log"


class Run(Job):
    """`fedda run`, and `--resume`."""

    WORDS = (
        ["algorithm=fedda-adam", "rounds=80", "checkpoint_every=1"],
        ["algorithm=scaffold", "rounds=30", "checkpoint_every=3", "stabilise=3"],
        ["algorithm=fedavg", "rounds=120", "checkpoint_every=1"],
        ["algorithm=mime-sgdm", "rounds=30", "checkpoint_every=2"],
    )

    def start(self, place: Path, **environment: str) -> Process:
        words = ["run", *SMALL, *self.words, "--out", place]
        if (place / "config.toml").exists():
            words = ["run", "--resume", place]
        return fedda(*words, "--quiet", log=self.log(place), environment=environment)

    def left(self, place: Path) -> Any:
        assert (place / "summary.json").exists()
        return (place / "config.toml").read_bytes(), rows_of(place), end_of(place)

    def check(self, place: Path) -> None:
        assert self.expected[1].startswith(rows_of(place)), "a round is lost or doubled"


class Directory(Job):
    """A run directory alone: rounds that take no time, so that most kills come while it writes."""

    WORDS = (["1"], ["4"])
    ROUNDS = 600

    def start(self, place: Path, **environment: str) -> Process:
        def work() -> None:
            from fedda.storage.directory import RunDirectory

            state, begin = np.zeros(2000), 0
            with RunDirectory(place, {"rate": 0.1}) as kept:
                if (found := kept.read_back(lambda: {"w": state})) is not None:
                    state, begin = found.run["w"], found.round
                for number in range(begin + 1, self.ROUNDS + 1):
                    state = 0.9 * state + number
                    kept.log({"round": number, "loss": float(state[0])})
                    if number % int(self.words[0]) == 0:
                        kept.save(number, {"w": state})
                kept.finish(lambda: {"rounds": self.ROUNDS})

        return Process(work, self.log(place), environment)

    def left(self, place: Path) -> Any:
        assert (place / "summary.json").exists()
        return rows_of(place), end_of(place)

    def check(self, place: Path) -> None:
        assert self.expected[0].startswith(rows_of(place)), "a round is lost or doubled"


class Compare(Job):
    """`fedda compare`, two algorithms."""

    WORDS = (["fedavg", "fedda-sgdm"],)

    def start(self, place: Path, **environment: str) -> Process:
        words = ["compare", *self.words, *SMALL, "rounds=12", "checkpoint_every=1"]
        words += ["--out", place, "--quiet"]
        return fedda(*words, log=self.log(place), environment=environment)

    def left(self, place: Path) -> Any:
        runs = sorted(path.parent for path in place.glob("*/config.toml"))
        assert all((run / "summary.json").exists() for run in runs)
        assert (place / "report.html").exists()
        return {run.name: (rows_of(run), end_of(run)) for run in runs}

    def check(self, place: Path) -> None:
        for name, (rows, _) in self.expected.items():
            assert rows.startswith(rows_of(place / name)), f"a round of {name} is lost or doubled"


class Sweep(Job):
    """`fedda sweep`, six runs in batches of two."""

    WORDS = (["algorithm=fedavg", "--grid", "client_lr=0.03,0.1,0.3", "--seeds", "2"],)

    def start(self, place: Path, **environment: str) -> Process:
        words = ["sweep", *SMALL[:3], "rounds=12", *self.words, "--together", 2, "--out", place]
        return fedda(*words, "--quiet", log=self.log(place), environment=environment)

    def left(self, place: Path) -> Any:
        best = (place / "preset.toml").read_bytes()
        assert json.loads((place / "summary.json").read_text())["runs"] == 6
        return rows_of(place, "points.jsonl"), best

    def check(self, place: Path) -> None:
        rows = rows_of(place, "points.jsonl")
        assert self.expected[0].startswith(rows), "a run is lost or doubled"


class Reproduce(Job):
    """What `fedda reproduce` does to fill its folder; three small runs in place of the paper's."""

    WORDS = ([],)

    def start(self, place: Path, **environment: str) -> Process:
        def fill() -> None:
            from fedda.tasks import config
            from fedda_reproduction import reproduce

            small = dict(word.split("=") for word in SMALL[1:])
            small = {name: int(value) for name, value in small.items()}
            small |= {"model": "linear", "rounds": 12, "checkpoint_every": 1}
            names = ("fedavg", "fedda-sgdm", "scaffold")
            runs = [config.resolve({**small, "algorithm": name}) for name in names]
            filled = reproduce.fill(runs, place)
            assert not filled.failed, filled
            assert not filled.busy, filled

        return Process(fill, self.log(place), environment)

    def left(self, place: Path) -> Any:
        assert [path.name for path in (place / ".work").iterdir()] == [".gitignore"]
        return self.cells(place)

    def check(self, place: Path) -> None:
        for name, history in self.cells(place).items():
            assert history == self.expected[name], f"a round of {name} is lost or doubled"

    def cells(self, place: Path) -> dict[str, Any]:
        """The history of each finished run. To read cells as the library does would start JAX."""
        paths = place.glob("cells/*/*.json*")
        return {path.name: json.loads(path.read_text())["history"] for path in paths}


class Import(Job):
    """`fedda data import --replace`: before and after any kill there is a whole data set."""

    WORDS = ([],)

    def prepare(self) -> None:
        self.tables = []
        for number in range(2):
            rng = np.random.default_rng(number)
            path = self.folder / f"table-{number}.npz"
            client = np.array([f"c{i}" for i in range(50)]).repeat(40)
            np.savez(path, x=rng.normal(size=(2000, 20)), y=rng.integers(0, 3, 2000), client=client)
            self.tables.append(path)
        self.known: dict[bytes, int] = {}

    def start(self, place: Path, **environment: str) -> Process:
        """Replace the data set by the other one."""
        now = self.now(place)
        table = self.tables[0 if now is None else 1 - now]
        words = ["data", "import", "mine", table, "--replace"]
        environment = environment | {"FEDDA_DATA": str(place)}
        return fedda(*words, log=self.log(place), environment=environment)

    def now(self, place: Path) -> int | None:
        """The table that the data set was made from."""
        from fedda.data import store

        if not (place / "mine").exists():
            return None
        store.verify(place / "mine")
        origin = store.open_store(place / "mine").meta["origin"]["path"]
        return self.tables.index(Path(origin))

    def left(self, place: Path) -> Any:
        assert self.now(place) is not None
        return None

    def check(self, place: Path) -> None:
        self.now(place)


class Flower(Job):
    """A Flower server with its clients in one process, which all die together."""

    WORDS = (["fedda-adam"], ["fedavg"])

    def prepare(self) -> None:
        importlib.import_module("helpers.flower_problem")  # before processes are forked

    def start(self, place: Path, **environment: str) -> Process:
        def work() -> None:
            from fedda.flower import serve
            from helpers.flower_problem import grid, settings

            serve(grid(), settings(self.words[0], rounds=12, directory=place))

        return Process(work, self.log(place), environment)

    def left(self, place: Path) -> Any:
        assert (place / "summary.json").exists()
        return rows_of(place), end_of(place)

    def check(self, place: Path) -> None:
        assert self.expected[0].startswith(rows_of(place)), "a round is lost or doubled"


JOBS: dict[str, type[Job]] = {
    "run": Run,
    "directory": Directory,
    "compare": Compare,
    "sweep": Sweep,
    "reproduce": Reproduce,
    "import": Import,
    "flower": Flower,
}


class Jobs:
    """The variants of one kind of work; each is done undisturbed when it is first needed."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.kind = folder, JOBS[name]
        self.made: dict[int, Job] = {}
        os.environ["FEDDA_COMPILE_CACHE"] = str(folder / "programs")

    def draw(self, draw: random.Random) -> Job:
        number = draw.randrange(len(self.kind.WORDS))
        if number not in self.made:
            place = self.folder / f"variant-{number}"
            place.mkdir()
            self.made[number] = self.kind(place, self.kind.WORDS[number])
        return self.made[number]
