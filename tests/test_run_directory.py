"""`fedda.run` with a directory: killed or damaged, it ends exact or says why it cannot."""

import dataclasses
import errno
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedda
from fedda.errors import InputError
from fedda.storage import files
from helpers.kills import killed_after

RNG = np.random.default_rng(0)
CLIENTS = [(RNG.normal(size=(n, 3)), RNG.normal(size=(n, 2))) for n in (4, 7, 2, 5, 6)]
TEST = (RNG.normal(size=(9, 3)), RNG.normal(size=(9, 2)))
MODEL = fedda.Model(
    lambda key: {"w": jax.random.normal(key, (3, 2))},
    lambda params, x: x @ params["w"],
)
SETTINGS: dict[str, Any] = {
    "rounds": 12,
    "eval_every": 2,
    "checkpoint_every": 2,
    "cohort": 2,
    "batch": 2,
    "stabilise": 3,
    "test": TEST,
}


def run(directory: Path | None, algorithm: str = "scaffold", **settings: Any) -> fedda.Result:
    given = SETTINGS | {"directory": directory} | settings
    return fedda.run(
        algorithm, given.pop("model", MODEL), CLIENTS, fedda.losses.squared_error, **given
    )


def content(directory: Path) -> dict[str, bytes]:
    """Every file of a directory but the lock."""
    return {
        str(path.relative_to(directory)): path.read_bytes()
        for path in sorted(directory.rglob("*"))
        if path.is_file() and path.name != files.LOCK
    }


def assert_same(ours: fedda.Result, theirs: fedda.Result) -> None:
    """The same bits, also of what clients keep, and the same history."""
    assert jax.tree.structure(ours.state) == jax.tree.structure(theirs.state)
    for one, other in zip(
        jax.tree.leaves((ours.state, ours.memory)),
        jax.tree.leaves((theirs.state, theirs.memory)),
        strict=True,
    ):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    assert str(ours.history) == str(theirs.history)


def assert_same_files(ours: Path, theirs: Path) -> None:
    """The same bytes, but for the times in the checkpoints and the summary.

    A process that is killed before it deletes an old checkpoint leaves it.
    """
    one, other = content(ours), content(theirs)
    assert one.keys() >= other.keys()
    assert all(re.fullmatch(r"checkpoints/round-\d+", name) for name in one.keys() - other.keys())
    for name in ("config.toml", "metrics.jsonl"):
        assert one[name] == other[name]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, fedda.Result]:
    """The directory of a run that nothing disturbed, and its result."""
    directory = tmp_path_factory.mktemp("runs") / "whole"
    return directory, run(directory)


def stop_at(number: int) -> Any:
    def stop(row: dict[str, Any]) -> None:
        if row["round"] == number:
            raise KeyboardInterrupt

    return stop


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """The directory of a run that was stopped after round 8, with checkpoints of rounds 2 and 6."""
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "stopped", on_evaluation=stop_at(8))
    assert set(content(tmp_path / "stopped")) == {
        *("config.toml", "metrics.jsonl", "checkpoints/round-2", "checkpoints/round-6")
    }
    return tmp_path / "stopped"


# ------------------------------------------------------------------------------------- continued


@pytest.mark.parametrize("algorithm", ["scaffold", "fedda-adam"])
def test_a_directory_changes_no_number(algorithm: str, tmp_path: Path):
    assert_same(run(tmp_path / "run", algorithm), run(None, algorithm))


def test_an_interrupted_run_continues_and_a_finished_one_is_read_back(stopped: Path, whole, caplog):
    rounds: list[int] = []
    with caplog.at_level(logging.INFO, "fedda"):
        result = run(stopped, on_evaluation=lambda row: rounds.append(row["round"]))
    assert caplog.messages == [f"{stopped}: continued from round 6"]
    assert rounds == [8, 10, 12], "rows that were read back are not reported again"
    assert_same(result, whole[1])
    assert_same_files(stopped, whole[0])
    before = content(stopped)
    assert_same(run(stopped, on_evaluation=lambda row: pytest.fail("nothing is left")), whole[1])
    assert content(stopped) == before


def test_a_run_that_its_callback_ended_stays_ended(tmp_path: Path):
    def end(row: dict[str, Any]) -> bool:
        return row["round"] == 6

    result = run(tmp_path, on_evaluation=end)
    assert result.history[-1]["round"] == 6
    assert_same(run(tmp_path, on_evaluation=lambda row: pytest.fail("it has ended")), result)


