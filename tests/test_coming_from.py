"""The projects of the page for users of other frameworks: few lines change, and they run.

Those in pfl-research and FedJAX are only compared with the page: their packages are not installed.
"""

import difflib
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from helpers.pages import ROOT, blocks

PROJECTS = ROOT / "examples" / "coming-from"
PAGE = ROOT / "docs" / "coming_from.md"
# The most lines of code that each needs in place of those that it had.
MOST = {"fedjax": 3, "pfl": 3, "pytorch": 4}

pytestmark = pytest.mark.usefixtures("in_quick_processes")


def changed_lines(name: str) -> list[str]:
    """Return the lines that differ, with a sign in front, without blank lines."""
    before, after = (
        [line for line in (PROJECTS / f"{name}_{when}.py").read_text().splitlines() if line.strip()]
        for when in ("before", "after")
    )
    lines = [*difflib.unified_diff(before, after, n=0, lineterm="")][2:]
    return [line for line in lines if not line.startswith("@@")]


@pytest.mark.parametrize("name", MOST)
def test_few_lines_change_and_the_page_shows_them(name: str):
    lines = changed_lines(name)
    added, removed = (sum(line.startswith(sign) for line in lines) for sign in "+-")
    assert 0 < added <= MOST[name] < removed
    (shown,) = (block for block in blocks(PAGE, "diff") if block.caption == name)
    assert shown.text.splitlines() == lines


def test_every_project_is_on_the_page():
    names = {re.sub(r"_(before|after)\.py$", "", path.name) for path in PROJECTS.glob("*")}
    assert names == {*MOST} == {block.caption for block in blocks(PAGE, "diff")}


@pytest.mark.parametrize(
    "project", ["fedjax_after", "pfl_after", "pytorch_after", "pytorch_before"]
)
def test_the_projects_run(project: str, tmp_path: Path):
    if "fedjax" not in project and not find_spec("torchax"):
        pytest.skip("torchax is not installed: make torch")
    command = [sys.executable, str(PROJECTS / f"{project}.py")]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    accuracy = float(done.stdout.removeprefix("accuracy "))
    assert accuracy > 0.6, "it would be 0.1 without training"
