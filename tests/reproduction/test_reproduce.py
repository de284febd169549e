"""Filling a results folder: every run is made once, whatever happens on the way."""

import json
import os
import shutil
import signal
import time
import types
from concurrent import futures
from pathlib import Path

import jax
import numpy as np
import pytest

from fedda.experiments import run as experiment
from fedda.simulate import grid
from fedda.tasks import config
from fedda_reproduction import reproduce
from fedda_reproduction.paper import cells, training
from fedda_reproduction.paper.experiments import chosen

TINY = {"model": "linear", "clients": 12, "cohort": 3, "rounds": 4, "eval_every": 2}


def tiny(**settings):
    return config.resolve(TINY | settings)


def filled(folder, *runs, **how):
    """What happened to these runs, and what was reported."""
    told: list[str] = []
    outcome = reproduce.fill(runs, folder, report=told.append, warn=told.append, **how)
    return outcome, "\n".join(told)


def outcome_of(made=(), busy=(), stopped=(), late=0):
    return reproduce.Filled([*made], [*busy], [*stopped], {}, late)


def names(folder):
    return sorted(path.stem for path in (folder / "cells").glob("*/*.json"))


def locked(folder, name):
    """The lock of another process."""
    (folder / ".work").mkdir(parents=True, exist_ok=True)
    return reproduce._lock(folder, name)


def same_histories(*folders):
    one, other = ([cell.content["history"] for cell in cells.read_all(f).finished] for f in folders)
    return one == other


# ------------------------------------------------------------------------------------- together


def test_runs_of_one_program_are_trained_together_to_the_same_numbers(tmp_path):
    runs = [tiny(client_lr=rate, seed=seed) for rate in (0.1, 0.2) for seed in (0, 1)]
    outcome, told = filled(tmp_path / "together", *runs)
    assert len(outcome.made) == 4
    assert "digits fedda-sgdm, 4 together (seed 0, 1; client_lr 0.1, 0.2): round 4/4" in told
    for run in runs:
        filled(tmp_path / "alone", run)
    assert names(tmp_path / "alone") == names(tmp_path / "together")
    for one, other in zip(
        *(cells.read_all(tmp_path / each).finished for each in ("alone", "together")), strict=True
    ):
        assert one.content.keys() - {"processes"} == other.content.keys() - {"together"}
        for name, values in one.content["history"].items():
            ours = np.array(other.content["history"][name], float)
            np.testing.assert_allclose(ours, np.array(values, float), rtol=2e-4, atol=1e-5)
        for name in ("bytes_up", "bytes_down", "parameters", "config", "data", "clients"):
            assert one.content[name] == other.content[name]


def test_what_is_not_one_program_is_trained_alone(tmp_path, monkeypatch):
    runs = [tiny(), tiny(rounds=6), tiny(algorithm="fedavg"), tiny(local_work=3)]
    monkeypatch.setattr(training, "train_together", None)
    assert len(filled(tmp_path, *runs)[0].made) == 4
    monkeypatch.setattr(training, "SMALL", 1)
    assert len(filled(tmp_path, tiny(seed=1), tiny(seed=2))[0].made) == 2, "a model that is large"


# ------------------------------------------------------------------------------------- damage


def test_a_damaged_cell_is_named_and_made_again(tmp_path):
    runs = [tiny(), tiny(algorithm="fedavg")]
    filled(tmp_path, *runs)
    path, other = (cells.path(tmp_path, run, None) for run in runs)
    whole, untouched = json.loads(path.read_text()), other.stat().st_mtime_ns
    path.write_text(path.read_text()[:300])
    outcome, told = filled(tmp_path, *runs)
    assert outcome.made == [path.stem]
    assert f"{path} is not whole" in told
    assert json.loads(path.read_text())["history"] == whole["history"]
    (aside,) = path.parent.glob("*.damaged-*")
    assert len(aside.read_text()) == 300
    assert f"it is set aside as {aside.name}, and the run is made again" in told
    assert other.stat().st_mtime_ns == untouched
    assert filled(tmp_path, *runs)[0].made == []


def test_a_folder_in_the_place_of_a_cell_is_named_and_made_again(tmp_path):
    """Also if what was set aside before is still there."""
    path = cells.path(tmp_path, tiny(), None)
    for number in (1, 2):
        path.mkdir(parents=True)
        (path / "file").write_text("")
        outcome, told = filled(tmp_path, tiny())
        assert outcome.made == [path.stem]
        assert f"{path} is not whole: [Errno 21] Is a directory" in told
        assert len(list(path.parent.glob("*.damaged-*/file"))) == number
        path.unlink()


