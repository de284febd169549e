"""Imports point one way: what a module may know of the rest of the package."""

import ast
import graphlib
from pathlib import Path

import pytest

import fedda

ROOT = Path(fedda.__file__).parent
FILES = sorted(path for path in ROOT.rglob("*.py") if path != ROOT / "__init__.py")

# A file, or a folder with all its files, and what it may import besides its own folder. The package
# itself, `fedda`, stands for all that its __init__ imports.
ROUND = "core data.shards errors local losses models task tree"
MAY_IMPORT = {
    "errors": "",
    "schema": "errors",
    "files": "interrupts schema",
    "free_memory": "",
    "inputs": "errors",
    "interrupts": "",
    "losses": "errors",
    "markdown": "",
    "terminal": "errors interrupts",
    "tree": "",
    "data": "errors free_memory",
    "models": "errors",
    "results": "errors files schema",
    "page": "files results",
    "report": "errors files markdown page results",
    "portrait": "data errors files",
    "core": "tree",
    "task": "core data.shards models tree",
    "local": "core data.shards task tree",
    "algorithms": "core data.shards errors local task tree",
    "codecs": "core data.shards errors local models task tree",
    "privacy": "codecs core data.shards errors local task tree",
    "cohort": "task tree",
    "devices": "errors tree",
    "processes": "errors interrupts",
    "memory": "tree",
    "simulate": "cohort core data.feed data.shards devices interrupts memory models task tree",
    "together": "data.feed errors free_memory interrupts simulate tree",
    "own_algorithm": "core data.shards errors task tree",
    "own_problem": "data.feed data.shards errors losses models simulate task",
    "continued": "errors memory simulate tree",
    "api": "algorithms cohort continued core data.feed data.shards devices errors models "
    "own_algorithm own_problem simulate task together tree",
    "checkpoint": "free_memory interrupts tree",
    "config": "algorithms errors",
    "flower": f"{ROUND} algorithms api checkpoint cohort files privacy simulate",
    "tasks": "config data errors inputs losses models task",
    "torch": "algorithms core data.shards errors flower local models task tree",
    "experiment": (
        "api checkpoint config continued devices errors fedda files models processes results "
        "simulate tasks tree"
    ),
    "data_cli": "config data errors portrait tasks terminal",
    "paper": (
        "algorithms api checkpoint config errors experiment files free_memory interrupts markdown "
        "page results schema simulate tasks together tree"
    ),
    "reproduce": "config errors experiment interrupts paper tasks",
    "reproduce_cli": "config errors paper reproduce terminal",
    "sweep": "algorithms api config errors experiment files results schema simulate together",
    "tracking": "errors",
    "heatmap": "files",
    "halving": "config errors sweep",
    "sweep_cli": "config errors halving heatmap sweep terminal",
    "machine": "models",
    "bench": "api data.shards devices machine models simulate task tree",
    "bench_cases": "bench data inputs losses models task tasks",
    "bench_cli": "bench bench_cases devices errors experiment files machine terminal",
    "theory": "api config data errors files losses models simulate",
    "theory_cli": "errors experiment files terminal theory",
    "progress": "experiment terminal",
    "compare": "algorithms config errors experiment files progress",
    "cli": (
        "algorithms bench_cli compare config continued data data_cli devices errors experiment "
        "fedda processes progress report reproduce_cli sweep_cli terminal theory_cli tracking"
    ),
    "__main__": "cli",
}


def module_name(path):
    """`data.shards` for data/shards.py, `data` for data/__init__.py."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(part for part in parts if part != "__init__")


MODULES = {module_name(path) for path in FILES}


def imports(text):
    """The modules of this package that a file imports, wherever in the file it does."""
    names = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                is_module = whole.removeprefix("fedda.") in MODULES
                names.add(whole if is_module else node.module)
    ours = {name for name in names if name.partition(".")[0] == "fedda"}
    return {name.removeprefix("fedda.") for name in ours}


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_a_module_imports_only_what_it_may(path):
    owner, _, _ = module_name(path).partition(".")
    assert owner in MAY_IMPORT, f"say in MAY_IMPORT what {owner} may import"
    allowed = [owner, *MAY_IMPORT[owner].split()]
    wrong = [
        name
        for name in imports(path.read_text())
        if not any(name == other or name.startswith(f"{other}.") for other in allowed)
    ]
    assert not wrong


def test_the_rules_themselves_point_one_way():
    graph = {
        owner: {name.partition(".")[0] for name in allowed.split()}
        for owner, allowed in MAY_IMPORT.items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


def test_all_kinds_of_import_are_found():
    text = """
import fedda
import fedda.core as c, os
from fedda import tree, run
from fedda.data.shards import Shard
from fedda.data import digits
def late():
    from fedda.models import from_nnx
"""
    assert imports(text) == {"fedda", "core", "tree", "data.shards", "data.digits", "models"}
