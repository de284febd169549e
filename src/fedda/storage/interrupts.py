"""Ctrl-C and SIGTERM: when they take effect, and what is finished before.

An exception that a signal handler raises can be lost: Python drops it where the compiler calls back
into Python. Raised inside JAX while it compiles, it makes the process crash when Python exits.
Under `watched`, a signal is therefore noted, and `check` raises it between two compiled programs.

A command ends soon: if the compiler or the device keeps the main thread from `check` for long,
another thread ends the process. The library must not do that: the process may be a notebook. It
waits for the next evaluation, after which nothing is lost, or for a second signal.

Without `watched`, Python handles the signals. Files are complete then, too, because an unfinished
file never gets its final name.
"""

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from types import FrameType
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

PATIENCE = 1.0  # seconds after a signal in which the main thread may call `check`

# Functions that finish what is written in the background, or give back what other processes wait
# for. They are called before the process is ended, the last one first.
finish_first: list[Callable[[], object]] = []


class Interrupted(KeyboardInterrupt):
    """Ctrl-C stopped a run. `fedda.run` and `fedda.run_grid` raise it.

    Attributes:
        result: The `Result` of all evaluations that had finished, or None if none had. Of
            `fedda.run_grid`: a list of the points that had finished.
        number: The number of the signal.
        whole: Whether the run stopped right after an evaluation.
    """

    __module__ = "fedda"  # where users find it

    def __init__(self, number: int = signal.SIGINT, whole: bool = False) -> None:
        super().__init__()
        self.number, self.whole = number, whole
        self.result: Any = None

    def __str__(self) -> str:
        if self.result is None:
            return "The run was stopped. No evaluation had finished."
        return "The run was stopped. The attribute result of this error has the result so far."


class _Watch:
    def __init__(self, patient: bool) -> None:
        self.patient = patient
        self.came = 0  # the number of the first signal
        self.again = False  # whether there was a second one
        self.held = False
        self.critical = threading.RLock()

    def note(self, number: int, frame: FrameType | None) -> None:
        self.again = self.again or bool(self.came)
        self.came = self.came or number
        if self.patient and self.again and not _inside_jax(frame):
            raise Interrupted(self.came)


def _inside_jax(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_globals.get("__name__", "").partition(".")[0] == "jax":
            return True
        frame = frame.f_back
    return False


_watch: _Watch | None = None


def check(whole: bool = True) -> None:
    """Raise `Interrupted` if a signal came; for places where a run can stop.

    Args:
        whole: Whether no round is lost if the run stops here. If one is, the library goes on until
            the next place, or until a second signal.
    """
    watch = _watch
    if watch is None or not watch.came or watch.held or not _in_main_thread():
        return
    if whole or watch.again or not watch.patient:
        raise Interrupted(watch.came, whole)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def watched(
    numbers: Sequence[int], on_wait: Callable[[], None], end: Callable[[int], None] | None = None
) -> Iterator[None]:
    """Note signals for `check`, and raise `Interrupted` at the end of the block if one came.

    Args:
        numbers: The signals. Those that the process ignores are left alone.
        on_wait: Called in another thread if a signal is `held_back` for long or, without `end`, if
            the block has not ended some time after the first signal.
        end: Called in another thread, to end the process, if the block has not ended some time
            after the first signal, or with a second one; but not before `critical` blocks and
            `finish_first`. None never ends the process, and leaves signals alone that the user
            handles.
    """
    global _watch
    usual = {
        number: handler
        for number in numbers
        if (handler := signal.getsignal(number)) is signal.default_int_handler
        or (end is not None and handler not in (signal.SIG_IGN, None))
    }
    # Another thread gets no signals; a run inside a run is watched already.
    if not _in_main_thread() or (end is None and (not usual or _watch is not None)):
        yield
        return
    watch = _watch = _Watch(patient=end is None)
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    # Python writes the number of a signal there at once, also while the compiler is at work.
    before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    for number in usual:
        signal.signal(number, watch.note)

    def follow() -> None:
        first = True
        while word := reader.recv(1):
            if word[0] not in usual:
                if before >= 0:  # it is for an event loop
                    os.write(before, word)
                continue
            if first:
                first = False
                if _another(reader, usual):  # the block ended, or a second one
                    continue
                if watch.held or end is None:
                    with contextlib.suppress(Exception, SystemExit):  # nobody reads it any more
                        on_wait()
                    continue
            watch.again = True
            if end is None:
                continue
            with watch.critical:
                for finish in reversed(finish_first):
                    with contextlib.suppress(Exception):  # it could not be written
                        finish()
                end(word[0])

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    try:
        yield
    finally:
        watch.patient = False  # a second signal must not raise before all is as it was
        signal.set_wakeup_fd(before)
        writer.close()
        thread.join()
        reader.close()
        _watch = None
        for number, handler in usual.items():
            signal.signal(number, handler)
    if watch.came:
        raise Interrupted(watch.came)


def stoppable(function: Callable[P, T]) -> Callable[P, T]:
    """Let Ctrl-C stop a function of the library, with `Interrupted`, where it calls `check`."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        result = None
        try:
            with watched([signal.SIGINT], on_wait=_say_waiting):
                result = function(*args, **kwargs)
                return result
        except Interrupted as caught:
            stop = caught
            stop.result = stop.result if result is None else result  # it came at the very end
        # Raised here, the traceback shows the user's call and nothing from inside.
        raise stop.with_traceback(None)

    return call


def _say_waiting() -> None:
    print(
        "Stopping after the compilation or the rounds under way. Press Ctrl-C again to stop "
        "without waiting for an evaluation.",
        file=sys.stderr,
        flush=True,
    )


def _another(reader: socket.socket, numbers: Container[int]) -> bool:
    """Wait for the end of a watched block or a second signal, for `PATIENCE` at most."""
    end = time.monotonic() + PATIENCE
    while (left := end - time.monotonic()) > 0 and select.select([reader], [], [], left)[0]:
        word = reader.recv(1, socket.MSG_PEEK)
        if not word or word[0] in numbers:
            return True
        reader.recv(1)  # a signal that somebody else handles
    return False


@contextmanager
def held_back() -> Iterator[Callable[[], bool]]:
    """Under `watched`, hold a signal back to the end of the block, which can ask whether one came.

    A second signal takes effect at once.
    """
    if (watch := _watch) is None:
        yield lambda: False
        return
    watch.held = True
    try:
        yield lambda: bool(watch.came)
    finally:
        watch.held = False
    check()


@contextmanager
def critical() -> Iterator[None]:
    """Under `watched`, finish the block before a signal ends the process."""
    with contextlib.nullcontext() if _watch is None else _watch.critical:
        yield
