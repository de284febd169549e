"""Several processes train one run, as `docs/multi_host.md` says; all of them on this machine."""

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import pytest
from jax import random

from fedda.cli import main
from fedda.core import tree
from fedda.experiments import run as experiment
from fedda.models import cnn, linear, mlp, resnet18
from fedda.tasks import config
from helpers.pages import ROOT, blocks

PAGE = ROOT / "docs" / "multi_host.md"
COMMANDS, RESUMED = (
    [line.removesuffix(" &").split() for line in block.text.strip().splitlines()]
    for block in blocks(PAGE, "sh")
)
# Clients of SCAFFOLD keep something; three of them on two devices leave one place empty.
SMALL = ["algorithm=scaffold", "model=linear", "clients=12", "cohort=3", "rounds=6", "eval_every=2"]

# The command, which besides tells the end of the run as this process has it.
TOLD = """
import hashlib, sys
import jax, numpy as np
from fedda.cli import main
from fedda.experiments import run as experiment
def told(function):
    def call(*arguments):
        outcome = function(*arguments)
        leaves = [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(outcome.result.state)]
        print("end:", hashlib.sha256(b"".join(leaves)).hexdigest(), outcome.result.history)
        return outcome
    return call
experiment.run, experiment.resume = told(experiment.run), told(experiment.resume)
main.main()
"""

