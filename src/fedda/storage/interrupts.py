"""Ctrl-C and SIGTERM: when they take effect, and what is finished before.

An exception that a signal handler raises can be lost: Python drops it where the compiler calls back
into Python. Under `watched`, as commands train, a signal is therefore noted, and `check` raises it
between two compiled programs. If the compiler or the device keeps the main thread from that for
long, another thread ends the process. Without `watched`, signals are what Python makes of them:
files are whole then, too, for an unfinished one never gets its name.
"""

import contextlib
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager

PATIENCE = 1.0  # seconds after a signal in which the main thread may call `check`

# Functions that finish what is written in the background, or give back what other processes wait
# for. They are called before the process is ended, the last one first.
finish_first: list[Callable[[], object]] = []


class Interrupted(KeyboardInterrupt):
    """A signal that came while signals were watched."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


class _Watch:
    def __init__(self) -> None:
        self.came = 0  # the number of the first signal
        self.held = False
        self.critical = threading.RLock()

    def note(self, number: int, _: object) -> None:
        self.came = self.came or number


_watch: _Watch | None = None


def check() -> None:
    """Raise `Interrupted` if a signal came; for places where a run can stop."""
    if _watch is not None and _watch.came and not _watch.held:
        raise Interrupted(_watch.came)


@contextmanager
def watched(
    numbers: Sequence[int], on_wait: Callable[[], None], end: Callable[[int], None]
) -> Iterator[None]:
    """Note signals for `check`, which is called once more at the end of the block.

    Args:
        numbers: The signals. Those that the process ignores are left alone.
        on_wait: Called in another thread if the signal is `held_back` for long.
        end: Called in another thread, to end the process, if the block has not ended some time
            after the first signal, or with a second one; but not before `critical` blocks and
            `finish_first`.
    """
    global _watch
    if threading.current_thread() is not threading.main_thread():  # it gets no signals
        yield
        return
    usual = {
        number: handler
        for number in numbers
        if (handler := signal.getsignal(number)) not in (signal.SIG_IGN, None)
    }
    watch = _watch = _Watch()
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
                continue
            if first:
                first = False
                if _another(reader, usual):  # the block ended, or a second one
                    continue
                if watch.held:
                    with contextlib.suppress(Exception, SystemExit):  # nobody reads it any more
                        on_wait()
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
        check()
    finally:
        for number, handler in usual.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(before)
        _watch = None
        writer.close()
        thread.join()
        reader.close()


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
