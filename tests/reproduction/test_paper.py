"""The paper as data: its numbers, the runs that stand against them, and the files they end in."""

import calendar
import dataclasses
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fedda import algorithms
from fedda.errors import InputError
from fedda.simulate import train
from fedda.storage import interrupts
from fedda.tasks import config
from fedda_reproduction import reproduce
from fedda_reproduction.paper import (
    cells,
    choice,
    corrections,
    evidence,
    experiments,
    glance,
    locks,
    methods,
    published,
    readme,
    rivals,
    tables,
    tuning,
)
from fedda_reproduction.paper.locks import Claims

RESULTS = Path(__file__).parents[2] / "reproduction" / "results"
EXPERIMENTS = experiments.experiments()
TINY = {"model": "linear", "clients": 12, "cohort": 3, "rounds": 4, "eval_every": 2}


# ------------------------------------------------------------------------------------- the numbers


def test_numbers_of_the_paper():
    """Some read off the printed tables by hand, and how many there are of each."""
    assert published.finals(2)["FedDA", "sgdm"] == 0.518
    assert published.finals(3)["FedDA", "adagrad"] == 0.868
    assert published.finals(4)["FedOpt", "adagrad"] == 0.0145
    assert published.finals(5)["CLIMB", "adam"] == 0.302
    assert [len(published.finals(number)) for number in (2, 3, 4, 5)] == [30, 30, 18, 30]
    assert [len(published.pairs(number)) for number in range(6, 12)] == [12] * 6
    assert published.Pair("cifar100", "adam", 0.03, 0.33, 0.51) in published.pairs(10)
    assert published.settings()["Local iteration number with AdaGrad on EMNIST"] == 5


@pytest.mark.parametrize(
    ("table", "task", "words"), [(2, "cifar100", "CIFAR-100"), (3, "emnist", "EMNIST")]
)
@pytest.mark.parametrize("optimiser", ["SGDM", "Adam", "AdaGrad"])
def test_fedda_is_run_as_table_12_says(table, task, words, optimiser):
    paper = published.settings()
    entry = next(
        entry
        for entry in EXPERIMENTS[f"table{table}"].entries
        if entry.algorithm == f"fedda-{optimiser.lower()}"
    )
    run = config.resolve(entry.values)
    where = f"with {optimiser} on {words}"
    assert run.chosen["client_lr"] == paper[f"Client learning rate {where}"]
    assert run.chosen["server_lr"] == paper[f"Server learning rate {where}"]
    assert run.local_work == paper[f"Local iteration number {where}"]
    assert run.local_unit == "steps"
    assert run.chosen.get("eps") == paper.get(f"Fuzz factor {where}")
    assert run.chosen["beta1"] == paper["Momentum parameter beta1"]
    assert run.chosen.get("beta2", 0.99) == paper["Second moment parameter beta2"]
    assert run.rounds == {"cifar100": 4000, "emnist": 1500}[task]


# Powers of ten: google-research/federated, optimization/docs/hyperparameters.md.
FEDOPT = {
    ("cifar100", "fedavg"): (-1, 0.5, None),
    ("cifar100", "fedopt-sgdm"): (-1.5, 0, None),
    ("cifar100", "fedopt-adam"): (-1.5, 0, -1),
    ("cifar100", "fedopt-adagrad"): (-1, -1, -2),
    ("emnist", "fedavg"): (-1, 0, None),
    ("emnist", "fedopt-sgdm"): (-1.5, -0.5, None),
    ("emnist", "fedopt-adam"): (-1.5, -2.5, -4),
    ("emnist", "fedopt-adagrad"): (-1.5, -1, -2),
    ("emnist-autoencoder", "fedavg"): (1, 0, None),
    ("emnist-autoencoder", "fedopt-sgdm"): (0.5, 0, None),
    ("emnist-autoencoder", "fedopt-adam"): (1, -1.5, -3),
    ("emnist-autoencoder", "fedopt-adagrad"): (1.5, -1.5, -3),
}


@pytest.mark.parametrize(("task", "algorithm"), FEDOPT)
def test_fedopt_is_run_at_its_authors_rates(task, algorithm):
    entries = [entry for each in EXPERIMENTS.values() for entry in each.entries]
    entry = next(each for each in entries if (each.task, each.algorithm) == (task, algorithm))
    run = config.resolve(entry.values)
    powers = [run.chosen[name] for name in ("client_lr", "server_lr", "tau") if name in run.chosen]
    expected = [10**power for power in FEDOPT[task, algorithm] if power is not None]
    assert powers == pytest.approx(expected, rel=1e-9)
    assert (run.local_work, run.local_unit, run.cohort, run.batch) == (1, "epochs", 10, 20)


# ------------------------------------------------------------------------------------- the runs


def test_every_run_resolves_and_none_is_in_an_experiment_twice():
    for experiment in EXPERIMENTS.values():
        runs = [(cells.key(config.resolve(each.values)), each.at) for each in experiment.entries]
        assert len(set(runs)) == len(runs), experiment.name
        labels = [each.label for each in experiment.entries]
        assert len(set(labels)) == len(labels), experiment.name
        if experiment.name != "digits":
            cited = experiment.name.endswith("-tff21")
            assert {each.values["pipeline"] for each in experiment.entries} == {
                "tff21" if cited else "fedopt"
            }


