"""Event files for TensorBoard.

A tracker is any function that takes a row of the history: `fedda.run(..., on_evaluation=tracker)`
calls it at every evaluation. `fedda run --tensorboard` uses the tracker of this module.
"""

import time
from collections.abc import Callable
from numbers import Real
from pathlib import Path
from typing import Any

from fedda.errors import import_extra


def event_file(directory: Path | str) -> Callable[[dict[str, Any]], None]:
    """Return a tracker that writes every number of a row under its name and round.

    A resumed run writes another file, which replaces the rounds that it repeats.
    """
    import_extra("tensorboard", "tensorboard", "write event files for TensorBoard")
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer: Any = None

    def track(row: dict[str, Any]) -> None:
        nonlocal writer
        where = {"step": row["round"], "wall_time": time.time()}
        if writer is None:
            writer = EventFileWriter(str(directory))
            start = SessionLog(status=SessionLog.START)  # voids later rounds of an earlier file
            writer.add_event(Event(session_log=start, **where))
        values = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in row.items()
            if name != "round" and isinstance(value, Real)
        ]
        writer.add_event(Event(summary=Summary(value=values), **where))
        writer.flush()

    return track
