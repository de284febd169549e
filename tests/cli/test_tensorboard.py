"""What TensorBoard itself reads from our event files."""

import sys

import jax
import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import fedda
from fedda.cli import main
from fedda.cli.tensorboard import event_file
from fedda.core import losses
from fedda.errors import InputError

# Of tensorboard and its dependencies, on the newest Python and NumPy.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


def scalars(directory):
    """Of every name, the rounds and values that TensorBoard would show."""
    events = EventAccumulator(str(directory)).Reload()
    return {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }


def test_tensorboard_shows_the_history(tmp_path):
    rng = np.random.default_rng(0)
    clients = [(rng.normal(size=(5, 3)), rng.normal(size=(5, 2))) for _ in range(3)]
    model = fedda.Model(
        lambda key: {"w": jax.numpy.zeros((3, 2))}, lambda params, x: x @ params["w"]
    )
    result = fedda.run(
        "fedavg", model, clients, losses.squared_error, rounds=4, eval_every=2, cohort=2,
        test=clients[0], on_evaluation=event_file(tmp_path),
    )  # fmt: skip
    shown = scalars(tmp_path)
    assert set(shown) == set(result.history[0]) - {"round"}
    for name, points in shown.items():
        rows = [(row["round"], row[name]) for row in result.history]
        np.testing.assert_allclose(points, rows, rtol=1e-6)  # which are float32 there; with a NaN


def test_a_continued_run_replaces_what_it_repeats(tmp_path):
    for start in (0, 2):
        track = event_file(tmp_path)
        for number in range(start, 4):
            track({"round": number, "loss": 10.0 * start + number, "nothing": None})
    assert scalars(tmp_path) == {"loss": [(0, 0.0), (1, 1.0), (2, 22.0), (3, 23.0)]}


def test_the_command(tmp_path, monkeypatch):
    words = ["task=digits", "model=linear", "algorithm=fedavg", "rounds=2", "eval_every=1"]
    directory = tmp_path / "run"
    monkeypatch.setattr(
        sys, "argv", ["fedda", "run", *words, "--quiet", "--tensorboard", "--out", str(directory)]
    )
    with pytest.raises(SystemExit) as stop:
        main.main()
    assert not stop.value.code
    assert [step for step, _ in scalars(directory / "tensorboard")["accuracy"]] == [0, 1, 2]


def test_what_is_missing_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(InputError, match=r"pip install 'fedda\[tensorboard\]'"):
        event_file(tmp_path)
