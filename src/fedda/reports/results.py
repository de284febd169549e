"""A report of results made in Python."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedda.errors import InputError, shown
from fedda.reports import comparison
from fedda.reports.runs import Run
from fedda.simulate.result import Result


def report(
    results: Iterable[Result] | Mapping[str, Result | Sequence[Result]],
    directory: str | Path = "report",
    *,
    threshold: float | None = None,
    higher_is_better: bool | None = None,
    pdf: bool = False,
) -> Path:
    """Write a web page, a table and figures that compare results of `fedda.run`.

    Results that differ only in their seed share a row of the table and a line of each figure.

    Args:
        results: The results to compare; or labels, each with one result or one result a seed.
            Without labels, the algorithms and the settings in which they differ are the labels.
        directory: Where to write `report.html`, `table.md` and the figures.
        threshold: Count rounds and megabytes until the metric reaches this. By default 5 % short of
            the best.
        higher_is_better: Whether a higher value of the first metric is better. By default yes, or
            no if the results have no metric and are compared by their loss.
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
    labelled = results.items() if isinstance(results, Mapping) else (("", one) for one in results)
    runs = [
        _run(result, label, higher_is_better)
        for label, given in labelled
        for result in ([given] if isinstance(given, Result) else given)
    ]
    if not runs:
        raise InputError("report got no results, expected at least one. Give results of fedda.run.")
    seen = [(run.settings, run.config["seed"]) for run in runs if not run.label]
    for number, one in enumerate(seen):
        if one in seen[:number]:
            raise InputError(
                f"report got two results of {one[0]['algorithm']} with the same settings and seed "
                f"{one[1]}, expected different ones. Give a dictionary from labels to results."
            )
    return comparison.write(runs, Path(directory), threshold, pdf).files[0]


def _run(result: Any, label: str, higher_is_better: bool | None) -> Run:
    if not isinstance(result, Result):
        raise InputError(
            f"report got {shown(result)}, expected results of fedda.run. Give a list of them, or a "
            "dictionary from labels to results."
        )
    last = result.history[-1]
    metrics = [name for name in result.settings.get("metrics", ()) if name in last]
    metric = metrics[0] if metrics else "loss" if "loss" in last else "train_loss"
    better = bool(metrics) if higher_is_better is None else higher_is_better
    summary = {
        "metric": metric,
        "higher_is_better": better,
        "per_client": result.per_client,
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
