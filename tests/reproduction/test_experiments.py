"""The paper as data: its numbers, and the runs that stand against them."""

from pathlib import Path

import pytest

from fedda import algorithms
from fedda.errors import InputError
from fedda.tasks import config
from fedda_reproduction.paper import cells, experiments, methods, published
from helpers.finished_runs import RESULTS, entries, entry_of

EXPERIMENTS = experiments.experiments()
TABLE_12 = {line["parameter"]: float(line["value"]) for line in published.lines("table12")}


def test_numbers_of_the_paper():
    """Some read off the printed tables by hand, and how many there are of each."""
    assert published.finals(2)["FedDA", "sgdm"] == 0.518
    assert published.finals(3)["FedDA", "adagrad"] == 0.868
    assert published.finals(4)["FedOpt", "adagrad"] == 0.0145
    assert published.finals(5)["CLIMB", "adam"] == 0.302
    assert [len(published.finals(number)) for number in (2, 3, 4, 5)] == [30, 30, 18, 30]
    assert [len(EXPERIMENTS[f"table{number}"].entries) for number in range(6, 12)] == [12] * 6
    (entry,) = entries("table10", task="cifar100", client_lr=0.03, server_lr=0.33)
    assert (entry.algorithm, entry.paper) == ("fedda-adam", 0.51)
    assert TABLE_12["Local iteration number with AdaGrad on EMNIST"] == 5


@pytest.mark.parametrize(
    ("table", "task", "words"), [(2, "cifar100", "CIFAR-100"), (3, "emnist", "EMNIST")]
)
@pytest.mark.parametrize("optimiser", ["SGDM", "Adam", "AdaGrad"])
def test_fedda_is_run_as_table_12_says(table, task, words, optimiser):
    paper = TABLE_12
    run = entry_of(f"table{table}", f"fedda-{optimiser.lower()}").resolved()
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
    tables = {"cifar100": "table2", "emnist": "table3", "emnist-autoencoder": "table4"}
    run = entry_of(tables[task], algorithm).resolved()
    powers = [run.chosen[name] for name in ("client_lr", "server_lr", "tau") if name in run.chosen]
    expected = [10**power for power in FEDOPT[task, algorithm] if power is not None]
    assert powers == pytest.approx(expected, rel=1e-9)
    assert (run.local_work, run.local_unit, run.cohort, run.batch) == (1, "epochs", 10, 20)


def test_every_run_resolves_and_none_is_in_an_experiment_twice():
    for experiment in EXPERIMENTS.values():
        runs = [(cells.key(entry.resolved()), entry.at) for entry in experiment.entries]
        assert len(set(runs)) == len(runs), experiment.name
        labels = [entry.label for entry in experiment.entries]
        assert len(set(labels)) == len(labels), experiment.name
        if experiment.name != "digits":
            pipeline = "tff21" if experiment.name.endswith("-tff21") else "fedopt"
            assert {entry.values["pipeline"] for entry in experiment.entries} == {pipeline}


@pytest.mark.parametrize(("number", "count"), [(2, 20), (3, 20), (4, 16), (5, 20)])
def test_tables_of_methods_are_complete_and_begin_with_the_most_telling(number, count):
    table = entries(f"table{number}")
    assert len(table) == count
    assert [entry.algorithm for entry in table[:7]] == [
        *(f"{method}-{opt}" for method in ("fedda", "fedopt") for opt in published.OPTIMISERS),
        "fedavg",
    ]
    # Every printed number is of some run: methods that have no optimiser print theirs three times.
    ours = {(entry.label.partition(",")[0], entry.paper) for entry in table}
    assert ours == {(method, value) for (method, _), value in published.finals(number).items()}


def test_figure_5_scales_the_way_of_a_round():
    """The client rate, the server rate and the number of steps have the product of table 12."""
    for entry in EXPERIMENTS["figure5-scaled"].entries:
        table = {"emnist": "table3", "cifar100": "table2"}[entry.task]
        usual = entry_of(table, entry.algorithm).resolved()
        way = usual.chosen["server_lr"] * usual.local_work
        assert entry.values["server_lr"] * entry.values["local_work"] == pytest.approx(way)


def test_settings_name_known_algorithms_only():
    for path in (Path(experiments.__file__).parent / "settings").glob("*.toml"):
        for algorithm, values in methods.settings(path.stem).items():
            assert algorithm in algorithms.names()
            config.resolve({"task": path.stem, "algorithm": algorithm} | values)


def test_experiments_share_runs():
    """The default point of the sensitivity tables, and figure 6, are the runs of table 2."""

    def keys(name):
        return {cells.key(entry.resolved()) for entry in EXPERIMENTS[name].entries}

    table2 = keys("table2")
    for name in ("table9", "figure5", "figure6"):
        assert keys(name) & table2, name
    assert keys("figure6") <= table2 | keys("table3") | keys("table5")


def test_digits_and_labels_are_of_every_algorithm():
    names = [entry.algorithm for entry in EXPERIMENTS["digits"].entries]
    assert sorted(names) == sorted(algorithms.names())
    assert [methods.label(name) for name in ("fedda-sgdm", "fedopt-yogi", "fedprox")] == [
        "FedDA, SGDM",
        "FedOpt, Yogi",
        "FedProx",
    ]


def test_every_committed_cell_is_found_from_the_configuration_of_its_experiment():
    results = cells.read_all(RESULTS)
    assert results.finished
    assert not results.damaged
    by_group = {
        cells.group(entry.resolved()): entry for name in EXPERIMENTS for entry in entries(name)
    }
    for cell in results.finished:
        entry = by_group[cell.group]
        config = entry.resolved(seed=cell.config.seed, precision=cell.config.precision)
        assert not cell.outdated, "its algorithm was corrected: make the run again, or delete it"
        assert cells.path(RESULTS, config, cell.data) == cell.path


def test_only_chooses_algorithms_and_tasks():
    (table,) = experiments.chosen(["table9"], ["emnist"])
    assert {entry.task for entry in table.entries} == {"emnist"}
    assert len(table.entries) == 4
    (both,) = experiments.chosen(["figure5"], ["fedda-adam", "emnist", "cifar100"])
    assert {(entry.task, entry.algorithm) for entry in both.entries} == {
        ("emnist", "fedda-adam"),
        ("cifar100", "fedda-adam"),
    }
    with pytest.raises(InputError, match=r"'fedavgg'.* Did you mean fedavg"):
        experiments.chosen(["table2"], ["fedavgg"])
    with pytest.raises(InputError, match="no run is of all of fedavg, emnist"):
        experiments.chosen(["table9", "digits"], ["fedavg", "emnist"])