def test_an_extended_run_is_kept_too(tmp_path: Path):
    first = run(None, rounds=6, stabilise=0)
    both = run(None, rounds=6, start=first)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, rounds=6, start=first, on_evaluation=stop_at(10))
    assert_same(run(tmp_path, rounds=6, start=first), both)
    assert_same(run(tmp_path, rounds=6, start=first), both)
    with pytest.raises(InputError, match=r"is a run with start = '.*', got None"):
        run(tmp_path, rounds=6)
    other = dataclasses.replace(first, state=jax.tree.map(lambda leaf: leaf + 1, first.state))
    with pytest.raises(InputError, match="is a run with start = "):
        run(tmp_path, rounds=6, start=other)


def test_memory_on_the_host_and_random_keys_are_kept(tmp_path: Path):
    class Keyed(NamedTuple):
        params: Any
        control: Any
        weight: Any
        uploads: Any
        key: Any

    usual = fedda.algorithms.get("scaffold")

    def init(hp: Any, params: Any) -> Keyed:
        return Keyed(*usual.init(hp, params), key=jax.random.key(3, impl="rbg"))

    def merge(hp: Any, state: Any, total: Any) -> Any:
        after = usual.phases[0].merge(hp, type(usual.init(hp, state.params))(*state[:-1]), total)
        return Keyed(*after, key=jax.random.split(state.key)[0])

    phases = (usual.phases[0]._replace(merge=merge),)
    record = usual._replace(init=init, phases=phases)
    settings = {"algorithm": record, "memory_gb": 1e-9}
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, **settings, on_evaluation=stop_at(8))
    ours, theirs = run(tmp_path, **settings), run(None, **settings)
    assert ours.state.key.dtype == theirs.state.key.dtype
    keys = [jax.random.key_data(each.state.key) for each in (ours, theirs)]
    ours, theirs = (
        dataclasses.replace(each, state=each.state._replace(key=key))
        for each, key in zip((ours, theirs), keys, strict=True)
    )
    assert_same(ours, theirs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_models_of_half_precision_are_kept(dtype: str, tmp_path: Path):
    model = fedda.Model(
        lambda key: {"w": jax.random.normal(key, (3, 2), dtype)},
        lambda params, x: x @ params["w"].astype("float32"),
    )
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, model=model, on_evaluation=stop_at(8))
    result = run(tmp_path, model=model)
    assert result.params["w"].dtype == dtype
    assert_same(result, run(None, model=model))


# ----------------------------------------------------------------------------------------- killed


def test_every_change_of_a_directory_reaches_the_disk(tmp_path: Path):
    """A file before it gets its name, and the entries of a directory after they changed."""
    with killed_after(None) as operations:
        run(tmp_path / "new" / "run")
    assert operations.count > 50
    for place, (name, path) in enumerate(operations.events):
        later = operations.events[place + 1 :]
        if name == "replace":
            assert ("fsync", path) in operations.events[:place], "the content of the file"
        if name == "replace" and "round-" in path:
            folder = Path(path).parent
            here = [event for event in later if folder in (Path(event[1]), Path(event[1]).parent)]
            assert here[0] == ("fsync", str(folder)), "before older checkpoints are deleted"
        if name in ("replace", "mkdir", "unlink"):
            assert ("fsync", str(Path(path).parent)) in later, (name, path)


@pytest.mark.parametrize("many", [20, pytest.param(100, marks=pytest.mark.slow)])
def test_a_run_that_is_killed_anywhere_ends_as_if_it_was_not(many: int, whole, tmp_path: Path):
    """Killed up to three times, within any operation on any file; then it is run to its end."""
    draw = random.Random(seed := random.randrange(10**6))
    print(f"moments drawn with seed {seed}")
    with killed_after(None) as operations:
        run(tmp_path / "counted")
    kills = 0
    while kills < many:
        kills += kill_and_finish(tmp_path / "killed", operations.count, draw, whole)


def kill_and_finish(directory: Path, count: int, draw: random.Random, whole: Any) -> int:
    """Kill a run up to three times, run it to its end and compare it; return how many kills."""
    kills = 0
    for _ in range(draw.randint(1, 3)):
        with killed_after(draw.randrange(count), draw.random()):
            run(directory)
            continue  # a run that was nearly done has little to do
        kills += 1
    assert_same(run(directory), whole[1])
    assert_same_files(directory, whole[0])
    shutil.rmtree(directory)
    return kills


JOB = """
import sys
sys.path.insert(0, {tests!r})
import jax
jax.config.update("jax_compilation_cache_dir", {cache!r})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
import test_run_directory
print("begun", flush=True)
directory = test_run_directory.Path({directory!r})
test_run_directory.run(directory, rounds=60, eval_every=1, checkpoint_every={every})
"""


