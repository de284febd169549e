"""What of all experiments somebody asked for, by name."""

from collections.abc import Iterable

from fedda import algorithms
from fedda.errors import InputError, unknown
from fedda_reproduction.paper.experiments import Experiment, experiments


def chosen(names: Iterable[str]) -> list[Experiment]:
    """The experiments with these names; `all` stands for all of them."""
    found = experiments()
    wanted: dict[str, Experiment] = {}
    for name in names:
        if name != "all" and name not in found:
            raise unknown("experiment", name, (*found, "all"))
        wanted |= found if name == "all" else {name: found[name]}
    return list(wanted.values())


def only(experiment: Experiment, words: Iterable[str]) -> Experiment:
    """What an experiment has of these algorithms and tasks; of all, where none is named."""
    methods = {word for word in words if word in algorithms.names()}
    tasks = set(words) - methods
    kept = (
        entry
        for entry in experiment.entries
        if (not methods or entry.algorithm in methods) and (not tasks or entry.task in tasks)
    )
    return experiment._replace(entries=tuple(kept))


def check_only(chosen: Iterable[Experiment], words: Iterable[str]) -> None:
    """Refuses names that no chosen experiment has."""
    entries = [entry for experiment in chosen for entry in experiment.entries]
    known = {name for entry in entries for name in (entry.algorithm, entry.task)}
    for word in words:
        if word not in known:
            raise unknown("algorithm or task of what is reproduced", word, known)
    if not any(only(experiment, words).entries for experiment in chosen):
        raise InputError(f"no run is of all of {', '.join(words)}: name fewer with --only.")
