"""What a person who waits for runs sees of them: bars on a terminal, or else lines."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from fedda.cli.terminal import err
from fedda.experiments import run as experiment
from fedda.experiments.compare import Tell, Track


@contextmanager
def shown(quiet: bool) -> Iterator[Track]:
    """Gives a function that makes, for each run, the function its evaluations are told to."""
    if quiet:
        yield lambda label: lambda progress: None
    elif err.is_terminal:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.fields[told]}", table_column=Column(no_wrap=True)),
            TimeRemainingColumn(compact=True, table_column=Column(no_wrap=True)),
        )
        with Progress(*columns, console=err, expand=True) as bars:

            def track(label: str) -> Tell:
                bar = bars.add_task(escape(label), total=None, told="")
                pace = _Pace()

                def tell(progress: experiment.Progress) -> None:
                    done, total = progress.row["round"], progress.rounds
                    told = f"{done}/{total} {_told(progress)} {pace(done)}"
                    bars.update(bar, completed=done, total=total, told=told)

                return tell

            yield track
    else:

        def track_plainly(label: str) -> Tell:
            pace = _Pace()

            def tell(progress: experiment.Progress) -> None:
                done = f"round {progress.row['round']}/{progress.rounds}"
                line = f"{label}: {done} {_told(progress)} {pace(progress.row['round'])}"
                print(line.rstrip(), file=sys.stderr, flush=True)

            return tell

        yield track_plainly


class _Pace:
    """Rounds a second since the second evaluation: what came before was compiled meanwhile."""

    def __init__(self) -> None:
        self.told: list[tuple[int, float]] = []

    def __call__(self, number: int) -> str:
        now = time.perf_counter()
        self.told.append((number, now))
        if len(self.told) < 3:
            return ""
        start, then = self.told[1]
        pace = (number - start) / (now - then)
        return f"{pace:.0f} rounds/s" if pace >= 1 else f"{1 / pace:.1f} s a round"


def _told(progress: experiment.Progress) -> str:
    loss, value = progress.row["train_loss"], progress.row[progress.metric]
    told = "" if loss is None else f"train_loss {loss:.3g} "
    return told + f"{progress.metric} " + ("-" if value is None else f"{value:.3g}")
