"""The recipes are as short as we promise, and a run that is killed ends as one that is not.

That they run, and what they write, is tested with the other pages.
"""

import io
import os
import re
import signal
import subprocess
import sys
import tokenize
from pathlib import Path

import jax
import numpy as np
import pytest

import fedda
from helpers.pages import ROOT, blocks

DOCS = ROOT / "docs"
PAGE = (DOCS / "recipes.md").read_text()
TORCH_PAGE = (DOCS / "pytorch_models.md").read_text()
# The lines of code that each may have.
MOST = {
    "Train on your own arrays": 10,
    "Resume a run that was killed": 2,
    "Fifty hospitals in a CSV file": 15,
    "Load a trained model and predict": 3,
}


def program(title: str) -> str:
    """Return the one program of a recipe."""
    (section,) = (part for part in PAGE.split("\n## ") if part.startswith(f"{title}\n"))
    (_, code, _) = section.replace("```python\n", "```").split("```")
    return code


def lines_of_code(code: str) -> int:
    """Count the lines that hold more than comments and blanks."""
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    empty = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    found = [token for token in tokens if token.type not in (*empty, tokenize.ENDMARKER)]
    return len({line for token in found for line in range(token.start[0], token.end[0] + 1)})


def test_lines_of_code_are_counted_without_blanks_and_comments():
    assert lines_of_code('# one\n\nx = [\n    1,  # two\n\n]\ny = """\n\n"""\n') == 6


def test_recipes_are_short():
    assert PAGE.count("\n## ") == len(MOST)
    for title, most in MOST.items():
        assert 0 < lines_of_code(program(title)) <= most, title


def test_an_algorithm_of_ones_own_and_its_comparison_are_short():
    first, second, *_ = (block.text for block in blocks(DOCS / "own_algorithm.md", "python"))
    assert "fedda.Algorithm(" in first
    assert "seeds=range(5)" in second
    assert "fedda.report(" in second
    assert lines_of_code(first + second) <= 60


def test_training_a_pytorch_module_and_saving_it_is_short():
    _, first, _, second, *_ = re.split("```(?:python)?\n", TORCH_PAGE)
    assert "fedda.run" in first
    assert "torch.save" in second
    assert lines_of_code(first + second) <= 20


KILLED = """
import os, signal
from fedda.storage.directory import RunDirectory
usual = RunDirectory.log
def log(self, row):
    usual(self, row)
    if row["round"] == 370:
        os.kill(os.getpid(), signal.SIGKILL)
RunDirectory.log = log
"""


@pytest.mark.usefixtures("in_quick_processes")
def test_a_killed_run_continues_and_ends_as_one_that_was_not_interrupted(tmp_path: Path):
    """It dies after 370 rounds, and continues from the checkpoint of round 340.

    The 5th, 10th, ... evaluation has a checkpoint, and the first is at round 0: so have rounds 40,
    90, ... 340.
    """
    code = program("Train on your own arrays") + program("Resume a run that was killed")

    def run(code: str) -> int:
        environment = os.environ | {"FEDDA_COMPILE_CACHE": str(tmp_path / "compiled")}
        process = [sys.executable, "-c", code]
        done = subprocess.run(process, cwd=tmp_path, env=environment, capture_output=True)
        return done.returncode

    assert run(KILLED + code) == -signal.SIGKILL
    mine, whole = tmp_path / "runs" / "mine", tmp_path / "runs" / "whole"
    assert fedda.load(mine).history[-1]["round"] == 340
    assert run(code) == 0
    assert run(code.replace("runs/mine", "runs/whole")) == 0
    assert (mine / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    ours, theirs = fedda.load(mine), fedda.load(whole)
    assert ours.history[-1]["round"] == 1000
    jax.tree.map(np.testing.assert_array_equal, ours.params, theirs.params)
