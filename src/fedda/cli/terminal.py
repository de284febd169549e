"""Output of the commands, and options that several of them have.

Results go to standard output; progress, notes and errors go to standard error.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console, JustifyMethod
from rich.markup import escape
from rich.table import Table

from fedda.cli.completion import setting_words
from fedda.errors import InputError, is_full
from fedda.storage import interrupts
from fedda.storage.files import make_directory
from fedda.tasks import config, names


def refuse_options(words: list[str] | None) -> list[str] | None:
    """Refuse settings that are written as options: a callback of the argument for settings."""
    for word, after in pairwise([*(words or ()), "VALUE"]):
        option, equals, value = word.partition("=")
        if not option.startswith("-"):
            continue
        name = option.lstrip("-").replace("-", "_")
        known = {
            *config.FIELDS,
            *(key for a in names.algorithms().values() for key in a["settings"]),
        }
        hint = f"Did you mean {name}={value if equals else after}?" if name in known else ""
        raise InputError(f"there is no option {option}. {hint or '--help lists the options.'}")
    return words


Settings = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CONFIG.toml] [KEY=VALUE]...",
        help="A configuration file, then single settings that override it.",
        show_default=False,
        autocompletion=setting_words,
        callback=refuse_options,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", help="A new directory, or one to finish.", show_default="runs/..."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)
at_end = ExitStack()  # what is done when the command ends
leaving = ExitStack()  # what is done after that, when its exit code is known


def print_table(rows: Sequence[Sequence[str]], align: str = "", title: str = "") -> None:
    """Print a table.

    Args:
        rows: The cells of each row; the first row is the header, which may be empty.
        align: `l`, `r` or `c` for each column, and `w` for words, which are wrapped on a narrow
            terminal. Cells of other columns are never shortened: if there are no words, a narrow
            terminal shows only the first columns. Default: the first to the left, the others to
            the right.
        title: A line above the table.
    """
    header, *body = rows
    align = align or "l".ljust(len(header), "r")
    table = Table(
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        show_header=any(header),
        title=printable(title) or None,
        title_justify="left",
    )
    sides: dict[str, JustifyMethod] = {"r": "right", "c": "center"}
    for name, side in zip(header, align, strict=True):
        justify = sides.get(side, "left")
        table.add_column(printable(name), justify=justify, no_wrap=side != "w", overflow="fold")
    for row in body:
        table.add_row(*map(printable, row))
    if "w" in align:
        out.print(table)
        return
    wide = Console(highlight=False, width=1000)
    hidden: list[str] = []
    while out.is_terminal and len(table.columns) > 1 and wide.measure(table).maximum > out.width:
        table.columns.pop()
        hidden.insert(0, " ".join(header[len(table.columns)].split()))
    wide.print(table)
    if hidden:
        note(f"Too wide for this terminal, not shown: {', '.join(hidden)}")


def printable(text: str) -> str:
    """Escape Rich's markup, and bytes of a file name that are not UTF-8."""
    return escape(text.encode(errors="backslashreplace").decode())


def say(*lines: str) -> None:
    """Print lines of the result, without wrapping them."""
    for line in lines:
        out.print(printable(line), soft_wrap=True)


def note(*lines: str) -> None:
    """Print lines for a person to standard error."""
    for line in lines:
        err.print(printable(line), soft_wrap=True)


def print_error(message: str) -> None:
    """Print why the command fails."""
    err.print(f"[bold red]fedda:[/] {printable(message)}", soft_wrap=True)


def _stop(number: int, _: object) -> None:
    raise interrupts.Interrupted(number)


@contextmanager
def interruptible(hint: str) -> Iterator[None]:
    """On Ctrl-C or SIGTERM, print how to go on, and exit with the code that shells expect."""
    usual = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number, handler in usual.items():
        if handler is not signal.SIG_IGN:
            signal.signal(number, _stop)
    try:
        with _advising(lambda: hint):
            yield
    finally:
        for number, handler in usual.items():
            if signal.getsignal(number) is _stop:
                signal.signal(number, handler)


@contextmanager
def training(hint: Callable[[], str], terminable: bool = True) -> Iterator[None]:
    """As `interruptible`, for blocks that call compiled programs, where exceptions may be lost.

    The block stops at the next `interrupts.check`. If that takes longer than a second, the process
    ends, but not before a checkpoint is written to its end. In a block of `interrupts.held_back`,
    it ends with the block, or with a second signal.

    Args:
        hint: How to go on, if the block ends now.
        terminable: Whether to handle SIGTERM. If not, the system ends the process at once.
    """

    def end(number: int) -> None:
        try:
            err.show_cursor()
            if err.is_terminal:
                err.print()  # below the bars
            _say_stopped(number, hint())
        finally:  # also if nobody reads the standard error any more
            os._exit(128 + number)

    def on_wait() -> None:
        err.print("Stopping after the rounds under way. Press Ctrl-C again to stop at once.")

    numbers = (signal.SIGINT, signal.SIGTERM) if terminable else (signal.SIGINT,)
    with _advising(hint), interrupts.watched(numbers, on_wait, end):
        yield


@contextmanager
def _advising(hint: Callable[[], str]) -> Iterator[None]:
    """Say how to go on after a signal, or when the disk is full."""
    try:
        yield
    except KeyboardInterrupt as stop:
        number = getattr(stop, "number", signal.SIGINT)
        for each in (signal.SIGINT, signal.SIGTERM):
            # One more, while Python is shutting down, ends the process without a traceback.
            signal.signal(each, signal.SIG_DFL)
        _say_stopped(number, hint())
        raise SystemExit(128 + number) from None
    except OSError as error:
        if not is_full(error):
            raise
        where = "" if error.filename is None else f" to {error.filename}"
        raise InputError(
            f"cannot write{where} ({error.strerror}). Free some space there. {hint()}"
        ) from None


def _say_stopped(number: int, hint: str) -> None:
    note(f"{'Terminated' if number == signal.SIGTERM else 'Interrupted'}. {hint}")


def new_directory(name: str) -> Path:
    """Make a new directory in `runs`; if it is still empty when the command ends, delete it."""
    runs, stem = Path("runs"), f"{time.strftime('%Y-%m-%dT%H-%M-%S')}-{name}"
    runs_is_new = make_directory(runs)
    path, number = runs / stem, 1
    while not make_directory(path):  # another process was as fast
        number += 1
        path = runs / f"{stem}-{number}"

    def tidy() -> None:
        with suppress(OSError):  # they are not empty
            path.rmdir()
            if runs_is_new:
                runs.rmdir()

    at_end.callback(tidy)
    return path