@pytest.mark.parametrize(("number", "count"), [(2, 20), (3, 20), (4, 16), (5, 20)])
def test_tables_of_methods_are_complete_and_begin_with_the_most_telling(number, count):
    entries = EXPERIMENTS[f"table{number}"].entries
    assert len(entries) == count
    assert [each.algorithm for each in entries[:7]] == [
        *(f"{method}-{opt}" for method in ("fedda", "fedopt") for opt in published.OPTIMISERS),
        "fedavg",
    ]
    # Every printed number is of some run: methods that have no optimiser print theirs three times.
    ours = {(each.label.partition(",")[0], each.paper) for each in entries}
    assert ours == {(method, value) for (method, _), value in published.finals(number).items()}


def test_settings_name_known_algorithms_only():
    for path in (Path(experiments.__file__).parent / "settings").glob("*.toml"):
        for algorithm, values in config.read(path).items():
            assert algorithm in algorithms.names()
            config.resolve({"task": path.stem, "algorithm": algorithm} | values)


def test_experiments_share_runs():
    """The default point of the sensitivity tables, and figure 6, are the runs of table 2."""

    def keys(name):
        return {cells.key(config.resolve(each.values)) for each in EXPERIMENTS[name].entries}

    table2 = keys("table2")
    for name in ("table9", "figure5", "figure6"):
        assert keys(name) & table2, name
    assert keys("figure6") <= table2 | keys("table3") | keys("table5")


def test_digits_are_of_every_algorithm():
    names = [each.algorithm for each in EXPERIMENTS["digits"].entries]
    assert sorted(names) == sorted(algorithms.names())


def test_only_chooses_algorithms_and_tasks():
    table = choice.only(EXPERIMENTS["table9"], ["emnist"])
    assert {each.task for each in table.entries} == {"emnist"}
    assert len(table.entries) == 4
    both = choice.only(EXPERIMENTS["figure5"], ["fedda-adam", "emnist", "cifar100"])
    assert {(each.task, each.algorithm) for each in both.entries} == {
        ("emnist", "fedda-adam"),
        ("cifar100", "fedda-adam"),
    }
    assert not choice.only(EXPERIMENTS["table9"], ["fedavg"]).entries
    with pytest.raises(InputError, match=r"'fedavgg'.* Did you mean fedavg"):
        choice.check_only([EXPERIMENTS["table2"]], ["fedavgg"])
    pair = [EXPERIMENTS["table9"], EXPERIMENTS["digits"]]
    with pytest.raises(InputError, match="no run is of all of fedavg, emnist"):
        choice.check_only(pair, ["fedavg", "emnist"])


# ------------------------------------------------------------------------------------- names


@pytest.mark.parametrize(
    ("name", "value", "same"),
    [
        ("chunk", 3, True),
        ("devices", 2, True),
        ("memory_gb", 1.0, True),
        ("data_gb", 1.0, True),
        ("checkpoint_every", 1, True),
        ("stabilise", 0, True),  # an int for a float
        ("client_lr", 0.125, False),
        ("seed", 1, False),
        ("rounds", 5, False),
        ("eval_every", 4, False),
        ("precision", "bf16", False),
        ("partition_seed", 1, False),
        ("model", "mlp", False),
    ],
)
def test_what_a_name_depends_on(name, value, same):
    usual, other = config.resolve(TINY), config.resolve(TINY | {name: value})
    assert (cells.name(usual, "data") == cells.name(other, "data")) == same
    assert (cells.key(usual) == cells.key(other)) == same


def test_a_name_depends_on_the_data():
    run = config.resolve(TINY)
    assert len({cells.name(run, data) for data in (None, "a", "b")}) == 3


def test_names_stay_what_they_are():
    """A changed way to name cells would orphan those that exist."""
    values = {"task": "cifar100", "rounds": 4000, "pipeline": "fedopt", "precision": "bf16"}
    values |= {"client_lr": 0.03, "server_lr": 3.3, "local_work": 5, "local_unit": "steps"}
    data = "4a1224dd6f3976076658a720a1c0b6911aed903df72c6bc677155ee822bee81f"
    assert cells.name(config.resolve(values), data) == "fedda-sgdm-f6cd7827467b"


# ------------------------------------------------------------------------------------- files

SUMMARY = {
    "metric": "accuracy",
    "higher_is_better": True,
    "parameters": 650,
    "bytes_down": 1,
    "bytes_up": 2,
    "nonfinite_clients": 0,
    "skipped_rounds": 0,
    "seconds": {"total": 2.0, "compile": 1.0},
    "device": "1 x abacus",
    "versions": {},
    "commit": "unknown",
    "data": {},
}


def history(rounds, every, value=lambda number: number / 1000):
    return [
        {"round": i, "train_loss": 1.0 if i else math.nan, "loss": 2.0, "accuracy": value(i)}
        for i in range(0, rounds + 1, every)
    ]


def written(folder, value=lambda number: number / 1000, **settings):
    run = config.resolve(TINY | settings)
    return cells.write(folder, run, history(run.rounds, run.eval_every, value), SUMMARY)


def test_a_cell_holds_what_was_measured(tmp_path):
    path = written(tmp_path, rounds=400, eval_every=50, value=lambda i: 0.1234567891 * (i % 350))
    cell = cells.read(path)
    assert cell.final() == 6.17284, "six digits"
    assert cell.content["best"] == pytest.approx(0.1234567891 * 300, rel=1e-5)
    assert cell.mean() == pytest.approx(0.1234567891 * (0 + 50) / 2, rel=1e-5), "rounds 350, 400"
    assert cell.content["mean_of_last"]["evaluations"] == 2
    assert cell.content["mean_of_last"]["accuracy"] == cell.mean()
    assert cell.final(at=200) == pytest.approx(0.1234567891 * 200, rel=1e-5)
    assert cell.mean(at=200) == pytest.approx(0.1234567891 * 175, rel=1e-5)
    assert cell.content["history"]["train_loss"][:2] == [None, 1.0]
    assert cell.content["seconds"] == SUMMARY["seconds"]
    assert cell.data is None
    assert path.stat().st_size < 3000


