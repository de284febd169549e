"""Evaluations for trackers: a tracker is any function that takes a row of the history.

`fedda.run(..., on_evaluation=tracker)` calls one as the run goes on; `fedda run --tensorboard` does
so with the one here.
"""

import time
from collections.abc import Callable
from numbers import Real
from pathlib import Path
from typing import Any

from fedda.errors import InputError

Tracker = Callable[[dict[str, Any]], None]


def tensorboard(directory: Path | str) -> Tracker:
    """Writes rows as TensorBoard's event files, each number under its name and its round.

    A run that is continued writes another file there, which replaces the rounds that it repeats.
    """
    try:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    except ImportError:
        raise InputError(
            "event files for TensorBoard are written by its own package, which is not installed: "
            "pip install 'fedda[tensorboard]'"
        ) from None
    writer: Any = None

    def track(row: dict[str, Any]) -> None:
        nonlocal writer
        where = {"step": row["round"], "wall_time": time.time()}
        if writer is None:
            writer = EventFileWriter(str(directory))
            start = SessionLog(status=SessionLog.START)  # what was written of later rounds is void
            writer.add_event(Event(session_log=start, **where))
        values = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in row.items()
            if name != "round" and isinstance(value, Real)
        ]
        writer.add_event(Event(summary=Summary(value=values), **where))
        writer.flush()

    return track
