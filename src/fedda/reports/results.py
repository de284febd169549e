"""A report of results made in Python."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedda.errors import InputError, shown
from fedda.reports import comparison
from fedda.reports.runs import Run
from fedda.simulate.result import GridPoint, Result

One = Result | GridPoint


def report(
    results: Iterable[One] | Mapping[str, One | Sequence[One]],
    directory: str | Path = "report",
    *,
    threshold: float | None = None,
    higher_is_better: bool | None = None,
    pdf: bool = False,
) -> Path:
    """Write a web page, a table and figures that compare results.

    Results that differ only in their seed share a row of the table and a line of each figure. They
    are compared by the first metric that all of them have; without metrics, by the loss on the
    test set; without test sets, by the training loss.

    Args:
        results: Results of `fedda.run` or `fedda.load`, or points of `fedda.run_grid`: a list, or a
            dictionary from labels to one result, or to one for each seed. In a list, the labels
            are the algorithms and the settings in which they differ.
        directory: Where to write `report.html`, `table.md` and the figures.
        threshold: Count rounds and megabytes until the metric reaches this. By default 5 % short of
            the best.
        higher_is_better: Whether a higher value of the metric is better. By default no for losses
            and for metrics that `fedda.losses.lower_is_better` marks, else yes.
        pdf: Write each figure as PDF, too.

    Returns:
        The path of the page.

    Raises:
        InputError: There is nothing to compare.
        MissingExtraError: The extra `report` is not installed.

    Example:
        >>> import numpy as np
        >>> import fedda
        >>> x = np.eye(4, dtype=np.float32)
        >>> clients = [(x, np.array([0, 1, 0, 1])), (x, np.array([0, 1, 1, 1]))]
        >>> model = fedda.models.mlp(4, 8, 2)
        >>> loss = fedda.losses.cross_entropy
        >>> results = [
        ...     fedda.run(name, model, clients, loss, cohort=2, batch=4, rounds=20)
        ...     for name in ("fedavg", "fedda-adam")
        ... ]
        >>> fedda.report(results, "report").name
        'report.html'
    """
    labelled = _labelled(results)
    if not labelled:
        raise InputError("report got no results, expected at least one. Give results of fedda.run.")
    rows = [result.history[-1] for _, result in labelled]
    named = [name for _, result in labelled for name in result.settings.get("metrics", ())]
    metric = next(
        name for name in (*named, "loss", "train_loss") if all(name in row for row in rows)
    )
    lower = {name for _, result in labelled for name in result.settings.get("lower_is_better", ())}
    better = metric in named and metric not in lower
    better = better if higher_is_better is None else higher_is_better
    runs = [_run(result, label, metric, better) for label, result in labelled]
    seen = [(run.settings, run.config["seed"]) for run in runs if not run.label]
    for number, one in enumerate(seen):
        if one in seen[:number]:
            raise InputError(
                f"report got two results of {one[0]['algorithm']} with the same settings and seed "
                f"{one[1]}, expected different ones. Give a dictionary from labels to results."
            )
    return comparison.write(runs, Path(directory), threshold, pdf).files[0]


def _labelled(results: Any) -> list[tuple[str, Result]]:
    """Return all results with their labels, which may be empty."""
    groups = results.items() if isinstance(results, Mapping) else [("", results)]
    found = []
    for label, group in groups:
        is_one = isinstance(group, One) or not isinstance(group, Iterable)
        for one in [group] if is_one else group:
            result = one.result if isinstance(one, GridPoint) else one
            if not isinstance(result, Result):
                raise InputError(
                    f"report got {shown(group)}, expected results of fedda.run. Give a list, or a "
                    "dictionary from labels to results. fedda.load reads a run directory."
                )
            found.append((label, result))
    return found


def _run(result: Result, label: str, metric: str, higher_is_better: bool) -> Run:
    summary = {
        "metric": metric,
        "higher_is_better": higher_is_better,
        "per_client": None if result.per_client is None else result.per_client.to_json(),
        "warnings": result.warnings,
    }
    config = {"algorithm": "unknown", "seed": 0, **result.settings}
    return Run(
        path=None,
        config=config,
        evaluations=result.history,
        summary=summary,
        notes=[],
        label=label,
    )
