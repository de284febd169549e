"""Numbers that `docs/paper_tasks.md` and the pages of results quote are those of the cells."""

import json
import re

import numpy as np
import pytest
from scipy import stats

from fedda.tasks import config
from fedda_reproduction.paper import cells, comparison, tables
from fedda_reproduction.paper.experiments import FEDDA, TUNED, experiments
from fedda_reproduction.paper.page import Filler
from helpers.finished_runs import RESULTS, entries

PROJECT = " ".join((RESULTS.parents[1] / "docs/paper_tasks.md").read_text().split())


@pytest.fixture(scope="module")
def filler():
    return Filler(RESULTS)


CONTROL = "ablation/CIFAR-100, FedOpt, AdaGrad, momentum as gradient"
# A sentence, and the places of the pages of results that have its numbers (see `paper.page`).
QUOTED = [
    ("FedAvg within 0.9 (0.447, ours {}).", "table2/FedAvg"),
    ("our FedAvg ends at {}, and the paper prints 0.324.", "table2-tff21/FedAvg"),
    (
        "ends at {}, {} points above FedDA with AdaGrad (three seeds each; ",
        CONTROL,
        f"{CONTROL} - table2/FedDA, AdaGrad",
    ),
]


@pytest.mark.parametrize(("sentence", "places"), [(each[0], each[1:]) for each in QUOTED])
def test_the_page_quotes_the_cells(filler, sentence, places):
    assert sentence.format(*map(filler.number, places)) in PROJECT


def test_the_page_says_how_often_fedda_wins(filler):
    findings = [column.finding for column in comparison.columns(filler.finished)]
    counts = [findings.count(each) for each in ("ahead", "equivalent", "undecided", "behind")]
    assert findings.count(None) == 1
    assert (
        "The paper's tables of methods have {} columns. FedDA is ahead of the best other method "
        "in {}, equivalent in {}, undecided in {} and behind in {}; in one column, no method "
        "learned."
    ).format(len(findings), *counts) in PROJECT


def test_the_table_of_the_page_is_of_the_cells(filler):
    optimisers = ("SGDM", "Adam", "AdaGrad")

    def row(name, experiment, method, column="ours"):
        made = tables.rows(experiments()[experiment], filler.finished)
        rows = {each["run"]: each for each in made}
        values = [rows[f"{method}, {optimiser}"][column] for optimiser in optimisers]
        return f"| {method}, {name} | {' | '.join(values)} |"

    for method in ("FedDA", "FedOpt"):
        where = "in its paper" if method == "FedDA" else "in FedDA's paper"
        assert row(where, "table2", method, "paper") in PROJECT
        assert row("ours", "table2", method) in PROJECT
        assert row("ours, tuned", "tuned-cifar100", method) in PROJECT
        full = row("ours, tuned, full-batch rounds at the end", "recommended-cifar100", method)
        assert full in PROJECT
    assert row("by its authors", "table2", "FedOpt", "elsewhere") in PROJECT


def test_what_the_page_says_in_words_is_so(filler):
    runs = comparison.runs("table2", filler.finished)
    known = [entry for entry in entries("table2") if entry.elsewhere]
    apart = {
        each.algorithm: comparison.mean(runs[each.algorithm]) - each.elsewhere for each in known
    }
    assert abs(apart.pop("fedavg")) < 0.009
    assert max(map(abs, apart.values())) < 0.003
    assert all(0.08 < each.elsewhere - each.paper < 0.18 for each in known)


def test_what_the_page_recommends_was_run(filler):
    groups = {cell.group for cell in filler.finished}
    recommended = re.findall(r"`fedda run (task=.*?)`", PROJECT)
    assert {each.split()[0] for each in recommended} == {f"task={task}" for task in TUNED}
    for settings in recommended:
        run = config.resolve(config.parse(settings.split()) | {"late_every": 10})
        assert cells.group(run) in groups


def notes(name):
    return " ".join((RESULTS / "tables" / f"{name}.md").read_text().split())


def spearman(filler, name, value):
    """The rank correlation of a loss of each method with its mean result."""
    runs = comparison.runs(name, filler.finished)
    pairs = [(-value(each), comparison.mean(runs[each])) for each in runs]
    return stats.spearmanr(*zip(*pairs, strict=True)).statistic


