"""Several algorithms on one task: which runs a comparison is made of, and where it says so.

The folder of a comparison holds a folder for each run, `<algorithm>-seed<seed>`, and
`comparison.toml` with the whole configuration of every one, also of those that are still to come.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedda import algorithms
from fedda.errors import InputError
from fedda.experiments import run as experiment
from fedda.storage.files import write_whole
from fedda.tasks import config
from fedda.tasks.config import Config

Plans = dict[str, Config]  # by the names of their folders
Tell = Callable[[experiment.Progress], None]  # called at every evaluation of a run
Track = Callable[[str], Tell]  # called with the label of each run


def plans(own: Mapping[str, Mapping[str, Any]], first_seed: int, seeds: int) -> Plans:
    """The runs of each algorithm with its own settings."""
    planned = [
        config.resolve({**values, "algorithm": name, "seed": first_seed + offset})
        for name, values in own.items()
        for offset in range(seeds)
    ]
    return {folder_of(plan): plan for plan in planned}


def shared(
    compared: list[str], values: Mapping[str, Any]
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """For each algorithm those of the settings that it has; and a note on each that some lack."""
    task = config.resolve({key: values[key] for key in values if key == "task"}).task
    common = {*config.FIELDS, *config.task_settings(task)}
    own = {name: {*common, *algorithms.settings(name, values)} for name in compared}
    notes = []
    for key in values:
        having = [name for name in compared if key in own[name]]
        if not having:
            here = "none of the compared algorithms has the"
            raise config.unknown_setting(key, here, set().union(*own.values()))
        if len(having) < len(compared):
            notes.append(f"{key} is given to {', '.join(having)}: the others have no such setting.")
    return {name: {k: v for k, v in values.items() if k in own[name]} for name in compared}, notes


def written(directory: Path) -> Plans:
    """The runs that a folder's comparison is to have; of an older one, those that were begun."""
    path = directory / "comparison.toml"
    found = config.read(path) if path.exists() else {}
    for folder in _folders(directory):
        if (folder / "config.toml").exists():
            found.setdefault(folder.name, config.read(folder / "config.toml"))
    planned = {}
    for name, values in found.items():
        if not isinstance(values, dict):
            raise InputError(f"{path} is damaged: {name} is no table. Give another --out.")
        plan = planned[name] = config.resolve(values)
        if name != folder_of(plan):  # it might be a folder anywhere
            raise InputError(
                f"{directory} is damaged: the run {name!r} has the settings of {folder_of(plan)}. "
                "Give another --out."
            )
    return planned


def folder_of(plan: Config) -> str:
    """Return the name of the folder of a run."""
    return f"{plan.algorithm}-seed{plan.seed}"


def is_there(directory: Path) -> bool:
    """Whether it holds a comparison, or a folder under a name that one gives to a run."""
    return (directory / "comparison.toml").exists() or bool(_folders(directory))


def _folders(directory: Path) -> list[Path]:
    found = sorted(directory.glob("*-seed*"))
    return [path for path in found if path.name.rpartition("-seed")[0] in algorithms.names()]


def train(planned: Plans, directory: Path, track: Track) -> list[dict[str, Any]]:
    """Does what has not been done of these runs; the summaries of all."""
    _write(planned, directory)
    several = len({plan.seed for plan in planned.values()}) > 1
    summaries = []
    for name, plan in planned.items():
        tell = track(f"{plan.algorithm}, seed {plan.seed}" if several else plan.algorithm)
        if (directory / name / "config.toml").exists():
            outcome = experiment.resume(directory / name, plan.flat(), tell)
        else:
            outcome = experiment.run(plan, directory / name, tell)
        summaries.append(outcome.summary)
    return summaries


def _write(planned: Plans, directory: Path) -> None:
    """Adds to what the folder says, unless one of these runs is there with other settings."""
    known = written(directory)
    if any(known.get(name, plan) != plan for name, plan in planned.items()):
        return  # and it will be refused
    experiment.prepare(next(iter(planned.values())))  # before anything is written
    directory.mkdir(parents=True, exist_ok=True)
    text = "".join(f"[{name}]\n{config.dump(plan)}\n" for name, plan in (known | planned).items())
    write_whole(directory / "comparison.toml", text)
