"""What the command does without JAX: help, wrong settings, completion."""

import json
import subprocess
import sys

import pytest

from fedda import algorithms

HEAVY = ("jax", "jaxlib", "flax", "sklearn", "scipy", "pandas", "matplotlib", "flwr", "torch")
# Calls the command with several command lines in one process, and prints what was imported.
CALLS = """
import json, os, sys
from fedda.cli.main import main
for line, environment in json.loads(sys.argv[1]):
    os.environ.update(environment)
    sys.argv = ["fedda", *line]
    try:
        main()
    except SystemExit:
        pass
    print("----", flush=True)
print(json.dumps(sorted(sys.modules)))
"""


def called(*lines: tuple[list[str], dict[str, str]]) -> tuple[list[str], set[str]]:
    """Return the outputs of some command lines, and the modules that they imported."""
    command = [sys.executable, "-c", CALLS, json.dumps(lines)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    *outputs, modules = done.stdout.split("----\n")
    return [f"{output}{done.stderr}" for output in outputs], set(json.loads(modules))


@pytest.fixture(scope="module", autouse=True)
def _known_names(tmp_path_factory):
    """Let an earlier command have written the names of the algorithms into a cache of its own."""
    from fedda.tasks import names

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        names.algorithms.cache_clear()
        names.algorithms()
        yield


def test_help_and_wrong_settings_do_not_import_jax():
    lines = ["--help", "run --help", "compare --help", "data --help", "--version", "rn"]
    lines += ["run lr=0.1", "run algorithm=fedada", "run task=digit", "compare fedavg epochz=1"]
    lines += ["run rounds=0", "compare cohort=0"]
    outputs, modules = called(*((line.split(), {}) for line in lines))
    assert "Commands" in outputs[0]
    assert "client_lr" in outputs[6]
    assert not modules & set(HEAVY)


def bash(words: str) -> dict[str, str]:
    """Return what Typer's script for bash passes on, which takes `=` for a word."""
    number = len(words.replace("=", " = ").split()) - (0 if words.endswith(" ") else 1)
    asked = {"COMP_WORDS": words.replace("=", " = "), "COMP_CWORD": str(number)}
    return {"_FEDDA_COMPLETE": "complete_bash", **asked}


def zsh(words: str) -> dict[str, str]:
    return {"_FEDDA_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": words}


def test_words_are_completed_in_bash_without_jax():
    expected = {
        "fedda co": {"compare"},
        "fedda run cl": {"client_lr=", "clients="},
        "fedda run client_": {"client_lr=", "client_lr=0.1"},  # two, so that no space follows
        "fedda run algorithm=fedda-": {"fedda-sgdm", "fedda-adam", "fedda-adagrad"},
        "fedda run algorithm=fedprox mu": {"mu=", f"mu={algorithms.defaults('fedprox')['mu']}"},
        "fedda run algorithm=fedavg mu": set(),
        "fedda run task=emn": {"emnist", "emnist-autoencoder"},
        "fedda run local_unit=": {"steps", "epochs"},
        "fedda run units=": {"grad", "delta"},
        "fedda sweep rounds=5 late": {"late_every=", "late_every=0"},
        "fedda compare fedavg fedp": {"fedprox"},
        "fedda compare algor": set(),
        "fedda algorithms fedda-a": {"fedda-adam", "fedda-adagrad"},
        "fedda data show dig": {"digits"},
        "fedda data fetch cif": {"cifar100"},
    }
    outputs, modules = called(*(([], bash(words)) for words in expected))
    assert [set(output.split()) for output in outputs] == list(expected.values())
    assert not modules & set(HEAVY)


def test_words_are_completed_in_zsh_with_their_meaning():
    outputs, modules = called(([], zsh("fedda run algorithm=fedav")), ([], zsh("fedda run cl")))
    assert '"algorithm=fedavg":"FedAvg"' in outputs[0]
    assert '"clients=":"by default 100"' in outputs[1]
    assert not modules & set(HEAVY)


def test_names_are_read_again_when_an_algorithm_changes(monkeypatch, tmp_path):
    from fedda.tasks import names

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = names.algorithms.__wrapped__()
    kept = tmp_path / "fedda" / "names.json"
    stale = json.loads(kept.read_text())
    stale["algorithms"] = {}
    kept.write_text(json.dumps(stale))
    assert names.algorithms.__wrapped__() == {}, "the file is used"
    monkeypatch.setattr(names, "_stamp", lambda: ["another"])
    assert names.algorithms.__wrapped__().keys() == first.keys()
    kept.write_text("[")
    assert names.algorithms.__wrapped__().keys() == first.keys()


def test_the_public_names_are_imported_when_they_are_used():
    code = "import fedda, sys; assert 'jax' not in sys.modules; fedda.run; fedda.core.algorithm"
    code += "; from fedda import *; Algorithm; assert 'run_grid' in dir(fedda)"
    subprocess.run([sys.executable, "-c", code], check=True)
    import fedda

    with pytest.raises(AttributeError, match="module 'fedda' has no attribute 'ran'"):
        _ = fedda.ran
