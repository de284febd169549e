"""A report of results that Python holds, in whatever form and order a person has them."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest

import fedda
from fedda.errors import InputError

RNG = np.random.default_rng(0)
CLIENTS = [(RNG.normal(size=(n, 3)), RNG.integers(0, 2, n)) for n in (4, 7, 25)]
MODEL, LOSS = fedda.models.linear(3, 2), fedda.losses.cross_entropy
ACCURACY = fedda.losses.accuracy


@fedda.losses.lower_is_better
def wrong(outputs, y):
    return 1 - ACCURACY(outputs, y)


def trained(**settings) -> fedda.Result:
    usual = {"test": CLIENTS, "metrics": [ACCURACY], "rounds": 4, "eval_every": 2, "cohort": 2}
    return fedda.run("fedavg", MODEL, CLIENTS, LOSS, progress=False, **usual | settings)


@pytest.fixture(scope="module")
def result() -> fedda.Result:
    return trained()


def table_of(results, tmp_path: Path, **settings) -> str:
    page = fedda.report(results, tmp_path / "report", **settings)
    assert page.is_file()
    return (page.parent / "table.md").read_text()


def test_one_result_a_list_points_of_a_grid_and_labels(result: fedda.Result, tmp_path: Path):
    points = fedda.run_grid(
        *("fedavg", MODEL, CLIENTS, LOSS),
        grid={"client_lr": [0.1]}, seeds=[0, 1], rounds=2, cohort=2, progress=False,
    )  # fmt: skip
    assert "| fedavg |" in table_of(result, tmp_path)
    for given in (points, [point.result for point in points], {"fedavg": points}):
        assert "| fedavg | 2 |" in table_of(given, tmp_path)


def test_results_are_compared_by_what_all_of_them_measured(result: fedda.Result, tmp_path: Path):
    both = trained(metrics=[wrong, ACCURACY], seed=1)
    without, untested = trained(metrics=(), seed=2), trained(test=None, metrics=(), seed=3)
    for others, metric, way in (
        ([both], "accuracy", "Higher"),
        ([both, without], "loss", "Lower"),
        ([both, without, untested], "train_loss", "Lower"),
    ):
        table = table_of({"a": result, **dict(zip("bcd", others, strict=False))}, tmp_path)
        assert f"| seeds | {metric} | last 2 |" in table
        assert f"{way} is better" in table
        assert "nan" not in table


def test_a_marked_metric_is_better_if_it_is_lower(result: fedda.Result, tmp_path: Path):
    marked = trained(metrics=[wrong], directory=tmp_path / "run")
    assert marked.settings["lower_is_better"] == ["wrong"]
    for each in (marked, fedda.load(tmp_path / "run")):
        assert "Lower is better" in table_of(each, tmp_path)
        assert "Higher is better" in table_of(each, tmp_path, higher_is_better=True)
    assert "Higher is better" in table_of(result, tmp_path)


def test_what_is_no_result_is_refused_with_advice(result: fedda.Result, tmp_path: Path):
    for given in (["runs/mine"], "runs/mine", {"a": "runs/mine"}, [result, None], 5, {"a": 5}):
        with pytest.raises(InputError, match=r"expected results of fedda\.run.*fedda\.load reads"):
            fedda.report(given, tmp_path)
    for nothing in ([], {}, {"a": []}):
        with pytest.raises(InputError, match="got no results"):
            fedda.report(nothing, tmp_path)
    same = dataclasses.replace(result)
    with pytest.raises(InputError, match="two results of fedavg with the same settings and seed 0"):
        fedda.report([result, same], tmp_path)
