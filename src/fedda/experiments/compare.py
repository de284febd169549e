"""A comparison: several algorithms on one task, each with one or more seeds.

The directory of a comparison contains a run directory for each run, `<algorithm>-seed<seed>`, and
`comparison.toml` with the complete configuration of every run, even if it has not started.
"""

import dataclasses
import tomllib
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from fedda import algorithms, api
from fedda.errors import InputError
from fedda.experiments import run as experiment
from fedda.simulate.devices import cores
from fedda.simulate.progress import Progress
from fedda.storage.files import check_empty, locked, read_sealed, sealed, write_whole
from fedda.storage.schema import mismatch
from fedda.storage.snapshot import SUMMARY, check_same
from fedda.tasks import config
from fedda.tasks.config import Config

FILE = "comparison.toml"
Plans = dict[str, Config]  # the configuration of each run, by the name of its directory
Tell = Callable[[Progress | None], None]  # called with None at the start, then with evaluations
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
            f"{len(planned) - len(runs)} of the {len(planned)} runs have the name of another run. "
            "A run has the name of its algorithm's file: rename one of the files."
        )
    return runs


def shared(
    compared: list[str], values: Mapping[str, Any]
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return the settings of each algorithm, and a note on each setting that some do not have."""
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
    if why := mismatch(runs, {...: {}}):
        raise InputError(f"{path} is damaged: {why}. Restore it, or choose another directory.")
    return {name: config.resolve(values) for name, values in runs.items()}


def directory_name(plan: Config) -> str:
    """Return the name of the directory of a run."""
    return f"{plan.algorithm}-seed{plan.seed}"


def train(planned: Plans, directory: Path, track: Track) -> list[dict[str, Any]]:
    """Train the runs that have not finished yet, after their programs were compiled side by side.

    Returns:
        The summaries of all runs.

    Raises:
        InputError: The directory is in use, is not that of a comparison, or has a run with other
            settings.
    """
    first = next(iter(planned.values()))
    if not (directory / FILE).exists():
        check_empty(directory, "Give another --out, or that of a comparison to finish.")
    experiment.prepare(first)  # before anything is written
    several = len({plan.seed for plan in planned.values()}) > 1

    @cache
    def tell(name: str) -> Tell:
        plan = planned[name]
        return track(f"{plan.algorithm}, seed {plan.seed}" if several else plan.algorithm)

    def compile_ahead(name: str) -> None:
        tell(name)(None)
        experiment.compile_ahead(planned[name])

    summaries = []
    with locked(directory):
        known = written(directory)
        for name in known.keys() & planned.keys():
            check_same(directory / name, known[name].flat(), planned[name].flat(), api.CHANGEABLE)
        runs = known | planned | known  # the known runs first, with their settings
        text = "".join(f"[{name}]\n{config.dump(plan)}\n" for name, plan in runs.items())
        write_whole(directory / FILE, sealed(text))
        # Not beside the training of another run, whose seconds are reported.
        with ThreadPoolExecutor(cores()) as threads:
            list(threads.map(compile_ahead, _different(planned, directory)))
        for name, plan in planned.items():
            prepared = experiment.prepare(plan)
            outcome = experiment.train(plan, prepared, directory / name, tell(name))
            summaries.append(outcome.summary)
    return summaries


def _different(planned: Plans, directory: Path) -> list[str]:
    """Return one of the unfinished runs for each program: runs differ in it, or in their seeds."""
    unfinished = {
        name: plan for name, plan in planned.items() if not (directory / name / SUMMARY).exists()
    }
    programs = {
        config.dump(dataclasses.replace(plan, seed=0)): name for name, plan in unfinished.items()
    }
    return list(programs.values())
