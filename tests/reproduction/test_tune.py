"""The script that tunes: as many points for every method, and presets that its results give."""

import importlib.util
import json
import math
from pathlib import Path

import pytest

from fedda import algorithms
from fedda.tasks import config
from fedda.tasks.config import PRESETS

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "reproduction" / "results" / "tuning"


@pytest.fixture(scope="module")
def tune():
    spec = importlib.util.spec_from_file_location(
        "tune", ROOT / "reproduction" / "fedda_reproduction" / "tune.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_method_has_as_many_points(tune):
    for task, study in tune.STUDIES.items():
        names = study.algorithms or algorithms.names()
        counts = {name: math.prod(map(len, study.grid_of(name).values())) for name in names}
        assert len(set(counts.values())) == 1, f"{task}: {counts}"


@pytest.mark.parametrize("task", ["emnist", "cifar100"])
def test_grids_hold_the_published_rates_and_longer_momentum(tune, task):
    """But for client rates on either side of the published one, where four settings vary."""
    for name in tune.OF_THE_PAPER:
        grid, base = tune.STUDIES[task].grid_of(name), tune.base(task, name).chosen
        beside = task == "emnist" and name in ("fedda-adam", "fedda-adagrad")
        for rate in grid.keys() & ({"server_lr"} if beside else {"client_lr", "server_lr"}):
            assert any(math.isclose(base[rate], each, rel_tol=0.01) for each in grid[rate])
    assert tune.STUDIES[task].grid_of("fedda-sgdm")["beta1"] == [0.9, 0.99]


def test_everyone_does_as_much_work(tune):
    runs = [tune.base("emnist", name) for name in tune.OF_THE_PAPER]
    assert {(run.local_work, run.local_unit) for run in runs} == {(1, "epochs")}


def test_presets_are_what_tuning_found(tune):
    tuned = [path.name for path in FOLDER.iterdir()]
    assert tuned
    for task in tuned:
        path = PRESETS / f"{task}-{config.resolve({'task': task}).model}.toml"
        assert path.read_text() == tune.preset(task, FOLDER)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*/*.json")), ids=lambda path: path.stem)
def test_the_best_has_the_lowest_training_loss_of_all_points(tune, path):
    found = json.loads(path.read_text())
    grid = tune.STUDIES[path.parent.name].grid_of(path.stem)
    assert found["grid"] == grid
    assert len(found["ranking"]) == math.prod(map(len, grid.values()))
    assert found["algorithm"] == path.stem
    usable = [each for each in found["ranking"] if not each["failures"]]
    losses = [each["train_loss"] for each in usable if each["train_loss"] is not None]
    assert found["best"]["train_loss"] == min(losses)


def test_a_wrong_name_is_refused_before_anything_is_trained(tune, tmp_path, monkeypatch, capsys):
    words = ["tune.py", "emnist", "--only", "fedavg,fedavgg", "--results", str(tmp_path)]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit):
        tune.main()
    assert (
        "unknown algorithm to tune on emnist 'fedavgg'. Did you mean fedavg"
        in capsys.readouterr().err
    )
    assert not list(tmp_path.iterdir())


def test_a_method_is_tuned_once(tune, tmp_path, monkeypatch, capsys):
    """On few rounds of the digits: what is written chooses the preset, and is not made again."""
    monkeypatch.setattr(
        tune,
        "STUDIES",
        {"digits": tune.Study(2, (5,), lambda name: {"client_lr": [0.03, 0.1, 0.3]})},
    )
    tune.tune("digits", "fedavg", tmp_path)
    assert "fedavg: {'client_lr': 0.3}" in capsys.readouterr().out
    summary = json.loads((tmp_path / "digits" / "fedavg.json").read_text())
    assert summary["seeds"] == [5]
    text = tune.preset("digits", tmp_path)
    assert "of 3 points for every algorithm" in text
    assert "client_lr = 0.3  # the end of the grid" in text
    tune.tune("digits", "fedavg", tmp_path)
    assert not capsys.readouterr().out
