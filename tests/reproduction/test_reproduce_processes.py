"""Several processes that fill one results folder, and processes that are killed."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

from fedda.tasks import config
from fedda_reproduction import reproduce
from fedda_reproduction.paper import cells

TINY = {"model": "linear", "clients": 12, "cohort": 3, "rounds": 4, "eval_every": 2}

LOCK = """
import sys
from pathlib import Path
from fedda_reproduction import reproduce
with reproduce._lock(Path(sys.argv[1]), "a"):
    print("locked", flush=True)
    sys.stdin.read()
"""


def test_the_lock_of_a_killed_process_is_released(tmp_path):
    (tmp_path / ".work").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", LOCK, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"locked\n"
    with pytest.raises(reproduce.Timeout), reproduce._lock(tmp_path, "a"):
        pass
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with reproduce._lock(tmp_path, "a"):
        pass


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
report = lambda line: print(line, file=sys.stderr)
print(json.dumps(reproduce.fill(runs, Path(folder), report=report)._asdict()))
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


def names(folder):
    return sorted(path.stem for path in (folder / "cells").glob("*/*.json"))


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
    assert [path.name for path in (tmp_path / "r/.work").iterdir()] == [".gitignore"]


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
    assert work.exists(), "nothing was tidied up"
    both = [process(tmp_path / name, [values]) for name in ("killed", "whole")]
    (after, told), (whole, _) = map(ended, both)
    assert after["made"] == whole["made"] == [work.name]
    assert int(re.search(r"continued from round (\d+)", told)[1]) >= 20
    (one,), (other,) = (cells.read_all(tmp_path / name).finished for name in ("killed", "whole"))
    assert one.content["history"] == other.content["history"]
    assert one.content["history"]["round"] == list(range(0, 401, 20))
    assert not work.exists()
