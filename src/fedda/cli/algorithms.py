"""The command `fedda algorithms`."""

from typing import Annotated

import typer

from fedda.cli.completion import algorithm_names
from fedda.cli.terminal import print_table, say
from fedda.tasks import config, names

SYMBOLS = """W is the server's model, N_i the number of examples of client i, and g_i(w; batch) the
gradient at w of its mean loss over a mini-batch."""


def algorithms_command(
    name: Annotated[
        str | None,
        typer.Argument(
            help="An algorithm, or a Python file that defines one.",
            show_default=False,
            autocompletion=algorithm_names,
        ),
    ] = None,
) -> None:
    """List the algorithms, or show the equations and settings of one."""
    from fedda.algorithms import registry
    from fedda.core.algorithm import Algorithm

    if name is None:
        rows = [["name", "models\ndown/up", "what it is"]]
        for known, variant in registry.variants().items():
            summary = f"{variant.label} ({variant.reference}): {variant.summary}."
            rows.append([known, f"{variant.down}/{variant.up}", summary])
        print_table(rows, "lcw")
        return
    method: str | Algorithm = name
    if name.endswith(".py"):
        method, about = config.resolve({"algorithm": name}).loaded()
        say(name, "", about, "")
    else:
        names.check(name)
        say(name, "", (registry.module_of(name).__doc__ or "").strip(), "", SYMBOLS, "")
    rows = [["name", "default", "may be"]]
    for setting in registry.described(method):
        condition = f" (with {setting.condition})" if setting.condition else ""
        rows.append([setting.name, setting.default, setting.may_be + condition])
    print_table(rows, "llw", title="Settings")
