"""Settings of a run on the command line, `KEY=VALUE`, and the advice for those misspelt."""

import itertools
from typing import Any

from typer.core import TyperCommand

from fedda import algorithms
from fedda.data import datasets
from fedda.data.catalogue import DATASETS
from fedda.errors import InputError
from fedda.tasks import config


class CommandWithSettings(TyperCommand):
    """Tells who writes a setting as an option how it is written."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        options = {name for each in self.params for name in each.opts}
        for word, following in itertools.zip_longest(args, args[1:]):
            name, _, value = word.partition("=")
            key = name.lstrip("-").replace("-", "_")
            if name.startswith("--") and name not in options and key in _all_settings():
                given = following if following and not following.startswith("-") else "VALUE"
                value = value or given
                raise InputError(f"{key} is a setting, not an option: write {key}={value}")
        return super().parse_args(ctx, args)


def _all_settings() -> set[str]:
    of_tasks = (config.task_settings(task) for task in config.tasks())
    of_algorithms = (algorithms.settings(name, {}) for name in algorithms.names())
    return {*config.FIELDS}.union(*of_tasks, *of_algorithms)


def from_command_line(words: list[str]) -> dict[str, Any]:
    """The settings of a command line; a user's own data are no task, but easily taken for one."""
    values = config.from_words(words)
    task = values.get("task")
    if task not in (*config.tasks(), *DATASETS) and task in datasets.names():
        raise InputError(f"unknown task {task!r}. It is a data set: write task=own data={task}")
    return values
