"""What people see in a terminal, in a pipe and in a notebook. The terminals are real."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedda.simulate import progress
from helpers.commands import QUICK
from helpers.tmux import terminal

LABELS = ("fedavg, seed 0", "fedda-adagrad, seed 10")
BARS = f"""
import os
os.system("stty -echo")  # Enter must not move the lines
from fedda.simulate.progress import Progress, bars, run_bar
with bars() as add:
    for label in {LABELS}:
        tell = run_bar(add(label))
        tell(None)
        input()
        for number in range(201):
            row = dict(round=number, train_loss=0.0069612, accuracy=0.9721)
            tell(Progress(row, 200, "accuracy"))
"""
TABLE = """
from fedda.cli.terminal import print_table
print_table([["algorithm", *NAMES], ["fedavg", *VALUES]])
"""
CONTROL = re.compile(r"[^\n -\U0010ffff]")


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_bar_is_one_line_on_a_terminal_of_any_width(tmp_path: Path, width: int):
    with terminal([sys.executable, "-c", BARS], tmp_path, width) as shown:
        assert shown.wait_for("compiling ...")[-1].startswith(LABELS[0])
        shown.type("Enter")
        lines = shown.wait_for(LABELS[1])
        shown.wait_for("compiling ...")
        shown.type("Enter")
        lines = [line for line in shown.wait_for("exit code 0") if "exit code" not in line]
    assert len(lines) == 2
    for label, line in zip(LABELS, lines, strict=True):
        assert re.match(rf"{label} +━+ round 200/200 accuracy 0\.9", line), line
        assert line.endswith("00:00")
        assert ("train_loss 0.00696" in line) == (width >= 80)
        assert ("━━━━" in line) == (width >= 120)


def test_a_terminal_without_control_sequences_gets_lines(tmp_path: Path):
    with terminal([sys.executable, "-c", BARS], tmp_path, 60, "dumb") as shown:
        shown.wait_for("compiling ...")
        shown.type("Enter", "Enter")
        lines = shown.wait_for("exit code 0")
    told = [line for line in lines if line.startswith(LABELS)]
    assert told[0] == "fedavg, seed 0: compiling ..."
    assert [line.split(" accuracy")[0] for line in told if "200/200" in line] == [
        f"{label}: round 200/200" for label in LABELS
    ]
    assert not any("━" in line for line in lines)


def test_a_narrow_terminal_shows_the_first_columns(tmp_path: Path):
    names, values = [f"column\n{i}" for i in range(6)], [f"long-value-{i}" for i in range(6)]
    code = TABLE.replace("NAMES", str(names)).replace("VALUES", str(values))
    with terminal([sys.executable, "-c", code], tmp_path, 60) as shown:
        lines = shown.wait_for("exit code 0")
    (row,) = (line for line in lines if "fedavg" in line)
    # 9 for the algorithm, 12 for each value, two spaces between: 3 of them take 55 columns or so.
    assert row.split() == ["fedavg", *values[:3]]
    told = "Too wide for this terminal, not shown: column 3, column 4, column 5"
    assert "".join(lines[-3:-1]) == told, "which the terminal breaks"


def test_a_pipe_gets_every_column(tmp_path: Path):
    code = TABLE.replace("NAMES", str(["column"] * 20)).replace("VALUES", str(["value"] * 20))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.count("value") == done.stdout.count("column") == 20
    assert not CONTROL.search(done.stdout)
    assert done.stderr == ""


@pytest.mark.usefixtures("in_quick_processes")
def test_in_a_pipe_results_are_apart_and_nothing_controls_a_terminal(tmp_path: Path):
    command = [sys.executable, "-m", "fedda", "run", *QUICK, "--json", "--out", "made"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert json.loads(done.stdout)["directory"] == "made"
    told = done.stderr.splitlines()
    assert told[0] == "fedda-sgdm: compiling ..."
    assert told[-1].startswith("fedda-sgdm: round 4/4 accuracy ")
    assert len(told) <= 4
    assert not CONTROL.search(done.stdout + done.stderr)


def test_a_log_of_a_week_has_some_hundred_lines(monkeypatch, capsys):
    """A line a second for 20 s, then after 5 % of the time so far.

    These are 20 + log(week / 20 s) / log(1.05) = 231 lines. Times are whole seconds here,
    which makes the lines a little rarer.
    """
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with progress.bars() as add:
        update = add("fedavg")
        for now in range(7 * 24 * 3600 + 1):
            update(now, 7 * 24 * 3600, f"round {now}")
    lines = capsys.readouterr().err.splitlines()
    assert 180 < len(lines) <= 235
    assert lines[-1] == f"fedavg: round {now}"


COMPLETED = {
    "fedda run algorithm=fedda-": "fedda-adagrad  fedda-adam     fedda-sgdm",
    "fedda run algorithm=fedprox cohor": "cohort=    cohort=10",
    "fedda compare my_m": "fedda compare my_method.py",
    "fedda data show dig": "fedda data show digits",
}


def test_bash_completes_words(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")
    (tmp_path / "my_method.py").touch()
    show = [sys.executable, "-m", "fedda", "--show-completion", "bash"]
    done = subprocess.run(show, capture_output=True, text=True, check=True)
    shell = "bind 'set show-all-if-ambiguous on'\nPS1='> '\n"
    (tmp_path / "rc").write_text(done.stdout + shell)
    with terminal(["bash", "--noprofile", "--rcfile", "rc", "-i"], tmp_path, 80) as shown:
        shown.wait_for(">")
        for words, expected in COMPLETED.items():
            shown.type(words, "Tab")
            shown.wait_for(expected)
            shown.type("C-a", "#", "Enter")


CELLS = [
    """
