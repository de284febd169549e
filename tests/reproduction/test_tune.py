"""The tuning study: as many points for every method, and presets that its results choose."""

import json
import math

import pytest

from fedda import algorithms
from fedda.tasks import config
from fedda_reproduction import tune
from fedda_reproduction.paper import methods
from helpers.finished_runs import RESULTS

FOLDER = RESULTS / "tuning"


def test_every_method_has_as_many_points():
    for task in tune.STUDIES:
        counts = {
            name: math.prod(map(len, grid.values())) for name, grid in tune.grids(task).items()
        }
        assert len(set(counts.values())) == 1, f"{task}: {counts}"
    assert tune.grids("digits").keys() == set(algorithms.names())
    for task in ("cifar100", "emnist", "stackexchange"):
        assert tune.grids(task).keys() == methods.settings("emnist").keys(), task


@pytest.mark.parametrize("task", ["emnist", "cifar100"])
def test_grids_hold_the_published_rates_and_longer_momentum(task):
    """But for client rates on either side of the published one, where four settings vary."""
    for name, grid in tune.grids(task).items():
        base = tune.base(task, name).chosen
        beside = task == "emnist" and name in ("fedda-adam", "fedda-adagrad")
        for rate in grid.keys() & ({"server_lr"} if beside else {"client_lr", "server_lr"}):
            assert any(math.isclose(base[rate], each, rel_tol=0.01) for each in grid[rate])
    assert tune.grids(task)["fedda-sgdm"]["beta1"] == [0.9, 0.99]


def test_everyone_does_as_much_work():
    runs = [tune.base("emnist", name) for name in tune.grids("emnist")]
    assert {(run.local_work, run.local_unit) for run in runs} == {(1, "epochs")}


def test_presets_are_what_tuning_chose():
    tuned = [path.name for path in FOLDER.iterdir()]
    assert tuned
    for task in tuned:
        path = config.PRESETS / f"{task}-{config.resolve({'task': task}).model}.toml"
        assert path.read_text() == tune.preset(task, FOLDER)


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*/*.json")), ids=lambda path: path.stem)
def test_the_best_has_the_lowest_training_loss_of_all_points(path):
    found = json.loads(path.read_text())
    grid = tune.grids(path.parent.name)[path.stem]
    assert found["grid"] == grid
    assert len(found["ranking"]) == math.prod(map(len, grid.values()))
    assert found["algorithm"] == path.stem
    usable = [each for each in found["ranking"] if not each["failures"]]
    losses = [each["train_loss"] for each in usable if each["train_loss"] is not None]
    assert found["best"]["train_loss"] == min(losses)


def test_a_wrong_name_is_refused_before_anything_is_trained(tmp_path, monkeypatch, capsys):
    words = ["tune.py", "emnist", "--only", "fedavg,fedavgg", "--results", str(tmp_path)]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit):
        tune.main()
    message = "unknown algorithm to tune on emnist 'fedavgg'. Did you mean fedavg"
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_method_is_tuned_once(tmp_path, monkeypatch, capsys):
    """On few rounds of the digits: what is written chooses the preset, and is not made again."""
    grids = [{"algorithms": ["fedavg"], "grid": {"client_lr": [0.03, 0.1, 0.3]}}]
    study = {"rounds": 2, "seeds": [5], "grids": grids}
    monkeypatch.setattr(tune, "STUDIES", {"digits": study})
    tune.tune("digits", "fedavg", tmp_path)
    assert "fedavg: {'client_lr': 0.3}" in capsys.readouterr().out
    summary = json.loads((tmp_path / "digits" / "fedavg.json").read_text())
    assert summary["seeds"] == [5]
    text = tune.preset("digits", tmp_path)
    assert "of 3 points" in text
    assert "client_lr = 0.3  # the end of the grid" in text
    tune.tune("digits", "fedavg", tmp_path)
    assert not capsys.readouterr().out
