"""Progress of runs, sweeps and downloads: bars on a terminal, lines elsewhere."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from fedda.cli.terminal import err, printable
from fedda.experiments import run as experiment
from fedda.experiments.compare import Tell

Update = Callable[[int, int | None, str], None]  # done, total (None if unknown), and a text


@contextmanager
def bars(quiet: bool = False, seconds: float = 0.0) -> Iterator[Callable[[str], Update]]:
    """Show progress on standard error.

    Args:
        quiet: Show nothing.
        seconds: Without a terminal, print a line at most this often, and the last one.

    Yields:
        A function that adds a bar with this label, and returns the function that updates it.
    """
    if quiet:
        yield lambda label: lambda done, total, text: None
    elif not err.is_terminal:
        yield lambda label: _lines(label, seconds)
    else:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[text]}", table_column=Column(no_wrap=True)),
            TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
        )
        with Progress(*columns, console=err, expand=True) as shown:

            def add(label: str) -> Update:
                bar = shown.add_task(printable(label), total=None, text="")
                return lambda done, total, text: shown.update(
                    bar, completed=done, total=total, text=printable(text)
                )

            yield add


def _lines(label: str, seconds: float) -> Update:
    last = -seconds

    def update(done: int, total: int | None, text: str) -> None:
        nonlocal last
        if done == total or time.monotonic() - last >= seconds:
            last = time.monotonic()
            print(f"{label}: {text}", file=sys.stderr, flush=True)

    return update


class Speed:
    """The speed of something, from the amounts done at different times."""

    def __init__(self, skip: int = 0) -> None:
        """Ignore the first `skip` amounts, until which a program may have been compiled."""
        self.skip, self.start = skip, (0, 0.0)

    def __call__(self, done: int) -> float | None:
        """Return the amount a second, or None if it is not known yet."""
        now = time.monotonic()
        if self.skip >= 0:
            self.skip, self.start = self.skip - 1, (done, now)
        amount, seconds = done - self.start[0], now - self.start[1]
        return amount / seconds if seconds > 0.1 and amount > 0 else None


def run_bar(update: Update) -> Tell:
    """Return a function that updates a bar at every evaluation of a run."""
    speed = Speed(skip=1)

    def tell(progress: experiment.Progress) -> None:
        done = progress.row["round"]
        text = f"round {done}/{progress.rounds}"
        for name in ("train_loss", progress.metric):
            if (value := progress.row[name]) is not None:
                text += f" {name} {value:.3g}"
        if (rate := speed(done)) is not None:
            text += f" {rate:.0f} rounds/s" if rate >= 1 else f" {1 / rate:.1f} s a round"
        update(done, progress.rounds, text)

    return tell
