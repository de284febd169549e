"""The command `fedda algorithms`."""

from typing import Annotated

import typer
from rich import box
from rich.markup import escape
from rich.table import Table

from fedda import algorithms
from fedda.cli.terminal import out

SYMBOLS = """W is the server's model, N_i the number of examples of client i, and g_i(w; batch) the
gradient at w of its mean loss over a mini-batch."""


def algorithms_command(
    name: Annotated[str | None, typer.Argument(help="One of them.", show_default=False)] = None,
) -> None:
    """List the algorithms, or show the equations and settings of one."""
    if name is None:
        listing = Table(box=box.SIMPLE)
        listing.add_column("name", no_wrap=True)
        listing.add_column("models\ndown/up", justify="center")
        listing.add_column("what it is")
        for each, make in algorithms.makers().items():
            sent = algorithms.communication(each)
            models = "-" if sent is None else "/".join(map(str, sent))
            listing.add_row(each, models, escape(make.__doc__ or ""))
        out.print(listing)
        return
    known = algorithms.options(name)
    text = (algorithms.module_of(name).__doc__ or "").strip()
    # Lines of equations stay whole.
    out.print(escape(f"{name}\n\n{text}\n\n{SYMBOLS}\n"), soft_wrap=True)
    listing = Table(box=box.SIMPLE, title="Settings", title_justify="left")
    for column in ("name", "default", "may be"):
        listing.add_column(column)
    shown: dict[str, tuple[str, str]] = {}  # an option may bring settings of its own
    for option, value in [("", ""), *((o, v) for o, choices in known.items() for v in choices)]:
        Hyper = algorithms.get(name, **({option: value} if option else {})).Hyper
        for each, domain in algorithms.domains(Hyper).items():
            under = f" (with {option}={value})" if option else ""
            shown.setdefault(each, (f"{Hyper._field_defaults[each]:.3g}", domain.words + under))
    for each, (default, words) in shown.items():
        listing.add_row(each, default, escape(words))
    for each, choices in known.items():
        listing.add_row(each, choices[0], " or ".join(choices))
    out.print(listing)
