"""Progress of runs, sweeps and downloads: a bar in a terminal, a line in a notebook, or a log."""

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

Update = Callable[[int, int | None, str], None]  # done, total (None if unknown), and a text
Add = Callable[[str], Update]

COMPILING = "compiling ..."
RARER = (
    20  # a log gets its next line after a twentieth of the time so far: fewer than 200 lines a week
)
CELL_SECONDS = 0.2  # between two updates of a notebook


class Progress(NamedTuple):
    """Progress of one run, after an evaluation."""

    row: dict[str, Any]
    rounds: int
    metric: str | None


class GridProgress(NamedTuple):
    """Progress of many runs that are trained together, after an evaluation."""

    finished: int  # runs, also those of earlier processes
    runs: int
    training: int  # runs that are trained together now
    round: int
    rounds: int


@contextmanager
def bars(quiet: bool = False, every: float = 1.0, silent: float = 0.0) -> Iterator[Add]:
    """Show progress: in a notebook in the cell's output, elsewhere on standard error.

    Args:
        quiet: Show nothing.
        every: Without a terminal, the least number of seconds between two lines.
        silent: Without a terminal, the number of seconds before the first line.

    Yields:
        A function that adds a bar with this label, and returns the function that updates it.
    """
    if quiet:
        yield lambda label: lambda done, total, text: None
    elif _in_notebook():
        cells: list[_Cell] = []

        def add_cell(label: str) -> Update:
            cells.append(_Cell(label))
            return cells[-1].update

        try:
            yield add_cell
        finally:
            for cell in cells:
                cell.show()
    elif sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        with _terminal_bars() as add:
            yield add
    else:
        log = _Log(every, silent)
        yield lambda label: lambda done, total, text: log.update(label, done == total, text)


def _in_notebook() -> bool:
    """Return whether a Jupyter kernel runs this, without importing IPython, which is slow."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return getattr(shell, "kernel", None) is not None


@contextmanager
def _terminal_bars() -> Iterator[Add]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
    from rich.table import Column
    from rich.text import Text

    class Cropped(ProgressColumn):
        def render(self, task: Any) -> Text:
            return Text(task.fields["text"], no_wrap=True, overflow="ellipsis")

    # The bar gets the room that is left. If there is none, the text is cropped.
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(bar_width=None, table_column=Column(no_wrap=True, ratio=1)),
        Cropped(),
        TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True, min_width=5)),
    )
    with Progress(
        *columns,
        console=Console(stderr=True, highlight=False),
        expand=True,
        redirect_stdout=sys.stdout.isatty(),  # output to a file is not redirected
    ) as shown:

        def add(label: str) -> Update:
            bar = shown.add_task(_printable(label), total=None, text="")
            return lambda done, total, text: shown.update(
                bar, completed=done, total=total, text=_printable(text)
            )

        yield add


def _printable(text: str) -> str:
    """Replace bytes of a file name that are not UTF-8."""
    return text.encode(errors="backslashreplace").decode()


class _Cell:
    """One line of a notebook cell's output, updated in place."""

    def __init__(self, label: str) -> None:
        self.label, self.line, self.shown_at = label, "", 0.0
        self.handle: Any = None

    def update(self, done: int, total: int | None, text: str) -> None:
        bar = "" if not total else f" {100 * done // total:3d} %"
        self.line = f"{self.label}{bar}  {text}"
        if time.monotonic() - self.shown_at >= CELL_SECONDS:
            self.show()

    def show(self) -> None:
        from IPython.display import display

        content = {"text/plain": _printable(self.line)}
        if self.handle is None:
            self.handle = display(content, raw=True, display_id=True)
        else:
            self.handle.update(content, raw=True)
        self.shown_at = time.monotonic()


class _Log:
    """Lines on standard error that become rarer, so that a long run does not fill a file."""

    def __init__(self, every: float, silent: float) -> None:
        self.every, self.silent = every, silent
        self.start, self.last = time.monotonic(), -every

    def update(self, label: str, ended: bool, text: str) -> None:
        now = time.monotonic()
        since = now - self.start
        due = now - self.last >= max(self.every, since / RARER)
        if since >= self.silent and (due or ended):
            self.last = now
            print(f"{label}: {text}", file=sys.stderr, flush=True)


class Speed:
    """The speed of something, from the amounts done at different times."""

    def __init__(self) -> None:
        self.start: tuple[int, float] | None = None

    def __call__(self, done: int) -> float | None:
        """Return the amount a second since the first call, or None if it is not known yet."""
        now = time.monotonic()
        self.start = self.start or (done, now)
        amount, seconds = done - self.start[0], now - self.start[1]
        return amount / seconds if seconds > 0.1 and amount > 0 else None


def run_bar(update: Update) -> Callable[[Progress | None], None]:
    """Return a function that updates a bar; it takes None while programs are compiled."""
    speed = Speed()

    def tell(progress: Progress | None) -> None:
        if progress is None:
            update(0, None, COMPILING)
            return
        row, done = progress.row, progress.row["round"]
        text = f"round {done}/{progress.rounds}"
        for name in (progress.metric, "train_loss"):  # the first is seen in a narrow terminal
            value = None if name is None else row[name]
            if value is not None and value == value:  # not NaN: nothing was trained yet
                text += f" {name} {value:.3g}"
        update(done, progress.rounds, text + _pace(speed(done)))

    return tell


def grid_bar(update: Update) -> Callable[[GridProgress | None], None]:
    """Return a function that updates a bar; it takes None while programs are compiled."""
    speed = Speed()

    def tell(progress: GridProgress | None) -> None:
        if progress is None:
            update(0, None, COMPILING)
            return
        first, last = progress.finished + 1, progress.finished + progress.training
        runs = f"runs {first}-{last}" if last > first else f"run {first}"
        done = progress.finished * progress.rounds + progress.training * progress.round
        text = f"{runs} of {progress.runs}: round {progress.round}/{progress.rounds}"
        update(done, progress.runs * progress.rounds, text + _pace(speed(done)))

    return tell


def _pace(rate: float | None) -> str:
    if rate is None:
        return ""
    return f" {rate:.0f} rounds/s" if rate >= 1 else f" {1 / rate:.1f} s a round"
