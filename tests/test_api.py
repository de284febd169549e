"""The front door: signatures, their documentation and the pages say the same."""

import ast
import importlib.util
import inspect
import re
import typing
from pathlib import Path

import pytest

import fedda
from fedda import api
from fedda.simulate.settings import Training
from helpers.pages import ROOT, blocks

FUNCTIONS = [fedda.run, fedda.run_grid]
OF_ALL = {"algorithm", "model", "clients", "loss"}

functions = pytest.mark.parametrize("function", FUNCTIONS, ids=lambda each: each.__name__)


def keywords(function) -> dict[str, object]:
    """The keywords of a function with their defaults, without those of the algorithm."""
    return {
        name: parameter.default
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }


@functions
def test_every_keyword_has_a_type_and_only_hyper_parameters_are_free(function):
    parameters = inspect.signature(function).parameters
    types = typing.get_type_hints(function)
    assert typing.Any not in [types[name] for name in parameters]
    free = [p for p in parameters.values() if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    assert [(p.name, types[p.name]) for p in free] == [("hyper", float | str)]


@functions
def test_help_documents_every_argument_in_order(function):
    text = inspect.getdoc(function)
    args = text.partition("\nArgs:\n")[2].partition("\n\nReturns:\n")[0]
    documented = re.findall(r"^    \**(\w+): ", args, re.MULTILINE)
    assert documented == list(inspect.signature(function).parameters)
    assert re.findall(r"^(\w+):$", text, re.MULTILINE) == ["Args", "Returns", "Raises", "Example"]


def test_run_and_run_grid_share_their_keywords_and_defaults():
    shared = Training._field_defaults
    assert set(Training._fields) == {*OF_ALL, *shared}
    for function in FUNCTIONS:
        assert shared.items() <= keywords(function).items()
    assert set(keywords(fedda.run)) == {*shared, *api.OF_RUN}
    assert set(keywords(fedda.run_grid)) == {*shared, *api.OF_GRID}


def test_the_table_of_keywords_has_each_and_its_default():
    text = (ROOT / "docs/training.md").read_text().partition("| keyword of `fedda.run` |")[2]
    rows = [line.split(" | ") for line in text.partition("\n\n")[0].splitlines()[2:]]
    found = {}
    for names, defaults, _ in rows[:-1]:
        values = [ast.literal_eval(value) for value in re.findall(r"`([^`]+)`", defaults)]
        found |= dict(zip(re.findall(r"`(\w+)`", names), values, strict=True))
    assert rows[-1][0].startswith("| `client_lr`"), "the algorithm's own come last"
    assert found == keywords(fedda.run)


def imports(path: Path) -> set[str]:
    """What a program or a page imports of fedda, as `module` or `module.name`."""
    is_program = path.suffix == ".py"
    codes = [path.read_text()] if is_program else [b.text for b in blocks(path, "python")]
    found = set()
    for node in (node for code in codes for node in ast.walk(ast.parse(code))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "fedda":
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def test_the_public_names_are_all_there_is():
    assert sorted(fedda.__all__) == fedda.__all__
    for name in fedda.__all__:
        assert inspect.getdoc(getattr(fedda, name)), name


PAGES = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/**/*.py")]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_pages_and_examples_import_documented_names(path: Path):
    """None of them is private, and the module says what it is for."""
    for name in imports(path):
        assert not any(part.startswith("_") for part in name.split(".")), name
        owner = importlib.import_module(name.rpartition(".")[0])
        is_module = hasattr(owner, "__path__") and importlib.util.find_spec(name) is not None
        assert (importlib.import_module(name) if is_module else owner).__doc__, name