def test_the_mean_of_the_last_100_rounds_has_100_evaluations(tmp_path):
    """The evaluation before those rounds is far off: it would show in a mean that had it."""
    value = lambda number: 1e6 if number == 300 else number  # noqa: E731
    cell = cells.read(written(tmp_path, rounds=400, eval_every=1, value=value))
    assert cell.content["mean_of_last"]["rounds"] == 100
    assert cell.content["mean_of_last"]["evaluations"] == 100
    assert cell.mean() == (301 + 400) / 2
    assert cell.mean(at=100) == (51 + 100) / 2, "of fewer than 200 rounds, the second half"


def test_results_from_before_a_correction_are_marked_until_they_are_run_again(tmp_path):
    """The date of a cell decides, so that a new run loses the mark by itself."""
    entry = next(each for each in EXPERIMENTS["digits"].entries if each.algorithm == "scaffold")
    run = config.resolve(entry.values)
    rows = history(run.rounds, run.eval_every)
    day = calendar.timegm(time.strptime("2026-11-18", "%Y-%m-%d"))
    for date, marked in ((day - 1, True), (day, False)):
        cells.write(tmp_path, run, rows, SUMMARY, date)
        text = readme.readme(tmp_path, cells.read_all(tmp_path))
        assert ("| SCAFFOLD ‡ |" in text) == ("**Made before a correction**" in text) == marked
        assert "Stack Exchange with full-batch rounds (" not in text, "there are no such runs"


def test_what_is_marked_in_the_committed_results():
    every = cells.read_all(RESULTS).found
    marked = {(cell.config.task, cell.config.algorithm, cell.config.stabilise > 0)
              for cell in every if corrections.mark([cell])}  # fmt: skip
    full = {each.algorithm for each in EXPERIMENTS["recommended-stackexchange"].entries}
    assert marked <= {
        ("stackexchange", "fedlin", False),
        ("stackexchange", "stem", False),
        *((task, "scaffold", False) for task in ("digits", "emnist", "cifar100", "stackexchange")),
        *(("stackexchange", algorithm, True) for algorithm in full),
    }


def test_names_on_the_results_page_are_not_markup(tmp_path):
    strange = "<script>`a|b`"
    data = {"words": strange}
    run = config.resolve({"algorithm": "fedavg"})
    rows = history(run.rounds, run.eval_every)
    cells.write(tmp_path, run, rows, SUMMARY | {"device": strange, "data": data})
    text = readme.readme(tmp_path, cells.read_all(tmp_path))
    assert text.count(r"&lt;script&gt;\`a\|b\`") == 2
    assert "<script>" not in text


def test_a_run_that_diverged_has_no_number(tmp_path):
    cell = cells.read(written(tmp_path, value=lambda i: math.nan if i == 4 else 0.5))
    assert (cell.final(), cell.mean(), cell.content["best"]) == (None, None, 0.5)


def test_a_short_run_does_not_count_its_untrained_model(tmp_path):
    cell = cells.read(written(tmp_path, rounds=1, eval_every=1))
    assert cell.mean() == 0.001