import os, signal, threading
import numpy as np, fedda
from fedda.simulate import train
draw = np.random.default_rng(0)
clients = [(draw.normal(size=(n, 8)).astype("f4"), draw.integers(0, 3, n)) for n in (3, 20, 7)]
problem = dict(model=fedda.models.linear(8, 3), clients=clients, loss=fedda.losses.cross_entropy)
shown = []
get_ipython().display_pub.register_hook(
    lambda message: (shown.append(message["content"]["data"]["text/plain"]), message)[1]
)
""",
    "result = fedda.run('fedavg', **problem, rounds=300, cohort=2, eval_every=1)",
    "result",
    "fedda.run_grid('fedavg', **problem, rounds=10, cohort=2, grid={'client_lr': [0.1, 0.3]})",
    "print('\\n'.join(shown))",
    """
shown.clear()
def interrupt(row):
    if row["round"] == 40:
        os.kill(os.getpid(), signal.SIGINT)  # as the button of the notebook does
stopped = None
try:
    fedda.run(
        'fedavg', **problem, rounds=10**6, cohort=2, eval_every=20, on_evaluation=interrupt
    )
except fedda.Interrupted as stop:
    stopped = stop.result
""",
    "stopped",
]


@pytest.mark.usefixtures("in_quick_processes")
def test_a_notebook_has_one_line_that_is_updated(tmp_path: Path):
    """Executed by nbconvert, as on a page of documentation. The button interrupts a run."""
    nothing = {"metadata": {}, "execution_count": None, "outputs": []}
    cells = [{"cell_type": "code", "source": source, **nothing} for source in CELLS]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3"}}
    notebook = {"nbformat": 4, "nbformat_minor": 4, "metadata": kernel, "cells": cells}
    (tmp_path / "in.ipynb").write_text(json.dumps(notebook))
    words = ["--to", "notebook", "--execute", "--output", "out.ipynb", "in.ipynb"]
    command = [sys.executable, "-m", "nbconvert", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    cells = json.loads((tmp_path / "out.ipynb").read_text())["cells"]
    _, run, found, grid, printed, stop, stopped = [
        ["".join(out.get("text") or out["data"]["text/plain"]) for out in cell["outputs"]]
        for cell in cells
    ]
    assert len(run) == 1
    assert re.match(r"fedavg 100 %  round 300/300 train_loss \S+", run[0])
    assert re.match(r"Result\(fedavg, 300 rounds, train_loss \S+\)$", found[0])
    assert [text.split(" ")[0] for text in grid] == ["fedavg", "[GridPoint(hyper={'client_lr':"]
    (lines,) = printed
    assert lines.splitlines()[0] == "fedavg  compiling ..."
    assert lines.count("compiling ...") == 2
    assert len(lines.splitlines()) < 200, "not one for each evaluation"
    assert len(stop) == 1
    assert re.match(r"Result\(fedavg, [46]0 rounds, ", stopped[0])
