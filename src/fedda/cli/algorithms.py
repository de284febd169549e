"""The command `fedda algorithms`."""

from typing import Annotated

import typer

from fedda import algorithms
from fedda.algorithms import registry
from fedda.cli.terminal import print_table, say

SYMBOLS = """W is the server's model, N_i the number of examples of client i, and g_i(w; batch) the
gradient at w of its mean loss over a mini-batch."""


def algorithms_command(
    name: Annotated[str | None, typer.Argument(help="One of them.", show_default=False)] = None,
) -> None:
    """List the algorithms, or show the equations and settings of one."""
    if name is None:
        rows = [["name", "models\ndown/up", "what it is"]]
        for known, variant in registry.variants().items():
            summary = f"{variant.label} ({variant.reference}): {variant.summary}."
            rows.append([known, f"{variant.down}/{variant.up}", summary])
        print_table(rows, "lcw")
        return
    options = algorithms.options(name)
    say(name, "", (registry.module_of(name).__doc__ or "").strip(), "", SYMBOLS, "")
    rows = [["name", "default", "may be"]]
    # An option may bring settings of its own.
    for option, value in [("", ""), *((o, v) for o, choices in options.items() for v in choices)]:
        Hyper = algorithms.get(name, **({option: value} if option else {})).Hyper
        condition = f" (with {option}={value})" if option else ""
        for setting, domain in registry.domains(Hyper).items():
            if setting not in (row[0] for row in rows):
                default = f"{Hyper._field_defaults[setting]:.3g}"
                rows.append([setting, default, domain.description + condition])
    rows += [[option, choices[0], " or ".join(choices)] for option, choices in options.items()]
    print_table(rows, "llw", title="Settings")
