"""The committed vectors are what the references give, without the library."""

import json
import os
import re
import subprocess
import sys

import numpy as np

from conformance.reader import FOLDER, first_difference, read_vectors
from conformance.references import REFERENCES, run
from helpers.pages import ROOT, blocks


def test_the_vectors_are_generated_again_without_the_library(tmp_path):
    code = (
        "import pathlib, sys; from conformance import generate; "
        f"generate.main(pathlib.Path({str(tmp_path)!r})); "
        "sys.exit(bool({'jax', 'fedda'} & {name.partition('.')[0] for name in sys.modules}))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env=os.environ)
    committed, made = ({path.name: path for path in f.glob("*.json")} for f in (FOLDER, tmp_path))
    assert committed.keys() == made.keys()
    assert committed["problem.json"].read_text() == made["problem.json"].read_text()
    for name in made.keys() - {"problem.json"}:
        old, new = (json.loads(folder[name].read_text())["cases"] for folder in (committed, made))
        for one, other in zip(old, new, strict=True):
            settings = ({k: v for k, v in case.items() if k != "rounds"} for case in (one, other))
            assert next(settings) == next(settings)
            # Another processor's exp and matrix product may round differently.
            assert first_difference(one["rounds"], other["rounds"], 1e-14) is None


def test_a_vector_is_in_float64_and_moves_the_model():
    for vector in read_vectors():
        models = [np.array(state["params"]) for state in vector.rounds]
        assert all(np.isfinite(model).all() for model in models)
        assert min(np.abs(np.diff(models, axis=0)).max((1, 2))) > 1e-3, vector
        assert (np.array(models) != np.array(models, np.float32)).any()


def without_sends(vector):
    options = {name: value for name, value in vector.options.items() if name != "sends"}
    return vector._replace(name="", options=options, rounds=[])


def test_no_two_vectors_of_an_algorithm_are_equal():
    """But for `sends`, which changes the messages and not the numbers."""
    for vector in read_vectors():
        for other in read_vectors(vector.algorithm):
            if vector.name < other.name and without_sends(vector) != without_sends(other):
                models = [{"params": state["params"]} for state in other.rounds]
                assert first_difference(vector.rounds, models, 1e-4), (vector, other.name)


def test_a_difference_names_the_quantity_before_the_model():
    (vector,) = (each for each in read_vectors("fedda-adam") if each.name == "default")
    rounds = json.loads(json.dumps(vector.rounds))
    for name in ("params", "second"):
        rounds[1][name][2][0] += 1e-6
    found = first_difference(vector.rounds, rounds)
    assert (found.round, found.quantity) == (2, "second")
    assert str(found).startswith("second after round 2 differs by ")
    assert first_difference(vector.rounds, vector.rounds[:4]).quantity == "rounds"


def test_the_example_of_the_page_runs(capsys):
    (block,) = blocks(ROOT / "conformance" / "README.md", "python")

    def train(problem, vector):
        visits = problem.visits(vector.schedule, vector.reduction)
        return run(REFERENCES[vector.algorithm], problem.weights, visits, **vector.hyper)

    exec(block.text, {"train": train})
    assert capsys.readouterr().out == "fedavg: default None\nfedavg: sums None\n"


def test_the_page_names_every_entry_of_a_state():
    text = (ROOT / "conformance" / "README.md").read_text()
    named = set(re.findall("`(\\w+)`", text))
    assert {name for vector in read_vectors() for name in vector.rounds[0]} <= named
