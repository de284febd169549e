"""`fedda reproduce`: filling a folder with runs, once each, whatever happens on the way."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from concurrent import futures
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from fedda.errors import InputError
from fedda.experiments import run as experiment
from fedda.simulate import grid, train
from fedda.tasks import config
from fedda_reproduction import reproduce
from fedda_reproduction.paper import batches, cells, choice, experiments, locks, tables, training

TINY = {"model": "linear", "clients": 12, "cohort": 3, "rounds": 4, "eval_every": 2}


def tiny(**settings):
    return config.resolve(TINY | settings)


def filled(folder, *runs, **how):
    """What became of these runs, and what was told of them."""
    told: list[str] = []
    outcome = reproduce.fill(runs, folder, tell=told.append, warn=told.append, **how)
    return outcome, "\n".join(told)


def names(folder):
    return sorted(path.stem for path in (folder / "cells").glob("*/*.json"))


@pytest.fixture
def fedda(fedda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """`fedda reproduce`, where there are no data."""
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("FEDDA_DATA", str(tmp_path / "data"))
    return partial(fedda, "reproduce")


# ------------------------------------------------------------------------------------- the command


def test_it_lists_the_experiments(fedda, tmp_path):
    code, out, _ = fedda("--list")
    assert code == 0
    for name in experiments.experiments():
        assert re.search(rf"^ +{name} .* 0 *$", out, re.MULTILINE), name
    assert list(tmp_path.iterdir()) == [], "to look leaves nothing behind"


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (("table3", "digits"), ["table3", "digits"]),
        (("all",), list(experiments.experiments())),
        (("table3", "digits", "--only", "digits"), ["digits"]),
        (("table3", "digits", "--only", "digits, fedavg"), ["digits"]),
    ],
)
def test_the_list_is_of_what_is_named(fedda, words, names):
    code, out, _ = fedda("--list", *words)
    assert code == 0
    listed = re.findall(r"^ +(\S+) .* \d+ +0 *$", out, re.MULTILINE)
    assert listed == names


def test_the_list_counts_the_runs_of_the_rounds_asked_for(fedda, tmp_path):
    values = {"rounds": 2, "algorithm": "fedavg"}
    experiment.run(config.resolve(values), tmp_path / "run")
    fedda("--add", "run")
    for words, done in ((("--rounds", "2"), 1), (("--rounds", "3"), 0), ((), 0)):
        code, out, _ = fedda("--list", *words)
        assert code == 0
        assert re.search(rf"^ +digits .* {done} *$", out, re.MULTILINE), words


def test_the_list_names_what_it_does_not_count(fedda, tmp_path):
    filled(tmp_path / "reproduction" / "results", tiny())
    path = cells.path(Path("results"), tiny(), None)
    (tmp_path / path).write_text("")
    code, _, err = fedda("--list")
    assert code == 0
    assert f"{path} is not whole" in err
    assert (tmp_path / path).exists(), "to look changes nothing"


@pytest.mark.parametrize(
    ("name", "rounds", "said"),
    [
        ("table3", 2, "Ours are after 2 rounds, the paper's are after 1,500: do not compare them."),
        ("table3", 1500, ""),
        ("table3", None, ""),
        ("digits", 2, "Ours are after 2 rounds, the experiment's are after 200: do not compare"),
    ],
)
def test_runs_of_another_length_are_not_compared_in_silence(name, rounds, said):
    line = tables.other_length(experiments.experiments()[name], rounds)
    assert line.startswith(said)
    assert bool(line) == bool(said)


def test_a_number_from_the_middle_of_a_run_is_compared_with_longer_runs():
    middle = entry("fedavg")._replace(at=50)
    experiment = experiments.experiments()["digits"]._replace(entries=(middle,))
    assert tables.other_length(experiment, 60) == ""
    assert "after 40 rounds, the experiment's are after 50" in tables.other_length(experiment, 40)


def test_a_table_and_one_more_seed(fedda, tmp_path):
    words = ("digits", "--rounds", "2", "--only", "fedavg,fedda-sgdm")
    code, out, err = fedda(*words)
    assert code == 0
    assert "digits fedavg seed 0: accuracy" in err
    assert "2 of 2 runs are done, 0 are missing." in out
    assert "Ours are after 2 rounds, the experiment's are after" in out
    (line,) = (line for line in out.splitlines() if "FedAvg" in line)
    (cell,) = (tmp_path / "reproduction/results/cells/digits").glob("fedavg-*.json")
    final = json.loads(cell.read_text())["final"]["accuracy"]
    assert f"{final:.4f}" in line
    before = {
        path: path.stat().st_mtime_ns
        for path in (tmp_path / "reproduction/results/cells").rglob("*.json")
    }
    code, out, err = fedda(*words, "--quiet")
    assert (code, err) == (0, "")
    code, out, err = fedda(*words, "--seeds", "2")
    assert code == 0
    assert "seed 0: accuracy" not in err
    assert err.count("seed 1: accuracy") == 2
    assert "4 of 4 runs are done" in out
    assert re.search(r"FedAvg .* ± .* 2 ", out)
    after = {
        path: path.stat().st_mtime_ns
        for path in (tmp_path / "reproduction/results/cells").rglob("*.json")
    }
    assert len(after) == 4
    assert before.items() <= after.items(), "the first are as they were"
    assert fedda("--write")[0] == 0
    assert (tmp_path / "results/README.md").read_text().startswith("# Results")
    assert not list((tmp_path / "results/.work").glob("fed*")), "no claim and no work is left"
    assert fedda("digits", "--rounds", "3", "--only", "fedavg", "-q")[0] == 0
    assert len(names(tmp_path / "reproduction" / "results")) == 5, "other rounds are other cells"


def test_a_run_is_added_and_found(fedda, tmp_path, monkeypatch):
    run = {"rounds": 2, "algorithm": "fedavg"}
    experiment.run(config.resolve(run), tmp_path / "run")
    code, out, _ = fedda("--add", "run")
    assert code == 0
    assert f"run is results/cells/digits/{names(tmp_path / 'results')[0]}.json" in out
    monkeypatch.setattr(training, "alone", None)  # nothing is trained
    code, out, _ = fedda("digits", "--rounds", "2", "--only", "fedavg")
    assert code == 0
    assert "1 of 1 runs are done" in out


def test_a_folder_of_runs_is_added_as_one_of_them_is(fedda, tmp_path):
    for name in ("fedavg", "fedprox"):
        run = config.resolve({"rounds": 2, "algorithm": name})
        experiment.run(run, tmp_path / "cmp" / name)
    code, out, _ = fedda("--add", "cmp")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == ["cmp/fedavg", "cmp/fedprox"]
    assert len(names(tmp_path / "reproduction" / "results")) == 2


def test_without_its_data_the_way_to_get_them_is_the_last_that_is_said(fedda):
    code, out, err = fedda("table9", "--only", "emnist,cifar100")
    assert code == 2
    missing = ["emnist: the data set emnist", "cifar100: the data set cifar100"]
    said = [line.split(" (")[0] for line in err.splitlines()]
    assert said == [*missing, f"fedda: {missing[0]}", missing[1]], "at once, and at the end"
    assert out == "0 of 8 runs are done, 8 are missing.\n", "no table of nothing"


def test_what_can_be_run_is_shown_before_what_cannot(fedda):
    code, out, err = fedda("digits", "table3", "--rounds", "2", "--only", "fedavg")
    assert code == 2
    assert re.search(r"FedAvg .*\d\.\d{4} ", out)
    assert "1 of 2 runs are done, 1 are missing." in out
    assert err.splitlines()[-1].startswith("fedda: emnist: the data set emnist")


@pytest.mark.parametrize("words", [("--list",), ("--write",), ("--report", "page"), ("digits",)])
def test_a_file_is_no_folder_of_results(fedda, tmp_path, words):
    (tmp_path / "file").write_text("")
    code, out, err = fedda(*words, "--results", "file")
    assert (code, out) == (2, "")
    assert "--results is file, a file: expected the folder of finished runs" in err


def test_help_speaks_of_runs(fedda):
    assert "cell" not in fedda("--help")[1]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "say what to reproduce, such as table3"),
        (["table22"], "unknown experiment 'table22'. Did you mean table2"),
        (["--list", "table22"], "unknown experiment 'table22'. Did you mean table2"),
        (["--list", "--only", "fedavgg"], "'fedavgg'. Did you mean fedavg"),
        (["table2", "--only", "fedavgg"], "'fedavgg'. Did you mean fedavg"),
        (["all", "--only", ""], "unknown algorithm or task of what is reproduced ''. Known"),
        (["all", "--only", "fedavg,"], "unknown algorithm or task of what is reproduced ''. Known"),
        (["--add"], "--add needs directories"),
        (
            ["--add", "nothing"],
            "nothing holds no run: expected a directory that fedda run wrote to",
        ),
        (["digits", "--only", "fedavg", "--write"], "leave out --rounds and --only"),
        (["--write"], "nothing to write about: results/cells holds no finished runs. Run fedda "),
        (["digits", "--rounds", "2", "--report", "page"], "leave out --rounds and --only"),
        (["table3", "--precision", "bf17"], "fedda: unknown precision 'bf17'"),
        (["digits", "--results", "/proc/none"], "cannot write to /proc/none (No such file or dir"),
    ],
)
def test_wrong_input_is_a_message(fedda, words, message):
    code, out, err = fedda(*words)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


# ------------------------------------------------------------------------------------- filling


def test_runs_of_one_program_are_trained_together_to_the_same_numbers(tmp_path):
    runs = [tiny(client_lr=rate, seed=seed) for rate in (0.1, 0.2) for seed in (0, 1)]
    outcome, told = filled(tmp_path / "together", *runs)
    assert len(outcome.made) == 4
    assert "digits fedda-sgdm, 4 together (seed 0, 1; client_lr 0.1, 0.2): round 4/4" in told
    for run in runs:
        filled(tmp_path / "alone", run)
    assert names(tmp_path / "alone") == names(tmp_path / "together")
    for one, other in zip(
        *(cells.read_all(tmp_path / each).found for each in ("alone", "together")), strict=True
    ):
        assert one.content.keys() - {"processes"} == other.content.keys() - {"together"}
        for name, values in one.content["history"].items():
            ours = np.array(other.content["history"][name], float)
            np.testing.assert_allclose(ours, np.array(values, float), rtol=2e-4, atol=1e-5)
        for name in ("bytes_up", "bytes_down", "parameters", "config", "data"):
            assert one.content[name] == other.content[name]


def test_what_is_not_one_program_is_trained_alone(tmp_path, monkeypatch):
    runs = [tiny(), tiny(rounds=6), tiny(algorithm="fedavg"), tiny(local_work=3)]
    monkeypatch.setattr(training, "several", None)
    assert len(filled(tmp_path, *runs)[0].made) == 4
    monkeypatch.setattr(training, "SMALL", 1)
    assert len(filled(tmp_path, tiny(seed=1), tiny(seed=2))[0].made) == 2, "a model that is large"


def test_a_damaged_cell_is_named_and_made_again(tmp_path):
    runs = [tiny(), tiny(algorithm="fedavg")]
    filled(tmp_path, *runs)
    path, other = (cells.path(tmp_path, run, None) for run in runs)
    whole, untouched = json.loads(path.read_text()), other.stat().st_mtime_ns
    path.write_text(path.read_text()[:300])
    outcome, told = filled(tmp_path, *runs)
    assert outcome.made == [path.stem]
    assert f"{path} is not whole" in told
    again = json.loads(path.read_text())
    assert again["history"] == whole["history"]
    assert len(path.with_suffix(".json.damaged").read_text()) == 300
    assert other.stat().st_mtime_ns == untouched
    assert filled(tmp_path, *runs)[0].made == []


def test_a_folder_in_the_place_of_a_cell_is_named_and_made_again(tmp_path):
    """Also if what was set aside before is still there."""
    path = cells.path(tmp_path, tiny(), None)
    for aside in (f"{path.name}.damaged", f"{path.name}.damaged-2"):
        path.mkdir(parents=True)
        (path / "file").write_text("")
        with pytest.raises(InputError, match=f"{path} is a folder.*Move it away"):
            reproduce.add(tmp_path, a_run(tmp_path / "run"))
        outcome, told = filled(tmp_path, tiny())
        assert outcome.made == [path.stem]
        assert f"{path} is a folder, not the file of a run; it is set aside as {aside}," in told
        assert (path.with_name(aside) / "file").exists()
        path.unlink()


def a_run(directory):
    if not directory.exists():
        experiment.run(tiny(), directory)
    return directory


def test_a_cell_under_a_wrong_name_is_named_and_made_again(tmp_path):
    filled(tmp_path, tiny())
    path = cells.path(tmp_path, tiny(), None)
    wrong = cells.path(tmp_path, tiny(seed=5), None)
    os.replace(path, wrong)
    outcome, told = filled(tmp_path, tiny(), tiny(seed=5))
    assert sorted(outcome.made) == sorted([path.stem, wrong.stem])
    assert "is the result of another configuration than its name says" in told


def test_what_another_process_is_at_is_left_to_it(tmp_path):
    with locks.Claims(tmp_path / ".work") as theirs:
        theirs.take(cells.name(tiny(), None))
        outcome, _ = filled(tmp_path, tiny(), tiny(algorithm="fedavg"))
        assert (len(outcome.busy), len(outcome.made)) == (1, 1)
    assert len(filled(tmp_path, tiny())[0].made) == 1


def test_the_command_says_what_other_processes_are_at(fedda, tmp_path):
    words = ("digits", "--rounds", "2", "--only", "fedavg")
    (run,) = reproduce.wanted(
        [choice.only(experiments.experiments()["digits"], ["fedavg"])], 1, 2, None
    )
    with locks.Claims(tmp_path / "results/.work") as theirs:
        theirs.take(cells.name(run, None))
        code, out, err = fedda(*words)
    assert (code, out) == (0, "0 of 1 runs are done, 1 are missing.\n")
    assert err == "Other processes are at work on 1 of the runs.\n"


def test_a_run_that_cannot_be_made_does_not_stop_the_others(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDDA_DATA", str(tmp_path / "none"))
    outcome, _ = filled(tmp_path, tiny(cohort=99), tiny(task="emnist", model="cnn"), tiny())
    assert len(outcome.made) == 1
    of_cohort, of_data = outcome.failed.values()
    assert "cohort must be at most the number of clients" in of_cohort
    assert "the data set emnist" in of_data


@pytest.fixture
def clock(monkeypatch):
    """Time that stands still: a line that is told takes a second."""
    now = types.SimpleNamespace(seconds=0.0, monotonic=lambda: now.seconds)
    monkeypatch.setattr(reproduce, "time", now)
    return now


def ticking(clock, tell):
    def tell_in_a_second(line):
        tell(line)
        clock.seconds += 1

    return tell_in_a_second


def fill_by(clock, folder, *runs, seconds):
    told: list[str] = []
    tell = ticking(clock, told.append)
    return reproduce.fill(runs, folder, seconds, tell, told.append), "\n".join(told)


def test_a_run_is_stopped_when_the_time_is_over_and_goes_on_to_the_same_numbers(tmp_path, clock):
    run, name = tiny(rounds=8), cells.name(tiny(rounds=8), None)
    outcome, told = fill_by(clock, tmp_path, run, tiny(algorithm="fedavg"), seconds=2.5)
    assert outcome == reproduce.Filled([], [], [name], {}, late=1)
    assert "round 4/8" in told
    assert "round 6/8" not in told
    assert names(tmp_path) == []
    assert not list((tmp_path / ".work").glob("*.claim")), "others may go on with it"
    outcome, told = fill_by(clock, tmp_path, run, seconds=0.5)
    assert outcome.stopped == [name]
    assert "round 6/8" in told
    assert "round 4/8" not in told, "nothing is done again"
    outcome, told = fill_by(clock, tmp_path, run, seconds=0.5)
    assert outcome.made == [name], "what has come to its end is not stopped"
    filled(tmp_path / "whole", run)
    (one,), (whole,) = (cells.read_all(each).found for each in (tmp_path, tmp_path / "whole"))
    assert one.content["history"] == whole.content["history"]
    assert one.path.name == whole.path.name


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
    (one,), (whole,) = (cells.read_all(each).found for each in (tmp_path, tmp_path / "whole"))
    assert one.content["history"] == whole.content["history"]


def test_a_run_that_began_without_a_time_is_stopped_without_loss_too(tmp_path, clock):
    def interrupted(line):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):  # at round 0, of which no checkpoint is kept
        reproduce.fill([tiny()], tmp_path, tell=interrupted)
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
    assert outcome == reproduce.Filled([], [], [], {}, late=2), "one is there"
    assert told == ""


def test_all_that_is_left_is_begun_while_there_is_time_however_long_others_took(tmp_path, clock):
    filled(tmp_path, tiny())
    content = json.loads(cells.path(tmp_path, tiny(), None).read_text())
    columns = content["history"]
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    content |= {"seconds": {"total": 1e6, "compile": 1e5}}
    cells.write(tmp_path, tiny(), rows, content)
    runs = tiny(seed=1), tiny(algorithm="fedavg"), tiny(algorithm="fedprox")
    # A run tells of rounds 0, 2 and 4 and of its end: the second ends, and the third begins not.
    outcome, _ = fill_by(clock, tmp_path, *runs, seconds=8)
    assert outcome.made == [cells.name(run, None) for run in runs[:2]]
    assert (outcome.stopped, outcome.late) == ([], 1)


def test_of_runs_together_those_that_came_to_their_end_are_made(tmp_path, clock, monkeypatch):
    """Of four in two batches, as if no more fitted in memory, the time suffices for the first."""
    train_grid = training.api.train_grid
    monkeypatch.setattr(
        training.api,
        "train_grid",
        lambda setup, hypers, seeds, together, *more: train_grid(setup, hypers, seeds, 2, *more),
    )
    runs = [tiny(seed=seed) for seed in range(4)]
    every = [cells.name(run, None) for run in runs]
    outcome, told = fill_by(clock, tmp_path, *runs, tiny(algorithm="fedavg"), seconds=4.5)
    assert outcome == reproduce.Filled(every[:2], [], every[2:], {}, late=1)
    assert "seed 1: accuracy" in told
    assert names(tmp_path) == sorted(every[:2])
    outcome, told = fill_by(clock, tmp_path, *runs, seconds=9)
    assert outcome == reproduce.Filled(every[2:], [], [], {})
    assert "2 together (seed 2, 3): continued from round 2" in told


def test_runs_together_are_stopped_and_go_on_to_the_same_numbers(tmp_path, clock):
    """Though one of them does not stay finite."""
    rates = (0.1, 0.2, 1e30)
    runs = [tiny(rounds=8, algorithm="scaffold", client_lr=rate) for rate in rates]
    every = [cells.name(run, None) for run in runs]
    outcome, told = fill_by(clock, tmp_path, *runs, seconds=2.5)
    assert outcome == reproduce.Filled([], [], every, {})
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
    both = [cells.read_all(each).found for each in (tmp_path, tmp_path / "whole")]
    for one, whole in zip(*both, strict=True):
        assert one.content["history"] == whole.content["history"]
        assert one.content["together"] == 3
    assert not list((tmp_path / ".work").glob("together-*"))


def test_what_was_stopped_together_goes_on_together_whatever_else_is_asked_for(tmp_path, clock):
    """And whoever else is at work: one process takes all of it, or nothing."""
    runs = [tiny(seed=seed) for seed in range(4)]
    every = [cells.name(run, None) for run in runs]
    fill_by(clock, tmp_path, *runs[1:3], seconds=1.5)
    with locks.Claims(tmp_path / ".work") as theirs:
        theirs.take(every[1])
        outcome, told = fill_by(clock, tmp_path, *runs[:3], seconds=99)
        assert (outcome.made, outcome.busy) == (every[:1], every[1:3])
    outcome, told = fill_by(clock, tmp_path, runs[3], runs[2], runs[1], seconds=99)
    assert outcome.made == [every[3], *every[1:3]]
    assert "2 together (seed 1, 2): continued from round 2" in told
    filled(tmp_path / "whole", *runs[1:3])
    for run in runs[1:3]:
        one, other = (
            json.loads(cells.path(folder, run, None).read_text())["history"]
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
    monkeypatch.setattr(batches, "SECONDS", 0.0)
    monkeypatch.setattr(batches, "PACE", np.inf)

    def interrupted(line):
        if "round 6/8" in line:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reproduce.fill(runs, tmp_path, tell=interrupted)
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


@pytest.fixture
def signals(monkeypatch):
    """Gives a list: its signals come before the evaluation at round 40."""
    row, to_come = train._row, []

    def row_after_signals(setup, together, sent, number, *rest):
        while number == 40 and to_come:
            signal.raise_signal(to_come.pop())
        return row(setup, together, sent, number, *rest)

    monkeypatch.setattr(train, "_row", row_after_signals)
    return to_come


TOGETHER = ("digits", "--only", "fedavg", "--rounds", "60", "--seeds", "2")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_runs_together_are_interrupted_at_an_evaluation_and_kept(fedda, signals, number, code):
    signals.append(number)
    stopped, _, err = fedda(*TOGETHER)
    assert stopped == code
    assert "round 40/60" in err
    assert "round 60/60" not in err
    assert err.endswith("Continue with the same command.\n")
    code, out, err = fedda(*TOGETHER)
    assert code == 0
    assert "2 together (seed 0, 1): continued from round 40" in err
    assert "2 of 2 runs are done, 0 are missing." in out


def test_signals_are_left_alone_after_runs_together_and_beside_the_main_thread(tmp_path):
    """Only the main thread may set what is done about them."""
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with futures.ThreadPoolExecutor(1) as pool:
        made = pool.submit(filled, tmp_path / "thread", tiny(), tiny(seed=1)).result()[0].made
    assert len(made) == len(filled(tmp_path / "here", tiny(), tiny(seed=1))[0].made) == 2
    assert before == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def test_the_command_says_what_was_stopped(fedda, clock, monkeypatch):
    fill = reproduce.fill
    monkeypatch.setattr(
        reproduce,
        "fill",
        lambda runs, folder, seconds, tell, warn: fill(
            runs, folder, seconds, ticking(clock, tell), warn
        ),
    )
    words = ("digits", "--only", "fedavg,fedprox", "--rounds", "60", "--time")
    for seconds, stopped in (("0.5", 1), ("-1", 0)):
        code, out, err = fedda(*words, seconds)
        assert code == 0
        assert err.splitlines()[-1] == (
            f"The time is over. Runs left: 2; of these stopped on the way: {stopped}. The same "
            "command goes on with them."
        )
        assert out == "0 of 2 runs are done, 2 are missing.\n"
    code, out, err = fedda(*words, "99")
    assert code == 0
    assert "The time is over" not in err
    assert "2 of 2 runs are done, 0 are missing." in out


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
    chosen = [experiments.experiments()["digits"]._replace(entries=(entry("fedavg"),))]
    filled(tmp_path, *reproduce.wanted(chosen, 1, 2, "bf16"))
    there = cells.read_all(tmp_path).found
    assert [run.precision for run in reproduce.wanted(chosen, 2, 2, None, there)] == ["bf16"] * 2
    assert reproduce.missing(reproduce.wanted(chosen, 1, 2, None, there), there) == 0
    assert [run.precision for run in reproduce.wanted(chosen, 1, 2, "tf32", there)] == ["tf32"]
    assert [run.precision for run in reproduce.wanted(chosen, 1, 3, None, there)] == ["tf32"]


def entry(algorithm):
    entries = experiments.experiments()["digits"].entries
    return next(each for each in entries if each.algorithm == algorithm)


# ------------------------------------------------------------------------------------- processes

FILL = """
import json, sys, time
from pathlib import Path
from fedda.tasks import config
from fedda_reproduction import reproduce
folder, here, there, runs = sys.argv[1:]
runs = [config.resolve(values) for values in json.loads(runs)]
if here:  # all begin at one moment
    Path(here).touch()
    while not Path(there).exists():
        time.sleep(0.001)