def test_a_cell_under_a_wrong_name_is_named_and_made_again(tmp_path):
    filled(tmp_path, tiny())
    path, wrong = (cells.path(tmp_path, tiny(seed=seed), None) for seed in (0, 5))
    os.replace(path, wrong)
    outcome, told = filled(tmp_path, tiny(), tiny(seed=5))
    assert sorted(outcome.made) == sorted([path.stem, wrong.stem])
    assert "is the result of another configuration than its name says" in told


# ------------------------------------------------------------------------------------- locks


def test_what_another_process_is_working_on_is_left_to_it(tmp_path):
    with locked(tmp_path, cells.name(tiny(), None)):
        outcome, _ = filled(tmp_path, tiny(), tiny(algorithm="fedavg"))
        assert (len(outcome.busy), len(outcome.made)) == (1, 1)
    assert len(filled(tmp_path, tiny())[0].made) == 1


def test_what_another_process_finishes_meanwhile_is_not_made_again(tmp_path, monkeypatch):
    """After the folder was read, and before the run is locked."""
    batch = reproduce._batch

    def finished_meanwhile(job, *rest):
        monkeypatch.undo()
        filled(tmp_path, tiny())
        return batch(job, *rest)

    monkeypatch.setattr(reproduce, "_batch", finished_meanwhile)
    assert filled(tmp_path, tiny())[0] == outcome_of()
    assert len(names(tmp_path)) == 1


