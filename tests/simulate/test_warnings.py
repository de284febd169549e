"""Warnings: each comes where it should, says what was found, and stays away elsewhere."""

import json
import logging
import math
from pathlib import Path

import jax
import numpy as np
import pytest

import fedda
from fedda import tasks
from fedda.data.federation import from_clients
from fedda.experiments import run as experiment
from fedda.simulate import warnings
from fedda.tasks import config
from helpers import hospitals

RNG = np.random.default_rng(0)
LOSS, ACCURACY = fedda.losses.cross_entropy, fedda.losses.accuracy
CENTRES = 3 * RNG.normal(size=(3, 4))


def examples(count: int) -> tuple[np.ndarray, np.ndarray]:
    """Three classes that are far apart."""
    y = RNG.integers(0, 3, count)
    return CENTRES[y] + RNG.normal(size=(count, 4)), y


CLIENTS = [examples(30) for _ in range(4)]
TEST = examples(200)
NOISE = TEST[0], RNG.permutation(TEST[1])  # labels that do not belong to the examples
MODEL = fedda.models.linear(4, 3)
SETTINGS = {"test": TEST, "metrics": [ACCURACY], "rounds": 20, "cohort": 2, "progress": False}


def trained(model=MODEL, clients=CLIENTS, loss=LOSS, **settings) -> fedda.Result:
    return fedda.run("fedavg", model, clients, loss, **SETTINGS | settings)


# -------------------------------------------------------------------------------------- the scales


def about(*scales: float, rows: int = 200, dtype: str = "float32") -> list[str]:
    x = np.asarray(scales) * RNG.uniform(0, 1, (rows, len(scales)))
    x[0], x[1] = 0, scales  # so that column i spans scales[i]
    return warnings.about_data(from_clients([(x.astype(dtype), np.zeros(rows, int))]))


def test_features_of_very_different_scales_are_named():
    (text,) = about(1, 0.1, 2000, 0)
    assert "column 2 of x spans 2e+03, column 1 spans 0.1" in text
    assert "fedda.federation" in text
    assert about(1, 0.1, 90, 0) == about(5) == about(0) == []


def test_only_rows_of_floating_point_features_have_scales():
    assert about(1, 10**6, dtype="int32") == []
    images = RNG.normal(size=(9, 4, 4)) * np.geomspace(1, 1e9, 4)
    assert warnings.about_data(from_clients([(images, np.zeros(9, int))])) == []