def process(directory: Path, every: int) -> "subprocess.Popen[str]":
    cache = str(directory.parent / "cache")
    code = JOB.format(
        tests=str(Path(__file__).parent), cache=cache, directory=str(directory), every=every
    )
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
@pytest.mark.usefixtures("in_quick_processes")
def test_a_process_that_is_killed_at_any_time_and_started_again(tmp_path: Path):
    draw = random.Random(seed := random.randrange(10**6))
    print(f"moments drawn with seed {seed}")
    every = draw.choice([1, 3])
    directory = tmp_path / "killed"
    whole = process(tmp_path / "whole", every)
    whole.communicate(timeout=600)
    assert whole.returncode == 0
    killed, kills = 0, 8
    for _ in range(kills):
        job = process(directory, every)
        assert job.stdout is not None
        job.stdout.readline()
        enough, log = draw.randrange(1, 60 // kills), directory / "metrics.jsonl"
        enough += log.read_bytes().count(b"\n") if log.exists() else 0
        while job.poll() is None and not (log.exists() and log.read_bytes().count(b"\n") > enough):
            time.sleep(0.001)
        time.sleep(draw.random() * 0.005)
        job.send_signal(signal.SIGKILL)
        job.communicate()
        killed += job.returncode == -signal.SIGKILL
    assert killed
    last = process(directory, every)
    last.communicate(timeout=600)
    assert last.returncode == 0
    assert_same_files(directory, tmp_path / "whole")
    ends = [
        content(path)["checkpoints/round-60"].partition(b"\n")[2][:-32]
        for path in (directory, tmp_path / "whole")
    ]
    assert ends[0] == ends[1]


# ------------------------------------------------------------------------------------ two writers


def test_a_second_writer_is_refused_and_the_first_is_exact(whole, tmp_path: Path):
    refused = []

    def again(row: dict[str, Any]) -> None:
        with pytest.raises(InputError, match=f"is in use by process {os.getpid()} on ") as error:
            run(tmp_path)
        refused.append(str(error.value))

    assert_same(run(tmp_path, on_evaluation=again), whole[1])
    assert_same_files(tmp_path, whole[0])
    assert len(refused) == 7
    assert "stop it; then run the same command again. Or choose another directory." in refused[0]


def test_a_refused_run_leaves_nothing_behind(tmp_path: Path):
    with pytest.raises(InputError, match="cohort must be at most"):
        run(tmp_path / "new", cohort=9)
    with pytest.raises(InputError, match="start must be the result"):
        run(tmp_path / "new", start=3)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"is not empty\. Choose another directory"):
        run(tmp_path)
    with pytest.raises(InputError, match=r"is a file\. Choose another directory"):
        run(tmp_path / "notes.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


# ----------------------------------------------------------------------------------- another run


def refused(directory: Path, message: str, **changes: Any) -> None:
    """The run is refused with this message, and every file is left as it was."""
    before = content(directory)
    with pytest.raises(InputError, match=message):
        run(directory, **changes)
    assert content(directory) == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rounds": 11}, "is a run with rounds = 12, got 11. A resumed run keeps its settings"),
        ({"rounds": 13}, "with stabilise = 3, which counts from the last round, got rounds = 13."),
        ({"client_lr": 0.5}, r"is a run with client_lr = 0\.1, got 0\.5"),
        ({"seed": 1}, "is a run with seed = 0, got 1"),
        ({"algorithm": "fedavg"}, "is a run with algorithm = 'scaffold', got 'fedavg'"),
        ({"control": "I"}, "is a run with control = 'II', got 'I'"),
        ({"test": None}, "is a run with test = '.*', got None"),
        ({"test": (TEST[0] + 1, TEST[1])}, "is a run with test = "),
        ({"metrics": [fedda.losses.squared_error]}, "is a run with metrics = "),
        (
            {"model": MODEL._replace(init=lambda key: {"v": jnp.zeros((3, 2))})},
            r"is a run with model = \[\"\['w'\] float32\[3, 2\]\"\], got",
        ),
    ],
)
def test_a_directory_of_another_run_is_refused(stopped: Path, changes, message: str):
    if "model" in changes:
        changes["model"] = changes["model"]._replace(apply=lambda params, x: x @ params["v"])
    refused(stopped, message, **changes)


def test_other_examples_are_another_run(stopped: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.modules[__name__], "CLIENTS", [(x, y + 1) for x, y in CLIENTS])
    refused(stopped, "is a run with data = ")


def test_what_changes_no_number_may_change(stopped: Path, whole):
    assert_same(run(stopped, checkpoint_every=1), whole[1])


def test_another_default_type_of_jax_is_refused(stopped: Path, x64: None):
    refused(stopped, r"is a run with model = .*float32.*, got .*float64")


