"""What the README promises of the demo, and that every algorithm learns. Slow: real runs."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedda import algorithms
from fedda.cli.compare import COMPARED

pytestmark = pytest.mark.slow


def compare(directory: Path, *words: str) -> dict:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "fedda",
            "compare",
            *words,
            "--json",
            "--out",
            str(directory),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_demo_takes_less_than_a_minute_and_every_method_learns(tmp_path: Path):
    start = time.monotonic()
    printed = compare(tmp_path / "demo")
    assert time.monotonic() - start < 60
    assert [run["algorithm"] for run in printed["runs"]] == list(COMPARED)
    assert all(run["final"]["accuracy"] > 0.9 for run in printed["runs"])


def test_every_algorithm_there_is_learns_the_digits(tmp_path: Path):
    """Chance is 0.1. None is skipped, and the table has rounds to 90 % and megabytes for each."""
    printed = compare(tmp_path / "all", "--all", "--threshold", "0.9")
    finals = {run["algorithm"]: run["final"]["accuracy"] for run in printed["runs"]}
    assert sorted(finals) == sorted(algorithms.names())
    assert {name: value for name, value in finals.items() if value < 0.85} == {}
    for row in printed["table"]:
        assert row["threshold"] == 0.9
        assert row["reached"] == 1, f"{row['label']} never had an accuracy of 0.9"
        assert row["megabytes_up"][0] > 0
