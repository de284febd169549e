"""What the commands share to speak to a person, and options that several of them have.

Results go to standard output; what a person reads meanwhile goes to standard error.
"""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG.toml] [KEY=VALUE]...",
        help="A configuration file, then single settings that override it.",
        show_default=False,
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def print_whole(listing: Table) -> None:
    """Prints a table; where the terminal is too narrow, it wraps lines and shortens no number."""
    needed = Measurement.get(out, out.options.update(width=1000), listing).maximum
    Console(highlight=False, width=max(needed, out.width)).print(listing)


class _Terminated(KeyboardInterrupt):
    """The signal with which other programs ask this one to end."""


def _terminate(*_: object) -> None:
    raise _Terminated


@contextmanager
def interruptible(hint: str, terminable: bool = True) -> Iterator[None]:
    """Turns Ctrl-C and SIGTERM into advice how to go on, and the exit code that shells expect.

    Not `terminable` is what may wait for other processes: Python would not hear SIGTERM there.
    """
    usual = signal.signal(signal.SIGTERM, _terminate) if terminable else None
    try:
        yield
    except KeyboardInterrupt as stop:
        word, code = ("Terminated", 143) if isinstance(stop, _Terminated) else ("Interrupted", 130)
        err.print(escape(f"{word}. {hint}"), soft_wrap=True)
        raise SystemExit(code) from None
    finally:
        if terminable:
            signal.signal(signal.SIGTERM, usual)


def new_directory(name: str) -> Path:
    """Where results go if nobody says where."""
    return Path("runs") / f"{time.strftime('%Y-%m-%dT%H-%M-%S')}-{name}"