def test_a_run_that_cannot_be_made_does_not_stop_the_others(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDDA_DATA", str(tmp_path / "none"))
    outcome, told = filled(tmp_path, tiny(cohort=99), tiny(task="emnist", model="cnn"), tiny())
    assert len(outcome.made) == 1
    of_data, of_cohort = outcome.failed.values()
    assert "cohort must be at most the number of clients" in of_cohort
    assert "the data set emnist" in of_data
    assert of_data in told, "at once, too"


# ------------------------------------------------------------------------------------- time


@pytest.fixture
def clock(monkeypatch):
    """Time that stands still: a line that is reported takes a second."""
    now = types.SimpleNamespace(seconds=0.0, monotonic=lambda: now.seconds, time_ns=time.time_ns)
    monkeypatch.setattr(reproduce, "time", now)
    return now


def fill_by(clock, folder, *runs, seconds):
    told: list[str] = []

    def report_in_a_second(line):
        told.append(line)
        clock.seconds += 1

    outcome = reproduce.fill(runs, folder, seconds, report_in_a_second, told.append)
    return outcome, "\n".join(told)


def test_a_run_is_stopped_when_the_time_is_over_and_goes_on_to_the_same_numbers(tmp_path, clock):
    run, name = tiny(rounds=8), cells.name(tiny(rounds=8), None)
    outcome, told = fill_by(clock, tmp_path, run, tiny(algorithm="fedavg"), seconds=2.5)
    assert outcome == outcome_of(stopped=[name], late=1)
    assert "round 4/8" in told
    assert "round 6/8" not in told
    assert names(tmp_path) == []
    with locked(tmp_path, name):  # others may go on with it
        pass
    outcome, told = fill_by(clock, tmp_path, run, seconds=0.5)
    assert outcome.stopped == [name]
    assert "round 6/8" in told
    assert "round 4/8" not in told, "nothing is done again"
    outcome, told = fill_by(clock, tmp_path, run, seconds=0.5)
    assert outcome.made == [name], "what has come to its end is not stopped"
    filled(tmp_path / "whole", run)
    assert names(tmp_path) == names(tmp_path / "whole")
    assert same_histories(tmp_path, tmp_path / "whole")


@pytest.mark.parametrize("damage", [Path.unlink, Path.touch, lambda path: path.write_text("[")])
def test_what_is_kept_of_no_such_run_is_not_taken_for_it(tmp_path, clock, damage):
    """Nor deleted: whoever has read the message may delete it."""
    run = tiny(algorithm="fedavg")
    fill_by(clock, tmp_path, run, seconds=1.5)
    (written,) = (tmp_path / ".work").glob("fedavg-*/config.toml")
    written.write_text("")
    damage(written)
    before = sorted((tmp_path / ".work").rglob("*"))
    (why,) = filled(tmp_path, run)[0].failed.values()
    assert str(written.parent) in why
    assert sorted((tmp_path / ".work").rglob("*")) == before
    shutil.rmtree(written.parent)
    assert len(filled(tmp_path, run)[0].made) == 1
    filled(tmp_path / "whole", run)
    assert same_histories(tmp_path, tmp_path / "whole")


def test_a_run_that_began_without_a_time_is_stopped_without_loss_too(tmp_path, clock):
    def interrupted(line):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # at round 0, of which no checkpoint is kept
        reproduce.fill([tiny()], tmp_path, report=interrupted)
    for number in (0, 2, 4):
        outcome, told = fill_by(clock, tmp_path, tiny(), seconds=0.5)
        assert f"round {number}/4" in told
    assert outcome.made == [cells.name(tiny(), None)]


@pytest.mark.parametrize("seconds", [0, -3])
def test_nothing_is_begun_when_the_time_is_over(tmp_path, clock, monkeypatch, seconds):
    filled(tmp_path, tiny())
    monkeypatch.setattr(reproduce.tasks, "load", None)  # not even data are read
    runs = tiny(), tiny(seed=1), tiny(algorithm="fedavg")
    outcome, told = fill_by(clock, tmp_path, *runs, seconds=seconds)
    assert outcome == outcome_of(late=2), "one is there"
    assert told == ""


def test_all_that_is_left_is_begun_while_there_is_time(tmp_path, clock):
    filled(tmp_path, tiny())
    runs = tiny(seed=1), tiny(algorithm="fedavg"), tiny(algorithm="fedprox")
    # A run reports rounds 0, 2 and 4 and its end: the second ends, and the third does not begin.
    outcome, _ = fill_by(clock, tmp_path, *runs, seconds=8)
    assert outcome == outcome_of(made=[cells.name(run, None) for run in runs[:2]], late=1)


def test_of_runs_together_those_that_came_to_their_end_are_made(tmp_path, clock, monkeypatch):
    """Of four in two batches, as if no more fitted in memory, the time suffices for the first."""
    train_grid = training.api.train_grid
    monkeypatch.setattr(
        training.api,
        "train_grid",
        lambda setup, hypers, seeds, together, **more: train_grid(setup, hypers, seeds, 2, **more),
    )
    runs = [tiny(seed=seed) for seed in range(4)]
    every = [cells.name(run, None) for run in runs]
    outcome, told = fill_by(clock, tmp_path, *runs, tiny(algorithm="fedavg"), seconds=4.5)
    assert outcome == outcome_of(made=every[:2], stopped=every[2:], late=1)
    assert "seed 1: accuracy" in told
    assert names(tmp_path) == sorted(every[:2])
    outcome, told = fill_by(clock, tmp_path, *runs, seconds=9)
    assert outcome == outcome_of(made=every[2:])
    assert "2 together (seed 2, 3): continued from round 2" in told


def test_runs_together_are_stopped_and_go_on_to_the_same_numbers(tmp_path, clock):
    """Though one of them does not stay finite."""
    rates = (0.1, 0.2, 1e30)
    runs = [tiny(rounds=8, algorithm="scaffold", client_lr=rate) for rate in rates]
    every = [cells.name(run, None) for run in runs]
    outcome, told = fill_by(clock, tmp_path, *runs, seconds=2.5)
    assert outcome == outcome_of(stopped=every)
    assert "digits scaffold, 3 together (client_lr 0.1, 0.2, 1e+30): round 4/8" in told
    assert "round 6/8" not in told
    assert names(tmp_path) == []
    outcome, told = fill_by(clock, tmp_path, *runs, seconds=1.5)
    assert outcome.stopped == every
    assert "3 together (client_lr 0.1, 0.2, 1e+30): continued from round 4" in told
    assert "round 4/8" not in told, "nothing is done again"
    outcome, told = fill_by(clock, tmp_path, *runs, seconds=9)
    assert outcome.made == every
    filled(tmp_path / "whole", *runs)
    assert same_histories(tmp_path, tmp_path / "whole")
    assert {cell.content["together"] for cell in cells.read_all(tmp_path).finished} == {3}
    assert [path.name for path in (tmp_path / ".work").iterdir()] == [".gitignore"]


def test_what_was_stopped_together_goes_on_together_whatever_else_is_asked_for(tmp_path, clock):
    """And whoever else is at work: one process takes all of it, or nothing."""
    runs = [tiny(seed=seed) for seed in range(4)]
    every = [cells.name(run, None) for run in runs]
    fill_by(clock, tmp_path, *runs[1:3], seconds=1.5)
    with locked(tmp_path, every[1]):
        outcome, told = fill_by(clock, tmp_path, *runs[:3], seconds=99)
        assert outcome == outcome_of(made=every[:1], busy=every[1:3])
    outcome, told = fill_by(clock, tmp_path, runs[3], runs[2], runs[1], seconds=99)
    assert outcome.made == [every[3], *every[1:3]]
    assert "2 together (seed 1, 2): continued from round 2" in told
    filled(tmp_path / "whole", *runs[1:3])
    for run in runs[1:3]:
        one, other = (
            cells.read(cells.path(folder, run, None)).content["history"]
            for folder in (tmp_path, tmp_path / "whole")
        )
        assert one == other


@pytest.mark.parametrize("rooms", [(1e9, 1.0), (1.0, 1e9)])
def test_what_was_stopped_goes_on_with_another_room_in_memory(tmp_path, clock, monkeypatch, rooms):
    """All four together or, in a byte, one after the other."""
    runs = [tiny(seed=seed) for seed in range(4)]
    told = ""
    for room, seconds in zip(rooms, (1.5, 99), strict=True):
        monkeypatch.setattr(grid, "CPU_ROOM", room)
        outcome, told = fill_by(clock, tmp_path, *runs, seconds=seconds)
    assert len(outcome.made) == 4
    assert "continued from round 2" in told
    assert told.count("round 0/4") == (rooms[0] == 1.0), "the other three, together"


def test_a_batch_is_kept_as_it_goes_on_and_only_its_own_members_continue_it(tmp_path, monkeypatch):
    runs = [tiny(seed=seed, rounds=8) for seed in range(3)]
    monkeypatch.setattr(training, "SECONDS", 0.0)
    monkeypatch.setattr(training, "BYTES_PER_SECOND", np.inf)

    def interrupted(line):
        if "round 6/8" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reproduce.fill(runs, tmp_path, report=interrupted)
    (kept,) = (tmp_path / ".work").glob("together-*")
    assert config.read(kept / "config.toml") == {"members": [cells.name(run, None) for run in runs]}
    _, told = filled(tmp_path / "elsewhere", *runs)
    assert "continued" not in told
    shutil.copytree(kept, tmp_path / "damaged/.work" / kept.name)
    for path in (tmp_path / "damaged/.work").rglob("round-*"):
        path.write_bytes(b"")
    outcome, told = filled(tmp_path / "damaged", *runs)
    assert outcome.made == []
    assert all("is damaged" in why for why in outcome.failed.values())
    assert "continued" not in told
    outcome, told = filled(tmp_path, *runs[:2])
    assert len(outcome.made) == 2
    assert "continued" not in told, "it is another program"
    assert kept.exists(), "one of them is not done"
    filled(tmp_path, runs[2])
    assert not kept.exists()


def test_signals_are_left_alone_after_runs_together_and_beside_the_main_thread(tmp_path):
    """Only the main thread may set what is done about them."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with futures.ThreadPoolExecutor(1) as pool:
        made = pool.submit(filled, tmp_path / "thread", tiny(), tiny(seed=1)).result()[0].made
    assert len(made) == len(filled(tmp_path / "here", tiny(), tiny(seed=1))[0].made) == 2
    assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


# ------------------------------------------------------------------------------- configurations


@pytest.mark.parametrize(
    ("free", "host_rounds", "room"),
    [(100e9, None, 75.0), (100e9, 7, 4.0), (2e9, None, 4.0), (None, None, 4.0)],
)
def test_client_memory_may_fill_most_of_an_accelerator(monkeypatch, free, host_rounds, room):
    """If all of it then fits: what is fetched from the host needs the room twice."""
    setup = types.SimpleNamespace(host_rounds=host_rounds)
    monkeypatch.setattr(experiment, "prepare", lambda config: (None, setup, None))
    stats = free and {"bytes_limit": free + 1e9, "bytes_in_use": 1e9}
    device = types.SimpleNamespace(platform="gpu", memory_stats=lambda: stats)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    run = training.with_memory(tiny())
    assert run.memory_gb == room
    assert cells.key(run) == cells.key(tiny())


def test_what_is_there_in_another_precision_is_not_made_again(tmp_path):
    """Nor are more seeds of it made in the usual one, unless that is asked for."""
    digits = chosen(["digits"], ["fedavg"])
    filled(tmp_path, *reproduce.wanted(digits, 1, 2, "bf16"))
    there = cells.read_all(tmp_path).finished
    assert [run.precision for run in reproduce.wanted(digits, 2, 2, None, there)] == ["bf16"] * 2
    assert reproduce.missing(reproduce.wanted(digits, 1, 2, None, there), there) == 0
    assert [run.precision for run in reproduce.wanted(digits, 1, 2, "tf32", there)] == ["tf32"]
    assert [run.precision for run in reproduce.wanted(digits, 1, 3, None, there)] == ["tf32"]
