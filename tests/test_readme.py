"""What the README says is short, and its numbers are those of the committed runs."""

import json
import math
import re

import numpy as np
from scipy import stats

from fedda import algorithms
from fedda.algorithms import registry
from fedda.cli.compare import COMPARED
from helpers.pages import ROOT

README = (ROOT / "README.md").read_text()
RUNS = json.loads((ROOT / "docs/digits/runs.json").read_text())
ROW = re.compile(r"^\| (\S+) \(`([\w-]+)`\) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", re.MULTILINE)
GOAL = 0.92


def test_the_readme_is_short():
    assert len(README.split()) <= 900


def measured(values: np.ndarray) -> tuple[float, float]:
    """Return the mean over seeds and half of its 95 % interval, by Student's t."""
    half = stats.t.ppf(0.975, len(values) - 1) * stats.sem(values)
    return values.mean(), half


def is_rounded(cell: str, mean: float, half: float) -> bool:
    """Return whether a cell says the mean and its interval, each rounded to the digits shown."""
    shown, _, interval = cell.partition(" ± ")
    for text, value in ((shown, mean), (interval or "0", half)):
        digits = len(text.partition(".")[2])
        if not math.isclose(float(text), value, abs_tol=0.5001 * 10**-digits):
            return False
    return True


def test_the_table_has_the_numbers_of_the_committed_runs():
    rows = ROW.findall(README)
    assert sorted(name for _, name, *_ in rows) == sorted(COMPARED)
    rounds = np.array(RUNS["rounds"])
    for label, name, accuracy, to_goal, sent in rows:
        assert label == registry.variants()[name].label
        seeds = np.array(RUNS["accuracy"][name])
        assert (seeds.max(axis=1) >= GOAL).all()
        reached = rounds[(seeds >= GOAL).argmax(axis=1)].astype(float)
        megabytes = reached * RUNS["bytes"][name] / rounds[-1] / 1e6
        assert is_rounded(accuracy, *measured(seeds[:, -1])), name
        assert is_rounded(to_goal, *measured(reached)), name
        assert is_rounded(sent, *measured(megabytes)), name
    ends = [np.mean(RUNS["accuracy"][name], axis=0)[-1] for _, name, *_ in rows]
    assert ends == sorted(ends, reverse=True), "the best stands first"


def test_fedda_sends_twice_as_much_as_fedopt():
    """So says the sentence below the table, and that FedOpt needs the least to reach the goal."""
    assert "FedDA sends twice as much per round" in README
    for optimiser in ("sgdm", "adam", "adagrad"):
        ours, theirs = (RUNS["bytes"][f"{name}-{optimiser}"] for name in ("fedda", "fedopt"))
        assert round(ours / theirs, 2) == 2
    sent = {name: float(cell.split()[0]) for _, name, _, _, cell in ROW.findall(README)}
    fedopt = [sent.pop(name) for name in [*sent] if name.startswith("fedopt")]
    assert max(fedopt) < min(sent.values())


def test_the_readme_counts_the_algorithms():
    assert f"{len(algorithms.names())} algorithms" in README
