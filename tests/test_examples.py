"""The README and the examples are programs, and they run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from fedda import algorithms, cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


@pytest.fixture(autouse=True)
def as_for_users(monkeypatch: pytest.MonkeyPatch):
    """No strictness here: an example must run in a plain session, in a process of its own."""
    monkeypatch.delenv("XLA_FLAGS", raising=False)


def run_plainly(code: str, cwd: Path) -> str:
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
    printed = run_plainly(path.read_text(), tmp_path)
    assert printed.strip()
    assert len(path.read_text().splitlines()) <= 70, "an example is short"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_readme_python_blocks(tmp_path: Path):
    assert blocks("python")
    for block in blocks("python"):
        run_plainly(block, tmp_path)
    own = next(block for block in blocks("python") if "fedda.Model(" in block)
    assert len([line for line in own.splitlines() if line.strip()]) <= 10, "in ten lines"


def test_readme_commands_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Every `fedda ...` line runs, in a short form; every `make` target exists."""
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    makefile = (ROOT / "Makefile").read_text()
    monkeypatch.chdir(tmp_path)
    ran = 0
    for line in lines:
        words = line.split("#")[0].split()
        if words[:1] == ["make"]:
            assert re.search(rf"^{words[1]}:", makefile, re.MULTILINE), line
        if words[:1] == ["fedda"]:
            if words[1] in ("run", "compare") and "--resume" not in words:
                words += ["rounds=2", "eval_every=1", "model=linear", "--quiet"]
            monkeypatch.setattr(sys, "argv", words)
            with pytest.raises(SystemExit) as stop:
                cli.main()
            assert not stop.value.code, line
            ran += 1
    assert ran >= 5


def test_readme_table_is_the_committed_one():
    """The table is copied from the file that `fedda compare` wrote, not typed."""
    table = (ROOT / "docs" / "digits" / "table.md").read_text().split("\n\n")[0]
    assert table.strip() in README


def test_readme_lists_every_algorithm_with_its_cost():
    for name, make in algorithms.makers().items():
        down, up = algorithms.communication(name)
        assert f"| `{name}` | {down} / {up} | {make.__doc__} |" in README


def test_the_source_has_no_doctests_that_nobody_runs():
    for path in (ROOT / "src").rglob("*.py"):
        assert ">>>" not in path.read_text(), path
