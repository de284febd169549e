"""Run directories: what they hold, and that a killed run ends as if it had not been."""

import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
import pytest

from fedda import api, tasks
from fedda.errors import InputError
from fedda.experiments import run as experiment
from fedda.simulate import client_state, train
from fedda.storage import checkpoint
from fedda.storage.checkpoint import Checkpoints
from fedda.tasks import config

SMALL = {
    "algorithm": "fedda-adam",
    "model": "linear",
    "clients": 12,
    "cohort": 3,
    "rounds": 12,
    "eval_every": 2,
    "checkpoint_every": 1,
    "stabilise": 3,
}


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that nothing disturbed."""
    directory = tmp_path_factory.mktemp("runs") / "whole"
    experiment.run(config.resolve(SMALL), directory)
    return directory


@pytest.fixture
def copy(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "copy"))


def final_leaves(directory: Path) -> list[np.ndarray]:
    """Every array of the last checkpoint: parameters, momenta, counters."""
    resolved = config.resolve(config.read(directory / "config.toml"))
    problem = tasks.load(resolved)
    setup, hyper = api.prepare(
        resolved.algorithm, problem.model, problem.shards, problem.loss, **resolved.chosen
    )
    like = train.start(setup, api.traced(hyper, problem.model), [0])
    found, notes = Checkpoints(directory / "checkpoints").newest_whole(like, sys.maxsize)
    assert found is not None
    assert found.round == resolved.rounds
    assert notes == []
    return jax.tree.leaves(found.run)


def assert_same_end(directory: Path, reference: Path) -> None:
    for ours, theirs in zip(final_leaves(directory), final_leaves(reference), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    expected = (reference / "metrics.jsonl").read_bytes()
    assert (directory / "metrics.jsonl").read_bytes() == expected


def test_a_run_directory_says_everything(finished: Path):
    written = tomllib.loads((finished / "config.toml").read_text())
    assert SMALL.items() <= written.items()
    assert written["beta1"] == 0.9, "defaults are written out"
    assert written["units"] == "grad"
    rows = [json.loads(line) for line in (finished / "metrics.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rows] == [0, 2, 4, 6, 8, 10, 12]
    assert list(rows[1])[:4] == ["round", "train_loss", "loss", "accuracy"]
    summary = json.loads((finished / "summary.json").read_text())
    assert summary["final"] == {key: rows[-1][key] for key in ("train_loss", "loss", "accuracy")}
    parameters = 64 * 10 + 10
    assert summary["parameters"] == parameters
    assert summary["bytes_down"] == 12 * 3 * 2 * parameters * 4, "rounds, cohort, W and m, float32"
    assert summary["bytes_up"] == 12 * 3 * (2 * parameters + 1) * 4, "P, m and the weight"
    assert summary["seconds"]["total"] > 0
    assert summary["versions"]["jax"] == jax.__version__
    for key in ("device", "commit", "nonfinite_clients", "skipped_rounds", "seed", "task"):
        assert key in summary


def test_the_last_rounds_are_full_batch(finished: Path, tmp_path: Path):
    experiment.run(config.resolve(SMALL | {"stabilise": 0}), tmp_path / "plain")
    ours, plain = (
        (directory / "metrics.jsonl").read_text().splitlines()
        for directory in (finished, tmp_path / "plain")
    )
    assert ours[:5] == plain[:5], "rounds 0 to 8 come before the switch at round 9"
    assert ours[5] != plain[5]


def start(directory: Path, *arguments: str) -> "subprocess.Popen[bytes]":
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(directory.parent / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return subprocess.Popen(
        [sys.executable, "-m", "fedda.cli.main", "run", "--quiet", *arguments],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
@pytest.mark.usefixtures("in_quick_processes")
def test_kill_at_any_moment_and_resume(tmp_path: Path):
    seed = random.randrange(10**6)
    rng = random.Random(seed)
    print(f"moments drawn with seed {seed}")
    settings = SMALL | {"rounds": 60, "eval_every": 1, "checkpoint_every": rng.choice([1, 3])}
    words = [f"{key}={value}" for key, value in settings.items()]
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert start(whole, *words, "--out", str(whole)).wait() == 0

    arguments, kills = [*words, "--out", str(killed)], 0
    for _ in range(4):
        if (killed / "summary.json").exists():  # a busy machine may kill too late
            break
        process = start(killed, *arguments)
        enough = lines(killed / "metrics.jsonl") + rng.randrange(1, 16)
        while lines(killed / "metrics.jsonl") < enough and process.poll() is None:
            time.sleep(0.002)
        time.sleep(rng.random() * 0.03)  # most of a round is spent writing its checkpoint
        process.send_signal(signal.SIGKILL)
        kills += process.wait() == -signal.SIGKILL
        if (killed / "config.toml").exists():
            arguments = ["--resume", str(killed)]
    assert kills
    assert start(killed, *arguments).wait() == 0
    assert (killed / "summary.json").exists()
    assert_same_end(killed, whole)


def test_resume_of_a_finished_run_changes_nothing(copy: Path, finished: Path):
    summary = (copy / "summary.json").read_bytes()
    outcome = experiment.resume(copy)
    assert outcome.notes == ["continued from round 12"]
    assert_same_end(copy, finished)
    assert (copy / "summary.json").read_bytes() == summary, "it names the versions that did it"


def test_a_damaged_checkpoint_is_passed_over_and_it_is_said(copy: Path, finished: Path):
    damaged = 0
    for path in (copy / "checkpoints" / "12" / "run").rglob("*"):
        if path.is_file() and path.stat().st_size:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
            damaged += 1
    assert damaged > 0
    outcome = experiment.resume(copy)
    assert "passed over the damaged checkpoint of round 12" in outcome.notes[0]
    assert outcome.notes[-1] == "continued from round 10"
    assert_same_end(copy, finished)


def test_a_truncated_metrics_file_goes_back_to_the_checkpoint_that_fits(copy: Path, finished: Path):
    log = copy / "metrics.jsonl"
    log.write_bytes(log.read_bytes()[:-7])
    outcome = experiment.resume(copy)
    assert outcome.notes == [
        "cut metrics.jsonl after its last whole line",
        "passed over the checkpoint of round 12: metrics.jsonl is shorter",
        "continued from round 10",
    ]
    assert_same_end(copy, finished)


def test_without_any_whole_checkpoint_the_run_starts_again(copy: Path, finished: Path):
    shutil.rmtree(copy / "checkpoints")
    assert experiment.resume(copy).notes == ["continued from round 0"]
    assert_same_end(copy, finished)


def test_resume_refuses_another_configuration(copy: Path):
    before = (copy / "metrics.jsonl").read_bytes()
    with pytest.raises(InputError, match=r"is a run with client_lr = 0\.1, got 0\.5"):
        experiment.resume(copy, {"client_lr": 0.5})
    with pytest.raises(InputError, match=r"is a run with rounds = 12, got 13"):
        experiment.resume(copy, {"rounds": 13})
    with pytest.raises(InputError, match=r"is a run with algorithm = 'fedda-adam', got 'fedavg'"):
        experiment.resume(copy, {"algorithm": "fedavg"})
    assert experiment.resume(copy, {"rounds": 12}).notes == ["continued from round 12"]
    assert (copy / "metrics.jsonl").read_bytes() == before


def test_resume_may_keep_checkpoints_at_another_pace(copy: Path, finished: Path):
    shutil.rmtree(copy / "checkpoints")
    experiment.resume(copy, {"checkpoint_every": 2})
    kept = sorted(int(path.name) for path in (copy / "checkpoints").iterdir())
    assert kept == [6, 10, 12], "every second evaluation and the last; 2 is one too many to keep"
    assert_same_end(copy, finished)


def test_resume_refuses_what_is_not_a_run(tmp_path: Path):
    with pytest.raises(InputError, match=r"is not a run directory: it has no config\.toml"):
        experiment.resume(tmp_path)


def test_a_new_run_never_overwrites(finished: Path):
    with pytest.raises(InputError, match=r"is not empty.*--resume"):
        experiment.run(config.resolve(SMALL), finished)


def test_a_kill_in_the_first_moment_is_no_dead_end(tmp_path: Path):
    (tmp_path / ".config.toml.123").touch()
    experiment.run(config.resolve(SMALL | {"rounds": 1, "stabilise": 0}), tmp_path)
    assert (tmp_path / "summary.json").exists()


def test_a_refused_run_leaves_nothing_behind(tmp_path: Path):
    with pytest.raises(InputError, match=r"unknown task 'digit'\. Did you mean digits"):
        experiment.run(config.resolve(SMALL | {"task": "digit"}), tmp_path / "new")
    with pytest.raises(InputError, match="cohort must be at most"):
        experiment.run(config.resolve(SMALL | {"cohort": 13}), tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_diverging_run_is_written_as_null_and_counted(tmp_path: Path):
    wild = {"algorithm": "fedavg", "client_lr": 1e38, "server_lr": 1e38, "stabilise": 0}
    settings = {key: value for key, value in SMALL.items() if key != "algorithm"} | wild
    experiment.run(config.resolve(settings), tmp_path / "wild")
    rows = (tmp_path / "wild" / "metrics.jsonl").read_text()
    assert "NaN" not in rows
    assert "Infinity" not in rows
    summary = json.loads((tmp_path / "wild" / "summary.json").read_text())
    assert summary["nonfinite_clients"] + summary["skipped_rounds"] > 0


@pytest.mark.parametrize("lacking", ["disk", "memory"])
def test_a_checkpoint_that_has_no_room_is_left_out_and_told(tmp_path, monkeypatch, lacking):
    """There is none in the first half of the run; the run goes on, and can be continued."""
    room, much = iter([100, 100, 100]), 10**15
    free = {"disk": lambda: much, "memory": lambda: much} | {lacking: lambda: next(room, much)}
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(
        "fedda.storage.checkpoint.shutil.disk_usage",
        lambda path: usage._replace(free=free["disk"]()),
    )
    monkeypatch.setattr("fedda.storage.checkpoint.free_memory.of_host", lambda: free["memory"]())
    outcome = experiment.run(config.resolve(SMALL), tmp_path / "run")
    assert len(outcome.notes) == 3
    assert outcome.notes[0].startswith("no checkpoint of round 0: it takes ")
    assert outcome.notes[0].endswith(f" GB of {lacking}, and 1e-07 GB are free")
    kept = sorted(int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert kept == [8, 10, 12]
    assert outcome.result.history[-1]["round"] == SMALL["rounds"]


def test_a_checkpoint_takes_no_more_memory_than_is_asked_for(tmp_path, monkeypatch):
    """Of client memory on the host, whose leaves are copies; without room nothing is copied."""
    numbers = np.ones((100, 100_000), np.float32)
    kept = client_state.HostMemory(np.zeros(100_000, np.float32))
    kept.put(np.arange(100), numbers)
    run = {"memory": kept, "steps": np.zeros(3)}
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(0, {"steps": np.zeros(3)}, {})  # what Orbax loads first is no copy

    def most_bytes(number):
        checkpoints.wait()
        tracemalloc.start()
        refused = checkpoints.save(number, run, {})
        checkpoints.wait()
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return most, refused

    most, refused = most_bytes(1)
    assert not refused
    assert kept.nbytes < most < checkpoint.COPIES * kept.nbytes
    monkeypatch.setattr("fedda.storage.checkpoint.free_memory.of_host", lambda: most)
    most, refused = most_bytes(2)
    assert refused
    assert most < numbers.nbytes / 10
    checkpoints.close()


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """As on a full disk, the system refuses to write more, in a way that needs no rights to try."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, usual[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)


