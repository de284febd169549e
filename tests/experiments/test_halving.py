"""Successive halving, the chosen preset, and the map of a sweep."""

import itertools
import json
import re

import numpy as np
import pytest

from fedda.errors import InputError
from fedda.experiments import halving, sweep
from fedda.report import heatmap
from fedda.tasks import config

SMALL = {"algorithm": "fedda-adam", "model": "linear", "clients": 12, "cohort": 3, "rounds": 12}
RATES = {"client_lr": [0.01, 0.1, 0.3], "eps": [1e-3, 1e-2, 1e-1]}


@pytest.fixture(scope="module")
def halved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("sweeps") / "halved"
    return directory, halving.halve(config.resolve(SMALL), RATES, 1, directory, 2)


def test_each_rung_trains_the_best_of_the_one_before_for_longer(halved):
    directory, summary = halved
    rungs = [*summary["rungs"], summary]
    # 9 points halve to 5, 3; a fourth rung would begin with 12 // 8 = 1 round, which is too few.
    assert [(each["rounds"], len(each["ranking"])) for each in rungs] == [(3, 9), (6, 5), (12, 3)]
    for before, after in itertools.pairwise(rungs):
        best = [point["hyper"] for point in before["ranking"][: len(after["ranking"])]]
        kept = [point["hyper"] for point in after["ranking"]]
        assert sorted(map(str, best)) == sorted(map(str, kept))
    assert summary["share_of_all_rounds"] == (3 * 9 + 6 * 5 + 12 * 3) / (12 * 9)
    losses = [point["train_loss"] for point in summary["ranking"]]
    assert losses == sorted(losses)
    assert json.loads((directory / "rung-2" / "summary.json").read_text())["best"]


def test_a_rung_is_a_sweep_of_that_length(halved, tmp_path):
    _, summary = halved
    rung = summary["rungs"][0]
    alone = sweep.run(config.resolve(SMALL | {"rounds": 3}), RATES, 1, tmp_path / "alone")
    assert alone["ranking"] == rung["ranking"]


def test_halving_goes_on_where_it_was(halved, tmp_path, monkeypatch):
    directory, summary = halved
    monkeypatch.setattr(sweep.api, "train_grid", lambda *rest: pytest.fail("nothing is left"))
    again = halving.halve(config.resolve(SMALL), RATES, 1, directory, 2)
    assert again["ranking"] == summary["ranking"]


def test_every_table_has_a_heading_and_says_what_its_means_are_over(fedda):
    """Rungs of 3, 6 and 12 rounds, of which 1, 3 and 6 are averaged: half of them, rounded down."""
    grid = [f"{name}={','.join(map(str, values))}" for name, values in RATES.items()]
    words = [f"{name}={value}" for name, value in SMALL.items()]
    code, out, _ = fedda("sweep", *words, "--grid", grid[0], "--grid", grid[1], "--halving", "2")
    assert code == 0
    printed = re.findall(r"^Points: (\d+)\. Rounds: (\d+)\.|last rounds \((\d+)\)", out, re.M)
    assert [tuple(filter(None, numbers)) for numbers in printed] == [
        *(("9", "3"), ("1",)),
        *(("5", "6"), ("3",)),
        *(("3", "12"), ("6",)),
    ]


def test_a_factor_below_two_is_refused(tmp_path):
    with pytest.raises(InputError, match="--halving must be at least 2, got 1"):
        halving.halve(config.resolve(SMALL), RATES, 1, tmp_path, 1)


def test_the_preset_is_the_best_point(halved):
    directory, summary = halved
    preset = config.resolve(config.read(directory / "preset.toml"))
    assert preset == config.resolve(SMALL | summary["best"]["hyper"])
    written = json.loads((directory / "summary.json").read_text())
    assert (written["ranking"], written["best"]) == (summary["ranking"], summary["best"])


def test_only_a_new_directory_or_its_own_is_written_to(halved, tmp_path):
    (tmp_path / "summary.json").write_text("of something else")
    with pytest.raises(InputError, match="or that of a sweep with --halving to finish"):
        halving.halve(config.resolve(SMALL), RATES, 1, tmp_path, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["summary.json"]
    with pytest.raises(InputError, match=r"is not empty\. Choose another directory"):
        sweep.run(config.resolve(SMALL), RATES, 1, halved[0])


def test_the_map_has_every_point_in_its_place(halved, tmp_path):
    _, summary = halved
    values = heatmap.table(summary, "client_lr", "eps")
    assert values.shape == (3, 3)
    assert np.isnan(values).sum() == 6, "those that earlier rungs dropped"
    for point in summary["ranking"]:
        row, column = (RATES[name].index(point["hyper"][name]) for name in RATES)
        assert values[row, column] == point["train_loss"]
    failed = summary | {"ranking": [summary["ranking"][0] | {"failures": 1}]}
    assert np.isnan(heatmap.table(failed, "client_lr", "eps")).all()
    assert heatmap.write(summary, tmp_path / "map.png")
    assert heatmap.write(failed, tmp_path / "empty.png")
    assert (tmp_path / "map.png").read_bytes()[:4] == b"\x89PNG"


def test_one_axis_is_no_map(halved, tmp_path):
    _, summary = halved
    one = summary | {"grid": {"client_lr": RATES["client_lr"], "eps": [1e-3]}}
    assert not heatmap.write(one, tmp_path / "map.png")
    assert not (tmp_path / "map.png").exists()
