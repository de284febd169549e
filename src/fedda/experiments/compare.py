"""A comparison: several algorithms on one task, each with one or more seeds.

The directory of a comparison holds a run directory for each run, `<algorithm>-seed<seed>`, and
`comparison.toml` with the whole configuration of every run, also of those that have not begun.
"""

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedda import algorithms, api
from fedda.errors import InputError
from fedda.experiments import run as experiment
from fedda.simulate.progress import Progress
from fedda.storage.directory import check_same
from fedda.storage.files import check_empty, locked, read_sealed, sealed, write_whole
from fedda.tasks import config
from fedda.tasks.config import Config

FILE = "comparison.toml"
Plans = dict[str, Config]  # by the names of their directories
Tell = Callable[[Progress | None], None]  # called at every evaluation, and before with None
Track = Callable[[str], Tell]  # called with the label of each run


def plans(settings: Mapping[str, Mapping[str, Any]], first_seed: int, seeds: int) -> Plans:
    """Return the runs of each algorithm with its settings."""
    planned = [
        config.resolve({**values, "algorithm": name, "seed": first_seed + offset})
        for name, values in settings.items()
        for offset in range(seeds)
    ]
    runs = {directory_name(plan): plan for plan in planned}
    if len(runs) < len(planned):
        raise InputError(
            f"{len(planned) - len(runs)} of the {len(planned)} runs have the name of another one. "
            "Results are listed under the name of an algorithm's file: rename one of the files."
        )
    return runs


def shared(
    compared: list[str], values: Mapping[str, Any]
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return for each algorithm the settings that it has, and a note on each that some lack."""
    task = config.resolve({key: values[key] for key in values if key == "task"}).task
    common = {*config.FIELDS, *config.task_settings(task)}
    methods = {name: config.resolve({"algorithm": name}).method for name in compared}
    known = {name: {*common, *algorithms.settings(methods[name], values)} for name in compared}
    notes = []
    for key in values:
        having = [name for name in compared if key in known[name]]
        if not having:
            here = "none of the compared algorithms has the"
            raise config.setting_error(key, here, set().union(*known.values()))
        if len(having) < len(compared):
            notes.append(f"{key} is given to {', '.join(having)}: the others have no such setting.")
    return {name: {k: v for k, v in values.items() if k in known[name]} for name in compared}, notes


def written(directory: Path) -> Plans:
    """Return the runs of the comparison in a directory; none if it holds no comparison."""
    path = directory / FILE
    if not path.exists():
        return {}
    runs = tomllib.loads(read_sealed(path))
    return {name: config.resolve(values) for name, values in runs.items()}


def directory_name(plan: Config) -> str:
    """Return the name of the directory of a run."""
    return f"{plan.algorithm}-seed{plan.seed}"


def train(planned: Plans, directory: Path, track: Track) -> list[dict[str, Any]]:
    """Train what has not been trained of these runs.

    Returns:
        The summaries of all of them.

    Raises:
        InputError: Another process has the directory, or it holds something else, or one of these
            runs with other settings.
    """
    first = next(iter(planned.values()))
    if not (directory / FILE).exists():
        check_empty(directory, "Give another --out, or that of a comparison to finish.")
    experiment.prepare(first)  # before anything is written
    several = len({plan.seed for plan in planned.values()}) > 1
    summaries = []
    with locked(directory):
        known = written(directory)
        for name in known.keys() & planned.keys():
            check_same(directory / name, known[name].flat(), planned[name].flat(), api.CHANGEABLE)
        runs = known | planned | known  # the order of before, and the settings
        text = "".join(f"[{name}]\n{config.dump(plan)}\n" for name, plan in runs.items())
        write_whole(directory / FILE, sealed(text))
        for name, plan in planned.items():
            tell = track(f"{plan.algorithm}, seed {plan.seed}" if several else plan.algorithm)
            outcome = experiment.train(plan, experiment.prepare(plan), directory / name, tell)
            summaries.append(outcome.summary)
    return summaries
