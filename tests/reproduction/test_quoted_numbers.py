"""Numbers that `docs/paper_tasks.md` and the results page quote are those of the cells."""

import json
import re

import pytest

from fedda.tasks import config
from fedda_reproduction.paper import cells, comparison, tables
from fedda_reproduction.paper.experiments import FEDDA, METHOD_TABLES, TUNED, experiments
from fedda_reproduction.paper.page import Filler
from helpers.finished_runs import RESULTS, entries

PROJECT = " ".join((RESULTS.parents[1] / "docs/paper_tasks.md").read_text().split())
NOTES = " ".join((RESULTS / "README.md").read_text().split())


@pytest.fixture(scope="module")
def filler():
    return Filler(RESULTS)


# A sentence, and the places of the page of results that have its numbers (see `paper.page`).
QUOTED = [
    ("FedAvg within 0.9 (0.447, ours {}).", "table2/FedAvg"),
    ("our FedAvg ends at {}, and the paper prints 0.324.", "table2-tff21/FedAvg"),
    ("FedDA ends {} points below FedOpt with SGDM", "table2/FedOpt, SGDM - table2/FedDA, SGDM"),
    ("and {} below it with Adam;", "table2/FedOpt, Adam - table2/FedDA, Adam"),
    ("with AdaGrad it is ahead by {}.", "table2/FedDA, AdaGrad - table2/FedOpt, AdaGrad"),
    ("ahead of FedDA with SGDM ({}) and Adam ({})", "table2/MFL, SGDM", "table2/MFL, Adam"),
    ("highest, {} points above the best FedDA", "table2/FedOpt, Adam - table2/FedDA, AdaGrad"),
    (
        "FedDA with SGDM gains {} points and FedOpt with SGDM, the best of all 20, {}:",
        "tuned-cifar100/FedDA, SGDM - table2/FedDA, SGDM",
        "tuned-cifar100/FedOpt, SGDM - table2/FedOpt, SGDM",
    ),
    (
        "FedDA is {} points behind it.",
        "tuned-cifar100/FedOpt, SGDM - tuned-cifar100/FedDA, SGDM",
    ),
    (
        "it is {} points above the best tuned other.",
        "recommended-cifar100/FedDA, SGDM - tuned-cifar100/FedOpt, SGDM",
    ),
    (
        "with them FedOpt with SGDM gains {} points, but FedDA gains {}, and is ahead by {}.",
        "recommended-cifar100/FedOpt, SGDM - tuned-cifar100/FedOpt, SGDM",
        "recommended-cifar100/FedDA, SGDM - tuned-cifar100/FedDA, SGDM",
        "recommended-cifar100/FedDA, SGDM - recommended-cifar100/FedOpt, SGDM",
    ),
    (
        "is the best of all 20, and ends at {}; FedDA with AdaGrad loses {} points",
        "tuned-cifar100/MFL, AdaGrad",
        "table2/FedDA, AdaGrad - tuned-cifar100/FedDA, AdaGrad",
    ),
    ("in the last tenth it ends at {}, which", "recommended-emnist/FedDA, SGDM"),
    ("with them FedOpt with SGDM ends at {}.", "recommended-emnist/FedOpt, SGDM"),
    (
        "ends at a recall of {}, which is {} points below the best of the 17 others",
        "table5/FedDA, AdaGrad",
        "table5/FedOpt, AdaGrad - table5/FedDA, AdaGrad",
    ),
    (
        "with full-batch rounds for both it is {} points below it",
        "recommended-stackexchange/FedOpt, AdaGrad - recommended-stackexchange/FedDA, AdaGrad",
    ),
    (
        "by {} points at 3.3 and by {} at 10, where it ends at {}.",
        "table5-rates/FedDA, AdaGrad, server_lr 3.3 - table5-rates/FedOpt, AdaGrad, server_lr 3.3",
        "table5-rates/FedDA, AdaGrad, server_lr 10 - table5-rates/FedOpt, AdaGrad, server_lr 10",
        "table5-rates/FedDA, AdaGrad, server_lr 10",
    ),
]


@pytest.mark.parametrize(("sentence", "places"), [(each[0], each[1:]) for each in QUOTED])
def test_the_page_quotes_the_cells(filler, sentence, places):
    assert sentence.format(*map(filler.number, places)) in PROJECT


def margins(filler, name):
    """FedDA's best against the best other, in points; and whether it is ahead."""
    runs = comparison.runs(name, filler.finished)
    ours, theirs = (runs[comparison.best(runs, ours)] for ours in (True, False))
    mean, half = comparison.margin(ours, theirs)
    return f"{100 * abs(mean):.1f} ± {100 * half:.1f}", comparison.order(ours, theirs)


