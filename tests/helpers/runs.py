"""Run directories for tests of the report, and the cells of its table."""

import json

from fedda.reports import tables


def write_run(
    directory,
    algorithm="fedavg",
    seed=0,
    accuracy=(0.1, 0.5, 0.8),
    *,
    finished=True,
    metric="accuracy",
    higher_is_better=True,
    ending="",
    last_row=(),
    **config,
):
    """A run with an evaluation every ten rounds and one megabyte up, two down, between them."""
    directory.mkdir(parents=True)
    rows = [
        {
            "round": 10 * i,
            "train_loss": None if i == 0 else 2.0 / i,
            "loss": 2.5 - value,
            metric: value,
            "bytes_down": 2_000_000 * i,
            "bytes_up": 1_000_000 * i,
            "nonfinite_clients": 0,
            "skipped_rounds": 0,
        }
        for i, value in enumerate(accuracy)
    ]
    if rows:
        rows[-1] |= dict(last_row)
    config = {"algorithm": algorithm, "task": "digits", "seed": seed, "rounds": 20, **config}
    toml = "".join(f"{key} = {json.dumps(value)}\n" for key, value in config.items())
    (directory / "config.toml").write_text(toml)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows) + ending)
    if finished:
        summary = {
            "metric": metric,
            "higher_is_better": higher_is_better,
            "parameters": 650,
            "seconds": {"total": 3.0 + 2 * seed, "compile": 1.0 + seed},
            "device": "cpu:0",
            "versions": {"jax": "9.9.9"},
            "commit": "c0ffee",
        }
        (directory / "summary.json").write_text(json.dumps(summary))
    return directory


def cells(rows):
    """The text of each row, by column."""
    header, *lines = tables.text_table(rows)
    return [dict(zip(header, line, strict=True)) for line in lines]
