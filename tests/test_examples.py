"""The examples are programs, and they run; so are those in docstrings."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from helpers.pages import ROOT, blocks

pytestmark = pytest.mark.usefixtures("in_quick_processes")


def run_plainly(code: str, cwd: Path) -> str:
    """No strictness here: an example must run in a plain session, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-W", "error::DeprecationWarning:fedda", "-c", code],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda p: p.stem)
def test_example(path: Path, tmp_path: Path):
    if "import torch" in path.read_text() and not find_spec("torchax"):
        pytest.skip("torchax is not installed: make torch")
    printed = run_plainly(path.read_text(), tmp_path)
    assert printed.strip()
    assert len(path.read_text().splitlines()) <= 70, "an example is short"


@pytest.mark.slow
def test_a_queue_of_results_as_contributors_fill_it(tmp_path: Path):
    (commands,) = (block.text for block in blocks(ROOT / "CONTRIBUTING.md", "sh"))
    lines = [f"digits --only {each}" for each in ("fedavg", "fedda-sgdm", "fedavg --seeds 2")]
    (tmp_path / "queue.txt").write_text("".join(f"{line}\n" for line in lines))
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", commands],
        cwd=tmp_path,
        env=os.environ | {"PATH": path},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert len(list((tmp_path / "reproduction/results/cells/digits").glob("*.json"))) == 3
    assert "2 of 25 runs" in (tmp_path / "reproduction/results/README.md").read_text()


# The packages that the examples of some modules need.
OPTIONAL = {
    "fedda.flower": "flwr",
    "fedda.models.equinox": "equinox",
    "fedda.models.torch": "torchax",
    "fedda.torch": "torch",
    "fedda.transforms.privacy": "dp_accounting",
}


def test_the_examples_of_docstrings_are_right(tmp_path: Path):
    """In one process: importing JAX takes longer than most examples."""
    paths = [path for path in (ROOT / "src").rglob("*.py") if ">>>" in path.read_text()]
    names = [".".join(path.relative_to(ROOT / "src").with_suffix("").parts) for path in paths]
    absent = [name for name, package in OPTIONAL.items() if find_spec(package) is None]
    modules = sorted(name.removesuffix(".__init__") for name in names)
    modules = [name for name in modules if not name.startswith(tuple(absent))]
    code = f"""
import doctest, importlib
for name in {modules}:
    failed, attempted = doctest.testmod(importlib.import_module(name))
    print(f"{{name}}: {{attempted}} attempted, {{failed}} failed")
"""
    printed = run_plainly(code, tmp_path)
    assert len(re.findall(": [1-9][0-9]* attempted, 0 failed", printed)) == len(modules), printed