def test_the_page_says_how_often_and_by_how_much_fedda_wins(filler):
    counts = [
        sum(int(filler.checks[claim].numbers[place]) for claim in ("F6", "F7"))
        for place in ("ahead", "tied", "behind")
    ]
    assert sum(counts) == 3 * len(METHOD_TABLES)
    first = f"The method tables of its paper have {sum(counts)} columns"
    second = "FedDA is ahead of the best other method in {}, tied in {} and behind in {}"
    assert f"{first}. {second.format(*counts)} " in PROJECT
    emnist, cifar, exchange = (margins(filler, name) for name in TUNED.values())
    assert (
        f"the best FedDA ends {cifar[0]} points below the best other on CIFAR-100, {emnist[0]} on "
        f"EMNIST and {exchange[0]} on Stack Exchange."
    ) in PROJECT
    assert [order for _, order in (emnist, cifar, exchange)] == [0, -1, -1]
    emnist, cifar, exchange = (margins(filler, f"recommended-{task}") for task in TUNED)
    assert (
        f"it is ahead by {cifar[0]} points on CIFAR-100, tied on EMNIST ({emnist[0]} below) and "
        f"behind by {exchange[0]} on Stack Exchange."
    ) in PROJECT
    assert [order for _, order in (emnist, cifar, exchange)] == [0, 1, -1]


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
    runs = {
        name: comparison.runs(name, filler.finished)
        for name in ("table2", "tuned-cifar100", "tuned-emnist", "recommended-emnist", "table5")
    }
    ends = {name: {each: comparison.mean(own[each]) for each in own} for name, own in runs.items()}
    assert len(ends["table2"]) == len(ends["tuned-cifar100"]) == 20
    assert max(ends["table2"], key=ends["table2"].get) == "fedopt-adam"
    assert max(FEDDA, key=ends["table2"].get) == "fedda-adagrad"
    known = [entry for entry in entries("table2") if entry.elsewhere]
    apart = {each.algorithm: ends["table2"][each.algorithm] - each.elsewhere for each in known}
    assert abs(apart.pop("fedavg")) < 0.009
    assert max(map(abs, apart.values())) < 0.003
    assert all(0.08 < each.elsewhere - each.paper < 0.18 for each in known)
    assert max(ends["tuned-cifar100"], key=ends["tuned-cifar100"].get) == "fedopt-sgdm"
    tuned = [
        json.loads(path.read_text()) for path in (RESULTS / "tuning" / "cifar100").glob("*.json")
    ]
    losses = {each["algorithm"]: each["best"]["train_loss"] for each in tuned}
    assert min(losses, key=losses.get) == "mfl-adagrad"
    best = comparison.best(runs["tuned-emnist"], ours=False)
    assert best == "fedopt-adagrad"
    behind = [
        comparison.margin(runs["tuned-emnist"][each], runs["tuned-emnist"][best]) for each in FEDDA
    ]
    assert all(0.003 <= round(-each.mean, 3) <= 0.005 for each in behind)
    assert [abs(each.mean) > each.half for each in behind] == [True, True, False]
    gap = comparison.margin(runs["recommended-emnist"]["fedda-sgdm"], runs["tuned-emnist"][best])
    for margin in (behind[2], gap):
        shown = f"{100 * abs(margin.mean):.2f} ± {100 * margin.half:.2f} points"
        assert shown in PROJECT
    full = ends["recommended-emnist"]
    assert max(FEDDA, key=full.get) == "fedda-sgdm"
    assert max(full, key=full.get) == "fedopt-sgdm"
    assert comparison.best(runs["table5"], ours=False) == "fedopt-adagrad"


def test_what_the_page_recommends_was_run(filler):
    groups = {cell.group for cell in filler.finished}
    recommended = re.findall(r"`fedda run (task=.*?)`", PROJECT)
    assert {each.split()[0] for each in recommended} == {f"task={task}" for task in TUNED}
    for settings in recommended:
        run = config.resolve(config.parse(settings.split()) | {"late_every": 10})
        assert cells.group(run) in groups


def test_the_claims_about_theory_quote_its_page():
    page = (RESULTS / "theory" / "README.md").read_text()
    lines = re.findall(r"\| F\d+ \|.*?theory/README", (RESULTS / "README.md").read_text())
    assert len(lines) == 5
    for line in lines:
        found = line.split("|")[4]
        numbers = re.findall(r"\d+(?:\.\d+)?(?:e-\d+)?(?: %)?", found.replace("t²", ""))
        assert numbers
        for number in numbers:
            assert re.search(rf"(?<![\d.]){re.escape(number)}(?![\d])", page), (number, found)


def test_the_notes_on_the_results_say_in_words_what_is_so(filler):
    """Those numbers of the notes that `fedda reproduce --write` does not fill in."""
    table5 = comparison.runs("table5", filler.finished)
    pairs = comparison.pairs(table5["fedda-adagrad"], table5["fedopt-adagrad"])
    saved = [comparison.saved(*pair, goal) for pair in pairs for goal in (0.2, 0.4, 0.6)]
    assert abs(sum(saved) / len(saved)) < 0.01
    assert "FedDA does not reach the values of F5 earlier than FedOpt with AdaGrad." in NOTES
    others = table5.keys() - {*FEDDA, "fedopt-adam", "fedopt-adagrad"}
    reach = {each for each in others if max(map(comparison.end, table5[each])) >= 0.2}
    assert reach == {"mimelite-adagrad", "mfl-adagrad"}
    assert {round(comparison.mean(table5[each]), 2) for each in reach} <= {0.24, 0.25}
    of_adam = comparison.runs("table4", filler.finished)["fedopt-adam"][0]
    assert f"at {of_adam.mean():.4f} with Keras's beta2 of 0.999" in NOTES
    assert (of_adam.config.seed, of_adam.config.precision) == (0, "bf16")
    tuned = [
        json.loads(path.read_text())
        for path in (RESULTS / "tuning" / "emnist-autoencoder").glob("*.json")
    ]
    best = sorted(each["best"]["train_loss"] for each in tuned)
    assert f"training loss, {best[0]:.4f} to {best[-2]:.4f}." in NOTES
    assert f"MimeLite with Adam ({best[-1]:.4f})" in NOTES
    losses = [point["train_loss"] for each in tuned for point in each["ranking"]]
    near = [loss for loss in losses if loss is not None and 0.0165 <= loss <= 0.0178]
    assert f"{len(near)} of all {len(losses)} points" in NOTES