def test_a_checkpoint_that_cannot_be_written_is_told_in_one_line(tmp_path, capfd):
    """The run goes on, and no part of the checkpoint is read, nor stays beyond the next start."""
    checkpoints = Checkpoints(tmp_path)
    large = {"w": np.random.default_rng(0).normal(size=(4, 10_000))}
    small = {"w": np.ones(3), "v": np.ones(3)}
    with files_of_at_most(20_000):
        assert checkpoints.save(1, large, {"metrics_bytes": 0}) == []
        told = f"no checkpoint of round 1: cannot write to {tmp_path} (File too large)"
        assert checkpoints.save(2, small, {"metrics_bytes": 0}) == [told]
        assert checkpoints.save(3, large, {"metrics_bytes": 0}) == []
        assert checkpoints.close() == [told.replace("round 1", "round 3")]
    assert capfd.readouterr() == ("", "")
    again = Checkpoints(tmp_path)
    found, notes = again.newest_whole(small, written=0)
    assert (found.round, notes) == (2, [])
    again.close()
    assert [path.name for path in tmp_path.iterdir()] == ["2"]


def test_metrics_that_cannot_be_written_are_named_and_the_run_goes_on_later(tmp_path, finished):
    directory = tmp_path / "run"
    with files_of_at_most(1000), pytest.raises(OSError, match="File too large") as raised:
        experiment.run(config.resolve(SMALL), directory)
    assert raised.value.filename == str(directory / "metrics.jsonl")
    assert (directory / "metrics.jsonl").stat().st_size == 1000, "a part of a line"
    experiment.resume(directory)
    assert_same_end(directory, finished)


def test_the_rest_of_a_killed_save_is_removed_and_never_read(copy: Path, finished: Path):
    unfinished = copy / "checkpoints" / "14.orbax-checkpoint-tmp"
    shutil.copytree(copy / "checkpoints" / "12", unfinished)
    (copy / ".summary.json.123").write_text("{")
    assert experiment.resume(copy).notes == ["continued from round 12"]
    assert not unfinished.exists()
    assert_same_end(copy, finished)
