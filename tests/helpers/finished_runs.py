"""Made-up finished runs of the paper's experiments, in memory and as files."""

from pathlib import Path

import numpy as np

from fedda_reproduction.paper import cells
from fedda_reproduction.paper.cells import Cell
from fedda_reproduction.paper.experiments import experiments

RESULTS = Path(__file__).parents[2] / "reproduction" / "results"
SUMMARY = {
    "metric": "accuracy",
    "higher_is_better": True,
    "parameters": 1000,
    "bytes_down": 1,
    "bytes_up": 2,
    "nonfinite_clients": 0,
    "skipped_rounds": 0,
    "seconds": {"total": 2.0, "compile": 1.0},
    "device": "1 x abacus",
    "versions": {"jax": "9.9.9"},
    "commit": "c0ffee",
    "data": {},
}


def entries(name, **wanted):
    """The entries of an experiment with this task or algorithm, or these settings."""
    return [
        entry
        for entry in experiments()[name].entries
        if all(entry.values.get(key) == value for key, value in wanted.items())
    ]


def entry_of(name, algorithm):
    return entries(name, algorithm=algorithm)[0]


def cell(entry, values, every=None, seed=0, **content):
    """A finished run whose metric took these values, at equal distances up to the last round."""
    config = entry.resolved(seed=seed)
    every = every or config.rounds // len(values)
    rounds = list(range(config.rounds - every * (len(values) - 1), config.rounds + 1, every))
    usual = SUMMARY | {
        "config": cells.identity(config),
        "date": "2027-01-01T00:00:00Z",
        "higher_is_better": config.task != "emnist-autoencoder",
        "history": {"round": rounds, "accuracy": list(values)},
    }
    return Cell(Path("x.json"), config, usual | content)


def write_cell(
    folder, entry, values, seed=0, losses=(20.0, 1.0, 0.5), at=None, precision=None, **summary
):
    """Write a finished run whose metric took these values, from round 0 to the last.

    `at` are the rounds of the values, by default at equal distances.
    """
    config = entry.resolved(seed=seed, precision=precision)
    at = np.linspace(0, config.rounds, len(values)).astype(int) if at is None else at
    metric = summary.get("metric", "accuracy")
    rows = [
        {"round": int(number), "train_loss": loss, "loss": 1.0, metric: value}
        for number, value, loss in zip(at, values, [None, *losses], strict=False)
    ]
    return cells.write(folder, config, rows, SUMMARY | summary, date=0.0)