DAMAGE = {
    "cut off": (lambda text: text[:200], "is not whole"),
    "empty": (lambda text: "", "is not whole"),
    "another kind": (lambda text: "[]", "is not whole"),
    "changed": (lambda text: text.replace('"parameters": 650', '"parameters": 651'), "was changed"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_file_is_found(tmp_path, kind):
    damage, why = DAMAGE[kind]
    path = written(tmp_path)
    path.write_text(damage(path.read_text()))
    (found,) = cells.read_all(tmp_path).damaged
    assert found.path == path
    assert why in found.why


@pytest.mark.parametrize("lost", ["config", "history", "date", "data", "metric"])
def test_a_file_that_agrees_with_its_checksum_may_still_lack_something(tmp_path, lost):
    path = written(tmp_path)
    content = json.loads(path.read_text())
    del content[lost], content["checksum"]
    path.write_text(json.dumps(content | {"checksum": cells._hash(content)}))
    (found,) = cells.read_all(tmp_path).damaged
    assert (found.path, found.of_other_version) == (path, False)
    assert found.why == f"is not whole: the file lacks {lost}"


@pytest.mark.parametrize("place", ["digits/fedda-sgdm-000000000000.json", "emnist/{name}"])
def test_a_renamed_file_is_found(tmp_path, place):
    path = written(tmp_path)
    target = tmp_path / "cells" / place.format(name=path.name)
    target.parent.mkdir(exist_ok=True)
    os.replace(path, target)
    (found,) = cells.read_all(tmp_path).damaged
    assert "another configuration than its name says" in found.why


def test_a_cell_of_a_version_that_lacked_a_setting_is_still_that_run(tmp_path, monkeypatch):
    path = written(tmp_path)
    whole = cells.decisive
    monkeypatch.setattr(
        cells, "decisive", lambda run: {k: v for k, v in whole(run).items() if k != "sampling"}
    )
    old = written(tmp_path)
    monkeypatch.undo()
    assert old != path
    assert "sampling" not in json.loads(old.read_text())["config"]
    assert cells.key(cells.read(old).config) == cells.key(cells.read(path).config)


def test_a_cell_of_a_setting_that_is_gone_is_left_alone(tmp_path, monkeypatch):
    whole = cells.decisive
    monkeypatch.setattr(cells, "decisive", lambda run: whole(run) | {"gone": 1})
    written(tmp_path)
    monkeypatch.undo()
    (found,) = cells.read_all(tmp_path).damaged
    assert found.of_other_version
    assert "gone" in found.why


# ------------------------------------------------------------------------------------- claims


def test_one_process_at_a_time(tmp_path):
    with Claims(tmp_path) as ours, Claims(tmp_path) as theirs:
        assert ours.take("a")
        assert not theirs.take("a")
        assert theirs.take("b")
        ours.drop("a")
        assert theirs.take("a")
    assert not list(tmp_path.glob("*.claim")), "all are given back"


CLAIM = """
import sys
from pathlib import Path
from fedda_reproduction.paper.locks import Claims
with Claims(Path(sys.argv[1])) as claims:
    print(locks.take("a"), flush=True)
    sys.stdin.read()
"""


def test_the_claim_of_a_killed_process_is_taken_over(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", CLAIM, tmp_path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"True\n"
    with Claims(tmp_path) as ours:
        assert not ours.take("a"), "it is alive"
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert ours.take("a")
        with Claims(tmp_path) as third:
            assert not third.take("a")


def test_claims_are_given_back_when_a_signal_ends_the_process(tmp_path):
    """Another machine could not know that the process is gone, and would wait for ten minutes."""
    before = list(interrupts.finish_first)
    with Claims(tmp_path) as ours:
        assert ours.take("run")
        (finish,) = interrupts.finish_first[len(before) :]
        finish()
        assert list(tmp_path.glob("*.claim")) == []
    assert interrupts.finish_first == before


def other_machine(path: Path, age: float) -> None:
    path.write_text(json.dumps({"host": "elsewhere", "pid": 1, "id": "x"}))
    then = time.time() - age
    os.utime(path, (then, then))


@pytest.mark.parametrize(("age", "stale"), [(0.9 * locks.STALE, False), (1.1 * locks.STALE, True)])
@pytest.mark.parametrize("text", [None, ""])
def test_a_claim_that_is_not_renewed_is_taken_over_by_one(tmp_path, age, stale, text):
    path = tmp_path / "a.claim"
    other_machine(path, age)
    if text is not None:
        path.write_text(text)  # by a process that was killed between two steps
        os.utime(path, (time.time() - age,) * 2)
    took, ready = [], threading.Barrier(8)

    def compete(own):
        ready.wait()
        took.append(own.take("a"))

    everyone = [Claims(tmp_path) for _ in range(8)]
    threads = [threading.Thread(target=compete, args=(own,)) for own in everyone]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert took.count(True) == stale


def test_a_claim_is_renewed_and_not_given_back_by_who_lost_it(tmp_path, monkeypatch):
    monkeypatch.setattr(locks, "RENEWED", 0.01)
    path = tmp_path / "a.claim"
    with Claims(tmp_path) as ours:
        ours.take("a")
        os.utime(path, (0, 0))
        until = time.monotonic() + 10
        while path.stat().st_mtime == 0 and time.monotonic() < until:
            time.sleep(0.01)
        assert path.stat().st_mtime > 0
        other_machine(path, age=50)  # took it over
        then = path.stat().st_mtime
        time.sleep(0.1)
        assert path.stat().st_mtime == then
    assert path.exists()


# ------------------------------------------------------------------------------------- tables


def entry(**settings):
    return experiments.Entry("one", {"task": "digits", **TINY, **settings}, paper=0.5)


def test_a_line_is_over_seeds_and_apart_by_precision_and_data(tmp_path):
    for seed, value in enumerate((0.2, 0.4)):
        written(tmp_path, value=lambda i, value=value: value, seed=seed)
    written(tmp_path, value=lambda i: 0.7, precision="bf16")
    written(tmp_path, value=lambda i: 0.9, client_lr=0.9)
    experiment = experiments.Experiment("x", "X", (entry(), entry(client_lr=0.8)))
    found = cells.read_all(tmp_path).found
    fine, coarse, none = sorted(
        tables.lines(experiment, found), key=lambda line: (-line.seeds, line.variant)
    )
    assert (fine.variant, fine.seeds, fine.paper) == ("tf32", 2, 0.5)
    assert fine.ours.mean == pytest.approx(0.3)
    assert fine.ours.half == pytest.approx(12.706 * 0.1, rel=1e-4)
    assert (coarse.variant, coarse.seeds, coarse.ours) == ("bf16", 1, (0.7, None))
    assert (none.seeds, none.ours) == (0, None)
    text = tables.markdown([fine, coarse, none])
    assert "| one | 0.500 | 0.3000 ± 1.2706 | 0.3000 ± 1.2706 | 2 | 0 | tf32 |" in text


def test_the_readme_is_what_its_command_writes():
    """Of the cells that are committed beside it."""
    results = cells.read_all(RESULTS)
    assert not results.damaged
    assert results.found
    told = "run `fedda reproduce --write` and commit results/README.md"
    expected = readme.readme(RESULTS, results)
    assert (RESULTS / "README.md").read_text() == expected, told


def test_both_pages_say_first_how_often_fedda_wins():
    """As the verdicts on F6 (tables 2 to 4) and F7 (table 5) count it, by another way."""
    results, project = ((RESULTS / name).read_text() for name in ("README.md", "../README.md"))
    answer = results.partition("## Does FedDA win?")[2].partition("\n## ")[0]
    assert results.index("## Does FedDA win?") < results.index("## What becomes of"), "first"
    places = [line.split("|")[5].strip() for line in answer.splitlines() if line.startswith("| T")]
    counts = [places.count(place) for place in glance.PLACES.values()]
    judged = re.findall(r"in (\d+) ahead of all .*? in (\d+) level .*? in (\d+) behind", results)
    assert len(judged) == 2
    assert counts == [sum(map(int, each)) for each in zip(*judged, strict=True)]
    ahead, level, behind = counts
    assert (
        f"In the {len(places)} columns of its paper's tables of methods it is ahead of the best "
        f"other in {ahead}, level with it in {level} and behind in {behind} "
    ) in " ".join(project.split())


def test_the_page_of_the_project_says_what_the_cells_do():
    """Its table of CIFAR-100: the numbers of two papers, and ours; and its words on EMNIST."""
    text = (RESULTS.parent / "README.md").read_text()
    words = " ".join(text.split())
    every = cells.read_all(RESULTS).found
    found = {line.label: line for line in tables.lines(EXPERIMENTS["table2"], every)}
    columns = [found[f"{method}, {name}"] for method in ("FedDA", "FedOpt")
               for name in methods.OPTIMISER_NAMES.values() if name != "Yogi"]  # fmt: skip

    def row(name, values):
        return f"| {name} | {' | '.join(values)} |\n"

    for first, method in ((0, "FedDA"), (3, "FedOpt")):
        own = columns[first : first + 3]
        assert row(f"{method}, ours", [tables.text(each.ours) for each in own]) in text
        where = "in its paper" if method == "FedDA" else "in FedDA's paper"
        assert row(f"{method}, {where}", [f"{each.paper:.3f}" for each in own]) in text
    assert row("FedOpt, by its authors", [f"{each.elsewhere:.3f}" for each in columns[3:]]) in text
    average = found["FedAvg"]
    assert f"{average.elsewhere:.3f}, ours {average.ours.mean:.4f}" in words
    assert {each.seeds for each in (*columns, average)} == {3}, "three seeds"
    known = [*columns[3:], average]
    apart = [abs(each.ours.mean - each.elsewhere) for each in known]
    assert max(apart[:3]) < 0.003, "within 0.3 points"
    assert apart[3] < 0.009, "within 0.9"
    assert all(0.08 < each.elsewhere - each.paper < 0.18 for each in known)
    runs = evidence.runs("table2", every)

    def points(ours, theirs):
        mean, half = evidence.margin(ours, theirs)
        return f"{100 * abs(mean):.1f} ± {100 * half:.1f}"

    sgdm, adam, adagrad = (
        points(runs[f"fedda-{name}"], runs[f"fedopt-{name}"]) for name in published.OPTIMISERS
    )
    assert f"ends {sgdm} points below FedOpt with SGDM and {adam} below it with Adam" in words
    assert f"with AdaGrad it is ahead by {adagrad}. MFL" in words
    ends = {name: evidence.over_seeds(own) for name, own in runs.items()}
    assert max(ends, key=lambda name: ends[name]) == "fedopt-adam"
    assert max(experiments.FEDDA, key=lambda name: ends[name]) == "fedda-adagrad"
    best = points(runs["fedda-adagrad"], runs["fedopt-adam"])
    assert f"FedOpt with Adam ends highest, {best} points above the best FedDA" in words
    ahead = [ends[f"fedda-{name}"] > ends[f"fedopt-{name}"] for name in published.OPTIMISERS]
    assert ahead == [False, False, True]
    printed = [
        ours.paper > theirs.elsewhere for ours, theirs in zip(columns[:3], known[:3], strict=True)
    ]
    assert printed == ahead, "what FedDA's paper prints, against FedOpt's authors"
    plain = evidence.lines_of("table2-tff21", every)["FedAvg"]
    told = f"our FedAvg ends at {plain.ours.mean:.4f}, and the paper prints {plain.paper:.3f}"
    assert told in words
    of_mfl = [found[f"MFL, {name}"].ours.mean for name in ("SGDM", "Adam", "AdaGrad")]
    assert f"with SGDM ({of_mfl[0]:.4f}) and Adam ({of_mfl[1]:.4f})" in words
    assert [a > b.ours.mean for a, b in zip(of_mfl, columns, strict=False)] == [True, True, False]
    assert {found[f"MFL, {name}"].seeds for name in ("SGDM", "Adam")} == {1}
    assert all(each.seeds for each in found.values())
    assert f"Of all {len(found)} methods and optimisers" in words
    tuned, full = (evidence.runs(f"{name}-cifar100", every) for name in ("tuned", "recommended"))
    for method in ("FedDA", "FedOpt"):
        for name, kind in (
            ("tuned-cifar100", "tuned"),
            ("recommended-cifar100", "tuned, full-batch rounds at the end"),
        ):
            own = evidence.lines_of(name, every)
            values = [
                tables.text(own[f"{method}, {methods.OPTIMISER_NAMES[optimiser]}"].ours)
                for optimiser in published.OPTIMISERS
            ]
            assert row(f"{method}, ours, {kind}", values) in text
    ends = {name: evidence.over_seeds(own) for name, own in tuned.items()}
    assert len(tuned) == 20
    assert max(ends, key=lambda name: ends[name]) == "fedopt-sgdm"
    assert max(experiments.FEDDA, key=lambda name: ends[name]) == "fedda-sgdm"
    ours, theirs = tuned["fedda-sgdm"], tuned["fedopt-sgdm"]
    assert full.keys() == {"fedda-sgdm", "fedopt-sgdm"}, "`-` was not run"
    assert {len(each) for each in (ours, theirs, *full.values())} == {3}, "three seeds"
    seeds = {name: len(own) for name, own in tuned.items() if name.startswith(("fedda", "fedopt"))}
    assert {name for name, number in seeds.items() if number == 2} == {"fedopt-adam"}
    assert (
        f"FedDA with SGDM gains {points(ours, runs['fedda-sgdm'])} points and FedOpt with SGDM, "
        f"the best of all 20, {points(theirs, runs['fedopt-sgdm'])}: FedDA is "
        f"{points(ours, theirs)} points behind it."
    ) in words
    assert (
        f"it is {points(full['fedda-sgdm'], theirs)} points above the best tuned other. Such "
        f"rounds are no privilege: with them FedOpt with SGDM gains "
        f"{points(full['fedopt-sgdm'], theirs)} points, but FedDA gains "
        f"{points(full['fedda-sgdm'], ours)}, and is ahead by "
        f"{points(full['fedda-sgdm'], full['fedopt-sgdm'])}."
    ) in words
    signs = [(ours, theirs), (full["fedda-sgdm"], theirs), tuple(full.values())]
    assert [evidence.margin(*pair).mean > 0 for pair in signs] == [False, True, True]
    short = []
    for kind in experiments.TUNED.values(), map("recommended-{}".format, experiments.TUNED):
        for name in kind:
            own = evidence.runs(name, every)
            mine, other = (own[evidence.best(own, ours=which)] for which in (True, False))
            short.append((points(mine, other), evidence.order(mine, other)))
    emnist, cifar, exchange, full_emnist, full_cifar, full_exchange = short
    assert (
        f"the best FedDA ends {cifar[0]} points below the best other on CIFAR-100, {emnist[0]} on "
        f"EMNIST and {exchange[0]} on Stack Exchange."
    ) in words
    assert (
        f"it is ahead by {full_cifar[0]} points on CIFAR-100, level on EMNIST ({full_emnist[0]} "
        f"below) and behind by {full_exchange[0]} on Stack Exchange."
    ) in words
    assert [order for _, order in short] == [0, -1, -1, 0, 1, -1]
    recommended = re.findall(r"`fedda run (task=.*?)`", words)

    def is_recommended(task, cell):
        (own,) = (each for each in recommended if each.startswith(f"task={task} "))
        told = config.resolve(config.parse(own.split()) | {"late_every": 10})
        return cells.group(told) == cells.group(cell.config)

    assert is_recommended("cifar100", full["fedda-sgdm"][0])
    losses = {
        name: own["best"]["train_loss"] for name, own in tuning.best(RESULTS)["cifar100"].items()
    }
    assert (min(losses, key=lambda name: losses[name]), len(losses)) == ("mfl-adagrad", 20)
    lost = -100 * evidence.margin(tuned["fedda-adagrad"], runs["fedda-adagrad"]).mean
    assert (
        f"MFL with AdaGrad is the best of all 20, and ends at {ends['mfl-adagrad']:.4f}; "
        f"FedDA with AdaGrad loses {lost:.1f} points"
    ) in words
    runs = evidence.runs("tuned-emnist", every)
    best = max(set(runs) - set(experiments.FEDDA), key=lambda name: evidence.over_seeds(runs[name]))
    assert best == "fedopt-adagrad"
    margins = [evidence.margin(runs[name], runs[best]) for name in experiments.FEDDA]
    assert all(0.003 <= round(-each.mean, 3) <= 0.005 for each in margins)
    assert [abs(each.mean) > each.half for each in margins] == [True, True, False]
    assert f"({-100 * margins[2].mean:.2f} ± {100 * margins[2].half:.2f} points)" in words
    assert {len(runs[name]) for name in (*experiments.FEDDA, best)} == {3}
    ours = evidence.runs("recommended-emnist", every)
    ends = {name: evidence.over_seeds(ours[name]) for name in experiments.FEDDA}
    assert max(ends, key=lambda name: ends[name]) == "fedda-sgdm"
    assert ours["fedda-sgdm"][0].config.stabilise == 0.1
    gap = evidence.margin(ours["fedda-sgdm"], runs[best])
    told = (
        f"ends at {evidence.over_seeds(ours['fedda-sgdm']):.4f}, which is {100 * gap.mean:.2f} ± "
    )
    assert f"{told}{100 * gap.half:.2f} points above that best other" in words
    control = evidence.over_seeds(ours["fedopt-sgdm"])
    assert control == max(map(evidence.over_seeds, ours.values()))
    assert f"with them FedOpt with SGDM ends at {control:.4f}" in words
    assert is_recommended("emnist", ours["fedda-sgdm"][0])
    text, full = (evidence.runs(name, every) for name in ("table5", "recommended-stackexchange"))
    others = set(text) - set(experiments.FEDDA)
    best = max(others, key=lambda name: evidence.over_seeds(text[name]))
    assert best == max(
        set(full) - set(experiments.FEDDA), key=lambda name: evidence.over_seeds(full[name])
    )
    assert best == "fedopt-adagrad"
    ours, theirs = text["fedda-adagrad"], text[best]
    assert (
        f"ends at a recall of {evidence.over_seeds(ours):.4f}, which is {points(ours, theirs)} "
        f"points below the best of the {len(others)} others, FedOpt with AdaGrad; with full-batch "
        f"rounds for both it is {points(full['fedda-adagrad'], full[best])} points below it"
    ) in words
    assert evidence.margin(ours, theirs).mean < 0
    assert evidence.margin(full["fedda-adagrad"], full[best]).mean < 0
    rates = evidence.runs("table5-rates", every, lambda entry: entry.label)
    low, high = (
        [rates[f"{method}, AdaGrad, server_lr {rate}"] for method in ("FedDA", "FedOpt")]
        for rate in (3.3, 10)
    )
    assert [low[0][0].group, high[1][0].group] == [ours[0].group, theirs[0].group]
    assert len(high[0]) == 1, "in one run"
    assert all(evidence.margin(*pair).mean > 0 for pair in (low, high))
    assert (
        f"by {points(*low)} points at 3.3 and, in one run, by "
        f"{100 * evidence.margin(*high).mean:.1f} at 10, where it ends at "
        f"{evidence.over_seeds(high[0]):.4f}."
    ) in words
    assert is_recommended("stackexchange", high[0][0])


def test_the_notes_beside_the_results_say_what_the_cells_do():
    text = " ".join((RESULTS / "NOTES.md").read_text().split())
    every = cells.read_all(RESULTS).found
    plain, usual = (evidence.lines_of(name, every)["FedAvg"] for name in ("table2-tff21", "table2"))
    assert f"ends at {plain.ours.mean:.3f} instead of {usual.ours.mean:.3f}; the paper" in text
    assert f"prints {usual.paper}, FedOpt's authors {usual.elsewhere}" in text
    table5 = evidence.runs("table5", every)
    rates = evidence.runs("table5-rates", every, lambda entry: entry.label)

    def ahead(ours, theirs):
        return f"{100 * abs(evidence.margin(ours, theirs).mean):.1f}"

    both = [
        [rates[f"{method}, AdaGrad, server_lr {rate}"] for method in ("FedDA", "FedOpt")]
        for rate in (3.3, 10)
    ]
    now = ahead(table5["fedda-adagrad"], table5["fedopt-adagrad"])
    assert f"FedDA with AdaGrad was {ahead(*both[0])} points ahead of FedOpt then" in text
    assert f"it is {now} points behind now, and at 10, in one run, {ahead(*both[1])} ahead" in text
    better = ahead(rates["FedOpt, Adam, server_lr 1"], table5["fedopt-adam"])
    assert f"that the rule does not choose, by {better} points, in one run" in text
    goals = rivals.THRESHOLDS["stackexchange"]

    def saved(name):
        pairs = evidence.pairs(table5[f"fedda-{name}"], table5[f"fedopt-{name}"])
        shares = [evidence.saved(*pair, goal) for pair in pairs for goal in goals]
        return 100 * sum(shares) / len(shares)

    told = f"saves {saved('adam'):.0f} % of FedOpt's rounds with Adam and none with AdaGrad; the "
    assert told in text
    assert abs(saved("adagrad")) < 1
    (share,) = re.findall(r"([\d.]+ %) \(Stack Exchange\)", rivals.faster(every).told)
    assert f"the {share} of F5 are of MimeLite and MFL with AdaGrad too" in text
    others = [each for name, own in table5.items() for each in own
              if name not in (*experiments.FEDDA, "fedopt-adam", "fedopt-adagrad")]  # fmt: skip
    reached = {each.config.algorithm for each in others if evidence.end(each) >= goals[0]}
    assert reached == {"mimelite-adagrad", "mfl-adagrad"}
    assert all(evidence.end(each) < goals[1] for each in others)
    assert {round(evidence.over_seeds(table5[name]), 2) for name in reached} <= {0.24, 0.25}
    at_published, at_tuned = (evidence.runs(name, every) for name in ("table2", "tuned-cifar100"))
    worse = {
        name: evidence.margin(at_tuned[name], at_published[name]).mean
        for name in at_tuned
        if len(at_tuned[name]) == 1
    }
    worse = {name: f"{-100 * mean:.1f}" for name, mean in worse.items() if mean < -0.01}
    assert worse.keys() == {"fedda-adagrad", "mfl-sgdm", "scaffold", "fedlin"}
    told = (
        "ends {fedda-adagrad} points lower than with the published ones, MFL with SGDM {mfl-sgdm}, "
        "SCAFFOLD {scaffold} and FedLin {fedlin}, in one run each"
    )
    assert told.format(**worse) in text
    of_adam = evidence.runs("table4", every)["fedopt-adam"][0]
    assert f"at {of_adam.mean():.4f} with the 0.999 of Keras" in text
    assert (of_adam.config.seed, of_adam.config.precision) == (0, "bf16")
    ends, before = (evidence.runs(name, every) for name in ("recommended-emnist", "tuned-emnist"))
    gains = [
        f"{100 * evidence.margin(ends[name], before[name]).mean:.2f}"
        for name in ("fedda-sgdm", "fedopt-sgdm", "fedavg")
    ]
    assert "SGDM {} points, FedOpt with SGDM {}, FedAvg {})".format(*gains) in text
    tuned = [
        json.loads(path.read_text())
        for path in (RESULTS / "tuning" / "emnist-autoencoder").glob("*.json")
    ]
    best = sorted(each["best"]["train_loss"] for each in tuned)
    assert f"of {best[0]:.4f} to {best[-2]:.4f}" in text
    assert f"MimeLite with Adam ({best[-1]:.4f})" in text
    losses = [point["train_loss"] for each in tuned for point in each["ranking"]]
    near = [loss for loss in losses if loss is not None and 0.0165 <= loss <= 0.0178]
    assert f"{len(near)} of all {len(losses)} points" in text


def test_tuning_is_told_with_its_budget_its_best_and_its_ends(tmp_path):
    def write(task, name, best, runs=4):
        path = tmp_path / "tuning" / task / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"algorithm": name, "rounds": 7, "runs": runs, "seeds": [100, 101]}
        path.write_text(json.dumps(content | {"best": best}))

    assert tuning.section(tmp_path) == []
    write("emnist", "fedda-sgdm", {"train_loss": 0.25, "at_the_end": ["client_lr"]})
    write("emnist", "fedavg", {"train_loss": 0.5, "at_the_end": []})
    write("emnist", "stem", None)
    write("digits", "mime-adam", {"train_loss": 1.5, "at_the_end": []}, runs=6)
    lines = tuning.section(tmp_path)[-1].splitlines()
    assert lines[0] == "| method | Digits, 3 points x 7 rounds | EMNIST, 2 points x 7 rounds |"
    assert lines[2:] == [
        "| FedDA, SGDM | - | 0.25† (lowest) |",
        "| FedAvg | - | 0.5 |",
        "| STEM | - | not finite |",
        "| Mime, Adam | 1.5 (lowest) | - |",
    ]
    (tmp_path / "tuning" / "digits" / "mime-adam.json").write_text('{"best":')
    with pytest.raises(InputError, match=r"mime-adam\.json is not what .* Delete it, and tune"):
        tuning.section(tmp_path)


def test_every_committed_cell_is_of_some_experiment():
    entries = [each for one in EXPERIMENTS.values() for each in one.entries]
    known = {cells.group(config.resolve(each.values)) for each in entries}
    for cell in cells.read_all(RESULTS).found:
        assert cells.group(cell.config) in known, cell.path


def test_a_readme_has_its_sections_and_more(tmp_path):
    written(tmp_path)
    (tmp_path / "NOTES.md").write_text("Written by a person.\n")
    text = readme.readme(tmp_path, cells.read_all(tmp_path))
    assert "\n\nWritten by a person.\n\n" in text
    for experiment in EXPERIMENTS.values():
        assert f"## {experiment.title}\n" in text
    assert "not of the paper's Stack Overflow" in text
    assert "| F14 |" in text


def test_only_a_readme_of_its_own_is_replaced(tmp_path):
    with pytest.raises(InputError, match=r"nothing to write about: .*cells holds no finished runs"):
        readme.write(tmp_path, cells.read_all(tmp_path))
    assert list(tmp_path.iterdir()) == []
    written(tmp_path, seed=1)
    path = readme.write(tmp_path, cells.read_all(tmp_path))
    own = path.read_text()
    written(tmp_path)
    assert readme.write(tmp_path, cells.read_all(tmp_path)).read_text() != own
    path.write_text("# A project\n")
    with pytest.raises(InputError, match=r"was not written by this command.* Move it away"):
        readme.write(tmp_path, cells.read_all(tmp_path))
    assert path.read_text() == "# A project\n"


# ------------------------------------------------------------------------------------- adding


def run_directory(folder: Path, **settings) -> Path:
    run = config.resolve(TINY | settings)
    folder.mkdir()
    (folder / "config.toml").write_text(config.dump(run))
    totals = dict.fromkeys(train.TOTALS, 0)
    rows = history(run.rounds, run.eval_every)
    lines = (json.dumps(row | totals).replace("NaN", "null") for row in rows)
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    (folder / "summary.json").write_text(json.dumps(SUMMARY))
    return folder


def test_a_run_becomes_a_cell(tmp_path):
    run = run_directory(tmp_path / "run", chunk=3)
    os.utime(run / "summary.json", (86400, 86400))
    cell = cells.read(reproduce.add(tmp_path / "reproduction" / "results", run))
    assert cells.key(cell.config) == cells.key(config.resolve(TINY))
    assert cell.content["date"] == "1970-01-02T00:00:00Z"
    assert cell.final() == 0.004
    assert cell.content["clients"] == 12


def test_a_run_that_is_not_whole_becomes_none(tmp_path):
    whole = run_directory(tmp_path / "run")
    for name, change, message in (
        ("config.toml", lambda text: text.replace('precision = "tf32"\n', ""), "does not say prec"),
        ("summary.json", None, "it is not finished"),
        ("summary.json", lambda text: text.replace('"bytes_up"', '"up"'), "file lacks bytes_up"),
        ("summary.json", lambda text: "[" * 9999, "nested too deeply"),
        ("summary.json", lambda text: text.replace("650", '"many"'), "expected a whole number"),
        ("metrics.jsonl", lambda text: text.replace("loss", "lost"), "round 0 lacks train_loss"),
        ("metrics.jsonl", lambda text: text.replace("2.0", "[]"), "invalid line at .*:1"),
        ("metrics.jsonl", lambda text: "", "no metrics.jsonl with evaluations"),
        ("metrics.jsonl", lambda text: text[: text.rindex("{")], "ended after 2"),
    ):
        part = tmp_path / "part"
        shutil.copytree(whole, part)
        text = (part / name).read_text()
        (part / name).unlink()
        if change is not None:
            (part / name).write_text(change(text))
        with pytest.raises(InputError, match=message):
            reproduce.add(tmp_path / "reproduction" / "results", part)
        shutil.rmtree(part)
    assert not (tmp_path / "reproduction" / "results").exists()


def test_configurations_are_frozen_so_groups_are_by_value():
    run = config.resolve(TINY)
    other = dataclasses.replace(run, seed=7, precision="bf16")
    assert cells.group(run) == cells.group(other)
    assert cells.group(run) != cells.group(dataclasses.replace(run, rounds=9))
