"""The command `fedda run`, with files, interrupts and a terminal."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fedda.tasks import config
from helpers.commands import QUICK, WILD


def test_runs_of_the_same_second_have_directories_of_their_own(fedda, tmp_path: Path, monkeypatch):
    monkeypatch.setattr("fedda.cli.terminal.time", SimpleNamespace(strftime=lambda form: "now"))
    for _ in range(3):
        assert fedda("run", *QUICK, "-q")[0] == 0
    names = sorted(path.name for path in (tmp_path / "runs").iterdir())
    assert names == ["now-digits-fedda-sgdm" + end for end in ("", "-2", "-3")]


def test_run_with_a_file_and_json(fedda, tmp_path: Path):
    (tmp_path / "mine.toml").write_text('algorithm = "fedprox"\nrounds = 9\nmu = 0.5\n')
    code, out, err = fedda("run", "mine.toml", *QUICK, "--json", "--out", "one")
    assert code == 0
    summary = json.loads(out)
    assert summary["algorithm"] == "fedprox"
    assert summary["rounds"] == 4, "words override the file"
    assert "fedprox: round 4/4" in err
    code, out, err = fedda("run", "--resume", "one", "--json")
    assert (code, json.loads(out)["final"]) == (0, summary["final"])
    assert "continued from round 4" in err


def test_help_of_run_tells_the_settings(fedda):
    words = re.findall(r"[\w=-]+", fedda("run", "--help")[1])
    shown = " ".join(words)
    assert "algorithm=fedda-sgdm task=digits" in shown
    assert "fedda algorithms NAME" in shown
    assert {*config.FIELDS, "client_lr", "server_lr"} <= set(words)


def test_data_of_ones_own_are_no_task(fedda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FEDDA_DATA", str(tmp_path / "data"))
    numbers = np.arange(12)
    np.savez(tmp_path / "mine.npz", client=numbers % 3, x=numbers[:, None] / 12, y=numbers % 2)
    code, _, err = fedda("data", "import", "mine3", "mine.npz")
    assert code == 0, err
    for command in ("run", "compare"):
        _, _, err = fedda(command, "task=mine3")
        assert "unknown task 'mine3'. It is a data set: write task=own data=mine3" in err


@pytest.mark.parametrize("as_json", [False, True])
def test_a_run_that_trained_nothing_fails_and_keeps_its_files(fedda, tmp_path, as_json):
    words = ["run", "algorithm=fedavg", *QUICK, *WILD, "-q", "--out", "wild"]
    code, out, err = fedda(*words, *(["--json"] if as_json else []))
    assert code == 1
    assert "fedda: nothing was trained: all 4 rounds were skipped, as uploads were not" in err
    assert (tmp_path / "wild" / "summary.json").exists()
    if as_json:
        assert json.loads(out)["directory"] == "wild"
        assert json.loads(out)["skipped_rounds"] == 4
    code, _, err = fedda("run", "--resume", "wild", "-q")
    assert code == 1
    assert "all 4 rounds were skipped" in err


def test_on_a_terminal_there_is_a_bar_and_ctrl_c_says_how_to_go_on(tmp_path: Path):
    """A real terminal (a pty), a real interrupt, and the advice it prints, followed."""
    main, worker = pty.openpty()
    words = ["run", *QUICK[:3], "rounds=100000", "eval_every=50", "checkpoint_every=1"]
    command = [sys.executable, "-m", "fedda"]
    process = subprocess.Popen(
        [*command, *words, "--out", "long"],
        cwd=tmp_path,
        stdin=worker,
        stdout=worker,
        stderr=worker,
        env=os.environ | {"TERM": "xterm", "COLUMNS": "100"},  # 80 may crop the pace
    )
    os.close(worker)
    shown = b""
    deadline = time.monotonic() + 600
    interrupted = False
    while time.monotonic() < deadline:
        try:
            chunk = os.read(main, 4096)
        except OSError:  # the other end is closed: the process has ended
            break
        shown += chunk
        if not interrupted and b"rounds/s" in shown:
            process.send_signal(signal.SIGINT)
            interrupted = True
    os.close(main)
    assert interrupted
    assert process.wait(60) == 130
    text = re.sub(rb"\x1b\[[0-9;?]*[A-Za-z]", b"", shown).decode()
    told = r"/100000 accuracy [0-9.]+ train_loss [-0-9.e]+ [0-9]+ rounds/s +[0-9]+:[0-9]+"
    assert re.search(r"fedda-sgdm .*" + told, text), "round, metric, loss, pace and time left"
    assert "Continue with: fedda run --resume long" in text
    assert "Traceback" not in text
    assert (tmp_path / "long" / "checkpoints").exists()
    assert not (tmp_path / "long" / "summary.json").exists()


def test_sigterm_says_how_to_go_on(tmp_path: Path, in_quick_processes):
    words = ["run", *QUICK[:3], "rounds=100000", "eval_every=50", "--out", "long"]
    command = [sys.executable, "-m", "fedda", *words]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            assert process.stderr.readline() == "fedda-sgdm: compiling ...\n"
            # Round 0 has no line if it comes within a second of the first.
            assert re.search("round [0-9]+/100000", process.stderr.readline())
            process.terminate()
            _, err = process.communicate(timeout=600)
        finally:
            process.kill()
    assert process.returncode == 143
    assert err.splitlines()[-1] == "Terminated. Continue with: fedda run --resume long"
    assert "Traceback" not in err


def test_a_run_is_extended(fedda):
    longer = [*QUICK[:-2], "eval_every=2"]
    assert fedda("run", *longer, "rounds=6", "--out", "whole", "-q")[0] == 0
    assert fedda("run", *longer, "rounds=4", "--out", "grown", "-q")[0] == 0
    code, out, err = fedda("run", "--resume", "grown", "rounds=6", "--json", "-q")
    assert (code, json.loads(out)["rounds"]) == (0, 6)
    assert json.loads(out)["directory"] == "grown"
    assert "continued from round 4" in err
    for name in ("metrics.jsonl", "config.toml"):
        assert Path("whole", name).read_bytes() == Path("grown", name).read_bytes()
    code, _, err = fedda("run", "--resume", "grown", "rounds=5")
    assert code == 2
    assert "is a run with rounds = 6, got 5." in err
    assert "unknown setting 'lr'" in fedda("run", "--resume", "grown", "lr=1")[2]
