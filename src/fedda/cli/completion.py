"""Completion of algorithms, tasks, data sets and settings in a shell.

`fedda --install-completion` sets it up. While a word is completed, JAX is not imported.

In Bash `=` ends a word: Bash asks to complete what follows it, and passes `algorithm` and `=` as
the words before. Other shells ask to complete `algorithm=fe`.
"""

from typing import Any

import typer

from fedda.tasks import config, names

Words = list[tuple[str, str]]  # and what each is


def algorithm_names(incomplete: str) -> Words:
    """Complete the name of an algorithm."""
    known = [(name, about["label"]) for name, about in names.algorithms().items()]
    return [word for word in known if word[0].startswith(incomplete)]


def task_names(incomplete: str) -> Words:
    """Complete the name of a task or of a data set."""
    return list((dict(dataset_names(incomplete)) | dict(_tasks(incomplete))).items())


def dataset_names(incomplete: str) -> Words:
    """Complete the name of a data set."""
    from fedda.data import datasets

    return [(name, "a data set") for name in datasets.names() if name.startswith(incomplete)]


def _tasks(incomplete: str) -> Words:
    known = [(name, config.about(name)["description"]) for name in config.tasks()]
    return [word for word in known if word[0].startswith(incomplete)]


def setting_words(ctx: typer.Context, incomplete: str) -> Words:
    """Complete a setting: its name, then its value if that is one of a few."""
    before = " ".join(ctx.params.get("settings") or ()).replace(" = ", "=").replace(" =", "=")
    given = before.split(" ")
    known = _settings(given)
    # Bash: the `=` is the last word, or it was the word to complete, which Typer takes away.
    if given[-1].endswith("=") or (given[-1] in known and not incomplete):
        return _values(given[-1].removesuffix("="), incomplete, known)
    name, equals, value = incomplete.partition("=")
    if equals:
        return [(f"{name}={text}", about) for text, about in _values(name, value, known)]
    found = [key for key in known if key.startswith(name)]
    words = [(f"{key}=", f"by default {known[key]}") for key in found]
    # A second word, so that the shell does not take the first for a whole one and add a space.
    return words + [(f"{key}={known[key]}", "the default") for key in found if len(found) == 1]


def compared_words(ctx: typer.Context, incomplete: str) -> Words:
    """Complete an algorithm, or a setting."""
    words = [word for word in setting_words(ctx, incomplete) if "algorithm=" not in word[0]]
    return words if "=" in incomplete else [*algorithm_names(incomplete), *words]


def _settings(given: list[str]) -> dict[str, Any]:
    """Return the settings that go with the words given before, with their defaults."""
    values = dict(word.split("=", 1) for word in given if "=" in word)
    chosen = [word for word in (values.get("algorithm"), *given) if word in names.algorithms()]
    of_algorithms = [names.algorithms()[name]["settings"] for name in chosen or names.algorithms()]
    task = values.get("task", config.Config.task)
    known = {name: getattr(config.Config, name) for name in config.FIELDS}
    known |= config.about(task).get("run", {}) if task in config.tasks() else {}
    known |= dict.fromkeys(config.task_settings(task), "") if task in config.tasks() else {}
    for settings in of_algorithms:
        known |= settings
    return {name: value for name, value in known.items() if not values.get(name)}


def _values(name: str, incomplete: str, known: dict[str, Any]) -> Words:
    """Complete the value of a setting."""
    if name == "algorithm":
        return algorithm_names(incomplete)
    if name == "task":
        return _tasks(incomplete)
    if name == "data":
        return dataset_names(incomplete)
    choices = {
        "local_unit": ["steps", "epochs"],
        "sampling": ["uniform", "fedopt", "tff21"],
        "precision": ["fp32", "tf32", "bf16"],
    }
    for about in names.algorithms().values():
        for option, values in about["options"].items():
            choices[option] = [*dict.fromkeys([*choices.get(option, ()), *values])]
    default = [str(known[name])] if name in known and known[name] != "" else []
    return [(text, "") for text in choices.get(name, default) if text.startswith(incomplete)]