tell = lambda line: print(line, file=sys.stderr)
print(json.dumps(reproduce.fill(runs, Path(folder), tell=tell)._asdict()))
"""


def process(folder, values, here="", there=""):
    words = [sys.executable, "-c", FILL, folder, here, there, json.dumps(values)]
    quickly = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    return subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=quickly
    )


def ended(process):
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    return json.loads(out), err


@pytest.mark.slow
def test_two_processes_fill_one_folder(tmp_path):
    algorithms = ("fedavg", "fedda-sgdm", "fedprox", "fedopt-sgdm")
    values = [TINY | {"algorithm": name, "seed": seed} for seed in (0, 1) for name in algorithms]
    marks = [str(tmp_path / "a"), str(tmp_path / "b")]
    both = [process(tmp_path / "r", values, *order) for order in (marks, marks[::-1])]
    (one, _), (other, _) = map(ended, both)
    assert len(one["made"]) >= 2, "both had something to do"
    assert len(other["made"]) >= 2
    assert not set(one["made"]) & set(other["made"]), "none was made twice"
    assert sorted(one["made"] + other["made"]) == names(tmp_path / "r"), "none was lost"
    assert len(names(tmp_path / "r")) == len(values)
    assert not cells.read_all(tmp_path / "r").damaged
    assert not list((tmp_path / "r/.work").glob("fed*"))


@pytest.mark.slow
def test_a_killed_run_goes_on_to_the_same_numbers(tmp_path):
    values = TINY | {"rounds": 400, "eval_every": 20, "checkpoint_every": 1}
    work = tmp_path / "killed/.work" / cells.name(config.resolve(values), None)
    killed = process(tmp_path / "killed", [values])
    until = time.monotonic() + 600
    while not (work / "checkpoints/round-40").exists() and time.monotonic() < until:
        time.sleep(0.01)
    killed.send_signal(signal.SIGKILL)
    killed.communicate()
    assert names(tmp_path / "killed") == []
    assert work.with_name(f"{work.name}.claim").exists(), "nothing was tidied up"
    both = [process(tmp_path / name, [values]) for name in ("killed", "whole")]
    (after, told), (whole, _) = map(ended, both)
    assert after["made"] == whole["made"] == [work.name]
    assert int(re.search(r"continued from round (\d+)", told)[1]) >= 20
    (one,), (other,) = (cells.read_all(tmp_path / name).found for name in ("killed", "whole"))
    assert one.content["history"] == other.content["history"]
    assert one.content["history"]["round"] == list(range(0, 401, 20))
    assert not work.exists()


# ------------------------------------------------------------------------------------- real data

FILES = os.environ.get("FEDDA_TEST_DATA")


@pytest.mark.slow
@pytest.mark.skipif(FILES is None, reason="FEDDA_TEST_DATA names no folder with the files")
@pytest.mark.xdist_group("real data")
def test_a_run_of_table_3(fedda, tmp_path):
    from fedda.data import datasets

    datasets.import_files("emnist", Path(FILES))
    code, out, _ = fedda("table3", "--rounds", "2", "--only", "fedavg")
    assert code == 0
    assert re.search(r"FedAvg +0\.850 +0\.849 +0\.\d{4} .* 1 +0 +tf32", out)
    (cell,) = cells.read_all(tmp_path / "reproduction" / "results").found
    assert cell.content["data"]["name"] == "emnist"
    assert len(cell.data) == 64
    assert fedda("table3", "--rounds", "2", "--only", "fedavg", "-q")[2] == ""


def test_the_page_is_written_from_the_cells(fedda, tmp_path: Path):
    committed = Path(__file__).parents[2] / "reproduction/results/cells/digits"
    results, page = tmp_path / "few", tmp_path / "page"
    shutil.copytree(committed, results / "cells/digits")
    assert fedda("--report", str(page), "--results", str(results))[0] == 0
    text = (page / "results.html").read_text()
    assert "Handwritten digits" in text
    assert "Table 2" in text
