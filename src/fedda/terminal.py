"""What the commands share to speak to a person.

Results go to standard output; what a person reads meanwhile goes to standard error.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


def print_whole(listing: Table) -> None:
    """Prints a table; where the terminal is too narrow, it wraps lines and shortens no number."""
    needed = Measurement.get(out, out.options.update(width=1000), listing).maximum
    Console(highlight=False, width=max(needed, out.width)).print(listing)


@contextmanager
def interruptible(hint: str) -> Iterator[None]:
    """Turns Ctrl-C into advice how to go on, and the exit code that shells expect."""
    try:
        yield
    except KeyboardInterrupt:
        err.print(escape(f"Interrupted. {hint}"), soft_wrap=True)
        raise SystemExit(130) from None


def new_directory(name: str) -> Path:
    """Where results go if nobody says where."""
    return Path("runs") / f"{time.strftime('%Y-%m-%dT%H-%M-%S')}-{name}"