Process = subprocess.Popen
Start = Callable[..., "Process[str]"]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a command with one device in a folder; what is left running is killed."""
    started = []
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        "FEDDA_COMPILE_CACHE": str(tmp_path / "cache"),
    }

    def call(words: list[str], folder: str) -> "Process[str]":
        (tmp_path / folder).mkdir(exist_ok=True)
        process = Process(
            [sys.executable, "-c", TOLD, *words[1:]],
            cwd=tmp_path / folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process

    yield call
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def on(port: int, words: list[str], *more: str) -> list[str]:
    return [word.replace(":8476", f":{port}") for word in words] + list(more)


def end(process: "Process[str]", within: float = 600) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=within)
    return process.returncode, out, err


def assert_as_alone(directory: Path, *settings: str) -> None:
    """The metrics are those of one process with one device, up to rounding."""
    resolved = config.resolve(config.parse([*settings, "devices=1"]))
    expected = experiment.run(resolved, directory.parent / "alone").result.history
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    for row, other in zip(rows, expected, strict=True):
        assert row.keys() == other.keys()
        for name, value in row.items():
            value = math.nan if value is None else value
            assert value == pytest.approx(other[name], rel=1e-4, nan_ok=True)


def test_two_processes_train_one_run_and_one_of_them_writes(start, port, tmp_path: Path):
    first, second = (
        start(on(port, words, *SMALL, "--json"), folder)
        for words, folder in zip(COMMANDS, ("first", "second"), strict=True)
    )
    code, out, err = end(first)
    assert code == 0, err
    told, summary = out.splitlines()
    assert json.loads(summary)["processes"] == json.loads(summary)["devices"] == 2
    code, out, err = end(second)
    assert code == 0, err
    assert out.splitlines() == [told], "the same parameters and history, and nothing else"
    assert "round" not in err
    assert list((tmp_path / "second").iterdir()) == []
    assert_as_alone(tmp_path / "first/runs/both", *SMALL)


@pytest.mark.slow
def test_one_that_dies_ends_all_and_all_go_on(start, port, tmp_path: Path):
    settings = [*SMALL, "rounds=60", "checkpoint_every=1"]
    folders = ("first", "second")
    first, second = (
        start(on(port, words, *settings, "--quiet"), folder)
        for words, folder in zip(COMMANDS, folders, strict=True)
    )
    log = tmp_path / "first/runs/both/metrics.jsonl"
    deadline = time.monotonic() + 120
    while not log.exists() or log.read_bytes().count(b"\n") < 4:
        assert first.poll() is second.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    second.terminate()
    assert end(second, within=10)[0] == -signal.SIGTERM, "it heeds the signal"
    code, _, err = end(first, within=20)
    assert code == 1
    assert re.search("Connection (closed|reset) by peer", err)
    assert not (log.parent / "summary.json").exists(), "it was not in the middle"
    first, second = (
        start(on(port, words), folder) for words, folder in zip(RESUMED, folders, strict=True)
    )
    code, out, err = end(first)
    assert code == 0, err
    assert re.search(r"continued from round [1-9]", err)
    assert end(second)[1].splitlines() == out.splitlines()[:1]
    assert list((tmp_path / "second").iterdir()) == []
    assert_as_alone(log.parent, *settings)


# ----------------------------------------------------------------------------- what is refused


def test_who_waits_in_vain_says_so(start, port, tmp_path: Path):
    addresses = (port, 1)  # nobody comes to the first, and at the second nobody listens
    alone = [
        start(on(at, words, "--wait", "3"), "alone")
        for at, words in zip(addresses, COMMANDS, strict=True)
    ]
    for at, process in zip(addresses, alone, strict=True):
        code, out, err = end(process)
        assert (code, out) == (2, "")
        assert f"fedda: not all of 2 processes connected to 127.0.0.1:{at} within 3 seconds" in err
        assert "Start each with the same command and a different --process" in err
    assert list((tmp_path / "alone").iterdir()) == []


def test_all_hear_that_one_was_given_something_else(start, port):
    both = [start(on(port, words, f"seed={i}"), "both") for i, words in enumerate(COMMANDS)]
    for process in both:
        code, out, err = end(process)
        assert (code, out) == (2, "")
        assert "fedda: process 0 has seed = 0, but process 1 has 1. Start each with" in err


def test_what_one_is_refused_all_are(start, port, tmp_path: Path):
    (tmp_path / "first/runs/both/mine").mkdir(parents=True)
    first, second = (
        start(on(port, words, *SMALL), folder)
        for words, folder in zip(COMMANDS, ("first", "second"), strict=True)
    )
    code, _, err = end(first)
    assert code == 2
    assert "fedda: runs/both is not empty" in err
    code, _, err = end(second)
    assert code == 2
    assert "fedda: process 0: runs/both is not empty" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--coordinator", "8476"], "--coordinator must be HOST:PORT, of process 0, got '8476'"),
        (["--processes", "1"], "--processes must be at least 2 and --process below it"),
        (["--process", "2"], "--processes must be at least 2 and --process below it"),
        (["--process", "-1"], "--processes must be at least 2 and --process below it"),
    ],
)
def test_wrong_numbers(words, message, monkeypatch, capsys, tmp_path: Path):
    monkeypatch.setenv("FEDDA_COMPILE_CACHE", "off")
    monkeypatch.setattr(sys, "argv", [*COMMANDS[0], *words])
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main.main()
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


# ------------------------------------------------------------------------------- the arithmetic


def test_the_arithmetic_of_the_page():
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]]
        for line in PAGE.read_text().splitlines()
        if line.startswith("|") and not line.startswith(("| model", "|---"))
    ]
    made = (mlp(64, 64, 10), cnn(28, 1, 62), resnet18(100), linear(10_000, 500))
    for model, row in zip(made, rows, strict=True):
        parameters = tree.size(jax.eval_shape(model.init, random.key(0)))
        assert int(row[1].replace(",", "")) == parameters
        upload = 2 * 4 * parameters
        sent = 2 * upload * 7 / 8
        for cell, value, unit in (
            (row[2], upload, {"kB": 1e3, "MB": 1e6}),
            (row[3], sent, {"kB": 1e3, "MB": 1e6}),
            (row[4], sent * 8 / 10e9, {"ms": 1e-3}),
            (row[5], sent * 8 / 200e9, {"ms": 1e-3}),
        ):
            number, name = cell.split()
            assert float(number) * unit[name] == pytest.approx(value, rel=0.05)