def test_an_error_of_the_disk_leaves_everything(stopped: Path, whole, monkeypatch):
    def fail(path: Path) -> bytes:
        raise OSError(errno.EIO, "Input/output error", str(path))

    before = content(stopped)
    monkeypatch.setattr("fedda.storage.checkpoint.read", fail)
    with pytest.raises(OSError, match="Input/output error"):
        run(stopped)
    assert content(stopped) == before
    monkeypatch.undo()
    assert_same(run(stopped), whole[1])


# --------------------------------------------------------------------------------------- damaged


def damage(path: Path, other: Path, draw: random.Random) -> str:
    """Damage a file in one of many ways; returns which."""
    before = path.read_bytes()
    place, length = draw.randrange(len(before)), draw.choice([1, 16, 512])
    flipped = bytes([before[place] ^ 1 << draw.randrange(8)])
    zeros = bytes(min(length, len(before) - place))
    ways = {
        "flipped bit": before[:place] + flipped + before[place + 1 :],
        "cut": before[:place],
        "zeros": before[:place] + zeros + before[place + len(zeros) :],
        "appended": before + draw.randbytes(length),
        "removed part": before[:place] + before[place + length :],
        "of another run": other.read_bytes(),
    }
    way = draw.choice([name for name, after in ways.items() if after != before])
    path.write_bytes(ways[way])
    return way


def run_or_refusal(directory: Path) -> fedda.Result | InputError:
    try:
        return run(directory)
    except InputError as error:
        return error


@pytest.mark.parametrize("many", [30, pytest.param(200, marks=pytest.mark.slow)])
def test_damage_is_refused_or_harmless_and_nothing_is_deleted(many, whole, stopped, tmp_path):
    """Whatever is refused goes on if the file that the message names is restored or deleted."""
    draw = random.Random(seed := random.randrange(10**6))
    print(f"damage drawn with seed {seed}")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "other", seed=1, on_evaluation=stop_at(8))
    intact, outcomes = content(stopped), Counter[str]()
    for number in range(many):
        directory = Path(shutil.copytree(stopped, tmp_path / str(number)))
        name = draw.choice(list(intact))
        way = damage(directory / name, tmp_path / "other" / name, draw)
        before = content(directory)
        error, outcome = run_or_refusal(directory), "harmless"
        while isinstance(error, InputError):
            outcome = "refused"
            assert content(directory) == before, (name, way)
            assert str(directory / name) in str(error) or name == "config.toml", (name, way)
            if "elete" in str(error):  # as the message says
                sorted(directory.glob("checkpoints/round-*"))[-1].unlink()
            else:
                (directory / name).write_bytes(intact[name])
            before = content(directory)
            error = run_or_refusal(directory)
        outcomes[f"{name} {outcome}"] += 1
        assert_same(error, whole[1])
        assert_same_files(directory, whole[0])
        shutil.rmtree(directory)
    assert not outcomes["config.toml harmless"]
    assert not outcomes["checkpoints/round-6 harmless"]
    assert not outcomes["checkpoints/round-2 refused"], "it is not needed"
    assert sum(outcomes.values()) == many


@pytest.mark.parametrize("before", [12, 11, 3, 1])
def test_a_run_with_more_rounds_is_one_that_had_them_from_the_start(tmp_path: Path, before: int):
    """Also where the old last round was no multiple of eval_every, and had a row of its own."""
    longer = {"rounds": 20, "stabilise": 0}
    whole = run(tmp_path / "whole", **longer)
    run(tmp_path / "grown", **longer | {"rounds": before})
    grown = run(tmp_path / "grown", **longer)
    assert grown.history[-1]["round"] == 20
    assert_same(grown, whole)
    for name in ("metrics.jsonl", "config.toml"):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "grown" / name).read_bytes()
    assert run(tmp_path / "grown", **longer).history == grown.history, "it is read back"
    with pytest.raises(InputError, match="is a run with rounds = 20, got 12"):
        run(tmp_path / "grown", **longer | {"rounds": 12})


def test_an_interrupted_extension_continues(tmp_path: Path):
    longer = {"rounds": 20, "stabilise": 0}
    whole = run(tmp_path / "whole", **longer)
    run(tmp_path / "grown", **longer | {"rounds": 12})

    def stop(row: dict[str, Any]) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "grown", **longer, on_evaluation=stop)
    assert not (tmp_path / "grown" / "summary.json").exists(), "that of 12 rounds is gone"
    grown = run(tmp_path / "grown", **longer)
    assert grown.history[1:] == whole.history[1:]
    assert (tmp_path / "grown" / "summary.json").exists()