def test_the_notes_on_claims_and_table_5_say_what_is_so(filler):
    table5 = comparison.runs("table5", filler.finished)
    pairs = comparison.pairs(table5["fedda-adagrad"], table5["fedopt-adagrad"])
    saved = [comparison.saved(*pair, goal) for pair in pairs for goal in (0.2, 0.4, 0.6)]
    assert abs(sum(saved) / len(saved)) < 0.01
    assert "FedDA does not reach them earlier than FedOpt with AdaGrad." in notes("claims")
    others = table5.keys() - {*FEDDA, "fedopt-adam", "fedopt-adagrad"}
    reach = {each for each in others if max(map(comparison.end, table5[each])) >= 0.2}
    assert reach == {"mimelite-adagrad", "mfl-adagrad"}
    assert {round(comparison.mean(table5[each]), 2) for each in reach} <= {0.24, 0.25}
    assert "CLIMB is FedAvg here" in notes("table5")
    for climb, fedavg in comparison.pairs(table5["climb"], table5["fedavg"]):
        assert climb.mean() == fedavg.mean()
        assert max(row["loss"] for row in climb.rows()) < climb.config.chosen["eps"] == 1


def test_the_notes_on_table_4_say_what_is_so(filler):
    text, runs = notes("table4"), comparison.runs("table4", filler.finished)
    assert f"at {runs['fedopt-adam'][0].mean():.4f} with Keras's beta2 of 0.999" in text
    for method in ("mfl-sgdm", "fedlocal-adagrad", "fedlocal-adam", "mimelite-adagrad"):
        assert f"tuned {runs[method][0].mean():.4f}" in text
    found = [json.loads(path.read_text()) for path in RESULTS.glob("tuning/emnist-autoencoder/*")]
    best = sorted(each["best"]["train_loss"] for each in found)
    assert f"training loss, {best[0]:.4f} to {best[-2]:.4f}," in text
    losses = [point["train_loss"] for each in found for point in each["ranking"]]
    near = [loss for loss in losses if loss is not None and 0.0165 <= loss <= 0.0178]
    assert f"{len(near)} of all {len(losses)} points" in text


def test_the_notes_on_tuning_say_what_is_so(filler):
    text, name = notes("tuned-cifar100"), "tuned-cifar100"
    tuned = {
        each["algorithm"]: each["best"]["train_loss"]
        for each in (json.loads(path.read_text()) for path in RESULTS.glob("tuning/cifar100/*"))
    }
    runs = comparison.runs(name, filler.finished)
    assert sum(len(each) == 1 for each in runs.values()) == 17
    assert "17 of the 20 methods have one seed" in text
    first = spearman(filler, name, tuned.__getitem__)
    last = spearman(
        filler, name, lambda each: np.mean([run.rows()[-1]["train_loss"] for run in runs[each]])
    )
    assert f"is {first:.2f}, that of the final training loss {last:.2f}." in text
    rows = filler.tables["grids"]
    ends = sum(row["chosen at an end of"] != "-" for row in rows)
    assert f"at an end of some axis for {ends} of {len(rows)} methods" in text


def test_the_notes_on_server_rates_say_what_is_so(filler):
    """AdaGrad is ahead at 3.3, Adam with each at its best, and nothing else is decided."""
    every = filler.tables["server-rates"]
    adam = {row["server_lr"]: row for row in every if row["FedDA"].startswith("Adam")}
    assert list(adam) == ["1", "3.3", "each at its best"]
    assert [float(row["p, Holm"]) < 0.05 for row in adam.values()] == [False, False, True]
    assert adam["each at its best"]["FedDA better by, 95 %"].startswith("+")
    rows = [row for row in every if row["FedDA"].startswith("AdaGrad")]
    plain = [row for row in rows if "momentum" not in row["FedOpt"]]
    assert [row["server_lr"] for row in plain] == ["3.3", "10", "33", "each at its best"]
    assert [float(row["p, Holm"]) < 0.05 for row in plain] == [True, False, False, False]
    signs = [row["FedDA better by, 95 %"][0] for row in plain]
    assert signs == ["+", "+", "-", "-"]
    gradient = [row for row in rows if "as gradient" in row["FedOpt"]]
    assert all(float(row["p, Holm"]) > 0.05 for row in gradient)
    for side in ("FedDA", "FedOpt"):  # both are highest at 10
        low, middle, high = (float(row[side].split(": ")[1].split(" ")[0]) for row in gradient)
        assert middle > max(low, high)