def test_the_scales_are_those_of_a_sample(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(warnings, "MOST_VALUES", 100)
    seen = []
    usual = np.asarray
    monkeypatch.setattr(np, "asarray", lambda *a: seen.append(np.shape(a[0])) or usual(*a))
    x = np.ones((1000, 2), "float32") * np.arange(1000)[:, None] * [1, 2000]
    shards = from_clients([(x, np.zeros(1000, int))])
    seen.clear()
    assert len(warnings.about_data(shards)) == 1
    assert seen == [(50, 2)]


def test_a_rare_pixel_or_word_is_not_of_another_scale():
    """Standard deviations are: that of the rare column is 1/2,000 of the other's."""
    x = RNG.uniform(0, 1, (20_000, 2)).astype("float32")
    x[:, 1] = 0
    x[7, 1] = 1 / 50
    assert x.std(0).max() > 1000 * x.std(0).min()
    assert warnings.about_data(from_clients([(x, np.zeros(len(x), int))])) == []


@pytest.mark.parametrize("prepare", [True, False])
def test_a_federation_of_a_table_is_standardised(prepare: bool):
    """Creatinine spans about 2, income 70,000."""
    table = {name: [value or 1 for value in values] for name, values in hospitals.columns().items()}
    rows = np.array([hospital == "hospital 00" for hospital in table["hospital"]])
    columns = {name: np.asarray(table[name], float) for name in hospitals.NUMBERS}
    parts = {
        name: ({each: values[own] for each, values in columns.items()}, np.zeros(sum(own), int))
        for name, own in (("first", rows), ("others", ~rows))
    }
    made = fedda.federation(parts, target="numbers", prepare=prepare)
    found = warnings.about_data(from_clients(dict(zip(made.names, made.clients, strict=True))))
    assert len(found) == (0 if prepare else 1)


# ------------------------------------------------------------------------------- the end of a run


def test_an_accuracy_at_chance_is_named_with_the_share_of_the_commonest_label(caplog):
    assert trained().warnings == []
    assert not caplog.records
    poor = trained(test=NOISE)
    share = np.bincount(TEST[1]).max() / 200
    reached = poor.history[-1]["accuracy"]
    assert reached <= share + math.sqrt(share * (1 - share) / 200)  # or the case is no case
    (text,) = poor.warnings
    assert f"after 20 rounds the accuracy is {reached:.3g}, no better" in text
    assert f"which {share:.3g} of the test examples have" in text
    assert [(one.name, one.levelno, one.getMessage()) for one in caplog.records] == [
        ("fedda", logging.WARNING, f"fedda: {text}")
    ]


def row(accuracy: float, skipped: int = 0) -> dict[str, float]:
    return {"round": 50, "accuracy": accuracy, "skipped_rounds": skipped, "nonfinite_clients": 9}


def setup_of(y: np.ndarray, metric=ACCURACY):
    """A run whose test set has these labels."""
    prepared = experiment.prepare(config.resolve({"model": "linear", "clients": 10, "cohort": 2}))
    setup = prepared.setup
    task = setup.task._replace(metrics=(metric,))
    return setup._replace(task=task, test=(np.zeros((len(y), 1)), y))


def test_chance_is_the_share_of_the_commonest_label_and_one_standard_error():
    """Of 100 labels 80 are equal: the standard error is sqrt(0.8 * 0.2 / 100) = 0.04."""
    setup = setup_of(np.repeat([0, 1], [20, 80]))
    for accuracy, warned in ((0.83, True), (0.5, True), (math.nan, True), (0.85, False)):
        assert len(warnings.about_run(setup, row(accuracy))) == warned, accuracy


def other_metric(logits, labels):
    return ACCURACY(logits, labels)


@pytest.mark.parametrize(
    ("y", "metric"),
    [
        (np.zeros(100, int), ACCURACY),
        (np.arange(40) % 2, ACCURACY),
        (np.arange(200).reshape(100, 2) % 2, ACCURACY),
        (np.arange(100) % 2 / 2, ACCURACY),
        (np.arange(100) % 2, other_metric),
    ],
    ids=["one label", "few examples", "two labels each", "no classes", "another metric"],
)
def test_chance_is_not_judged_where_it_means_nothing(y: np.ndarray, metric):
    assert warnings.about_run(setup_of(y, metric), row(0.0)) == []
    assert warnings.about_run(setup_of(np.arange(100) % 2), row(0.0))


def test_many_skipped_rounds_are_counted():
    setup = setup_of(np.arange(100) % 2)
    for skipped, warned in ((0, False), (4, False), (5, True), (49, True), (50, False)):
        found = warnings.about_run(setup, row(0.9, skipped))
        assert len(found) == warned, skipped
        if found:
            assert f"{skipped} of 50 rounds were skipped" in found[0]
            assert "(9 uploads were not finite)" in found[0]


def test_a_run_that_diverges_half_way_says_so(caplog):
    """The gradient of the loss is NaN beyond 1: from the round in which the parameter gets there.

    It moves by 5 steps of 0.02 in a round, so 11 rounds count of 20, or one fewer by rounding.
    """

    def loss(outputs, y):
        return jax.numpy.where(outputs > 1, jax.numpy.nan, -outputs)[:, 0]

    climbing = fedda.Model(lambda key: jax.numpy.zeros((1, 1)), lambda params, x: x @ params)
    clients = [(np.ones((3, 1)), np.zeros((3, 1)))] * 2
    found = trained(climbing, clients, loss, test=None, metrics=(), client_lr=0.02)
    skipped = found.history[-1]["skipped_rounds"]
    assert skipped in (9, 10)
    assert [text.partition(",")[0] for text in found.warnings] == [
        f"{skipped} of 20 rounds were skipped"
    ]
    assert len(caplog.records) == 1


# ------------------------------------------------------------------------- where warnings are kept


def test_warnings_are_logged_before_the_first_round_and_kept_with_the_result(
    tmp_path: Path, caplog
):
    clients = [(x * [1, 1, 1, 1e5], y) for x, y in CLIENTS]
    logged = []
    made = trained(
        clients=clients,
        test=NOISE,
        client_lr=1e-12,
        directory=tmp_path / "run",
        on_evaluation=lambda row: logged.append(len(caplog.records)) and False,
    )
    assert logged == [1, 1, 1]
    assert len(made.warnings) == len(caplog.records) == 2
    made.save(tmp_path / "file")
    for path in ("run", "file"):
        assert fedda.load(tmp_path / path).warnings == made.warnings
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["warnings"] == made.warnings


def test_a_report_shows_the_warnings_of_results(tmp_path: Path):
    poor = trained(test=NOISE)
    assert poor.warnings
    fedda.report({"poor": poor, "good": trained()}, tmp_path)
    table = (tmp_path / "table.md").read_text()
    assert f"poor: {poor.warnings[0]}" in table
    assert "good: " not in table


def test_a_grid_warns_once_about_data_and_keeps_the_rest_with_each_result(caplog):
    clients = [(x * [1, 1, 1, 1e5], y) for x, y in CLIENTS]
    given = SETTINGS | {"test": NOISE, "grid": {"client_lr": [1e-12, 1e-13]}}
    points = fedda.run_grid("fedavg", MODEL, clients, LOSS, **given)
    assert len(caplog.records) == 1
    assert [len(point.result.warnings) for point in points] == [2, 2]


def test_the_command_keeps_and_prints_warnings(fedda, tmp_path: Path):
    words = ["run", "model=linear", "clients=12", "cohort=2", "rounds=3", "eval_every=3"]
    code, _, err = fedda(*words, "client_lr=1e-9", "--out", "poor", "--quiet")
    assert code == 0
    assert "no better than always predicting the commonest label" in " ".join(err.split())
    (text,) = json.loads((tmp_path / "poor" / "summary.json").read_text())["warnings"]
    assert fedda("report", "poor", "--out", "page")[0] == 0
    assert text in (tmp_path / "page" / "table.md").read_text()


@pytest.mark.parametrize("task", ["digits", "synthetic"])
def test_the_tasks_that_need_no_files_have_no_warnings(task: str):
    problem = tasks.load(config.resolve({"task": task}))
    assert warnings.about_data(problem.shards) == []


def test_the_default_run_has_no_warnings(tmp_path: Path):
    made = experiment.run(config.resolve({"rounds": 60}), tmp_path / "run")
    assert made.result.warnings == made.summary["warnings"] == []
