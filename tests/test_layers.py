"""The layers: the contract, which `make lint` checks, and the page about them."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def lint(folder):
    """Run import-linter on a copy of the repository."""
    packages = [str(folder / name) for name in ("src", "reproduction", "benchmarks")]
    return subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as lint; lint()"],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(packages)},
        capture_output=True,
        text=True,
    )


def test_an_import_that_points_up_breaks_the_contract(tmp_path):
    for name in ("src", "reproduction", "benchmarks"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("results"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    sound = lint(tmp_path)
    assert sound.returncode == 0, sound.stdout
    with open(tmp_path / "src/fedda/core/tree.py", "a") as file:
        file.write("\nfrom fedda.storage import files\n")
    broken = lint(tmp_path)
    assert broken.returncode == 1
    assert "fedda.core.tree -> fedda.storage.files" in broken.stdout


PAGE = (ROOT / "docs/how_it_is_built.md").read_text()


def test_the_page_lists_the_layers_in_their_order():
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = [
        {name.strip().rpartition(".")[2] for name in layer.split("|")}
        for layer in contract["contracts"][0]["layers"][1:]
    ]
    table = PAGE.partition("| package |")[2].partition("\n\n")[0]
    rows = [re.findall(r"`(\w+)(?:/|\.py)`", row.split("|")[1]) for row in table.splitlines()[3:]]
    assert [set(row) for row in rows] == layers


def test_every_file_that_the_page_names_is_there():
    named = re.findall(r"`([\w/]+(?:/|\.py))`", PAGE)
    assert len(named) > 40
    missing = [
        name
        for name in named
        if not (ROOT / name).exists() and not (ROOT / "src/fedda" / name).exists()
    ]
    assert not missing
