"""Ctrl-C and SIGTERM that wait until something is whole."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def held_back() -> Iterator[Callable[[], bool]]:
    """Holds a signal back to the end of the block, which can ask whether one came.

    A second one comes at once. Signals that are ignored, or end the process without Python, stay as
    they are.
    """
    if threading.current_thread() is not threading.main_thread():  # it gets no signals
        yield lambda: False
        return
    each = (signal.SIGINT, signal.SIGTERM)
    usual = {number: own for number in each if callable(own := signal.getsignal(number))}
    came: list[int] = []

    def let_through() -> None:
        for number, own in usual.items():
            signal.signal(number, own)

    def hold(number: int, _: object) -> None:
        came.append(number)
        let_through()

    for number in usual:
        signal.signal(number, hold)
    try:
        yield lambda: bool(came)
    finally:
        let_through()
        if came:
            signal.raise_signal(came[0])
