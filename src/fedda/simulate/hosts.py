"""Several processes that train one run, each on a machine with devices of its own.

Process 0 listens where the others call. That line stays open: over it they make sure that all are
about to do the same, and process 0, which alone reads and writes the run's directory, passes on
what it has read. The numbers of the training go the way of `jax.distributed` instead: Gloo between
processors, NCCL between GPUs. Neither asks who is there, so the network must be trusted.
"""

import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, TypeVar

import jax

from fedda.errors import InputError
from fedda.storage import interrupts

T = TypeVar("T")


class _Line(NamedTuple):
    """Open connections: those of process 0 to all others, or that of another to process 0."""

    process: int
    processes: int
    peers: list[socket.socket]

    def everyones(self, word: bytes) -> list[bytes]:
        """What each of the processes says, once all have said something."""
        if self.process == 0:
            words = [word, *map(_receive, self.peers)]
            for peer in self.peers:
                for each in words:
                    _send(peer, each)
            return words
        _send(self.peers[0], word)
        return [_receive(self.peers[0]) for _ in range(self.processes)]


_line: _Line | None = None


def join(coordinator: str, processes: int, process: int, plan: dict[str, Any], wait: float) -> None:
    """Makes this process one of several; returns once all are there and have the same plan.

    They meet here first because JAX ends a process that waits for others in vain, with a stack
    trace of its own, where nothing can be said about it.
    """
    global _line
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal():
        raise InputError(f"--coordinator must be HOST:PORT, of process 0, got {coordinator!r}.")
    if processes < 2 or not 0 <= process < processes:
        raise InputError(
            f"--processes must be at least 2 and --process below it, from 0, got {processes} and "
            f"{process}."
        )
    meet = _await_others if process == 0 else _call
    hello = _Hello(process, {"processes": processes} | plan)
    address = (host.strip("[]"), int(port))
    _line = _Line(process, processes, meet(address, hello, wait))
    # Gloo prints to the standard output, which is for results.
    sys.stdout = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    jax.distributed.initialize(
        coordinator, processes, process, coordinator_bind_address=coordinator
    )
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # JAX would take note of it, and go on
    jax.devices()  # which the processes tell one another: now, while all are waiting for it


def is_first() -> bool:
    """Whether this process is the one that reads and writes files, and talks to people."""
    return _line is None or _line.process == 0


def agreed(function: Callable[[], T]) -> T:
    """Calls the function in every process; if one of them is refused, all are."""
    if _line is None:
        return function()
    refusal = None
    try:
        result = function()
    except (InputError, OSError) as error:
        refusal = error
    words = _line.everyones(str(refusal or "").encode())
    if refusal is not None:
        raise refusal
    for process, word in enumerate(words):
        if word:
            raise InputError(f"process {process}: {word.decode()}")
    return result


def from_first(function: Callable[[], bytes]) -> bytes:
    """What the function gives in process 0, the only one to call it."""
    if _line is None:
        return function()
    word = agreed(lambda: function() if is_first() else b"")
    return _line.everyones(word)[0]


@contextmanager
def parting() -> Iterator[None]:
    """Ends a process that fails at once: JAX would let it wait for the others, and them for it."""
    try:
        yield
    except BaseException as error:
        code = error.code if isinstance(error, SystemExit) else 1
        if _line is None or not code:
            raise
        if not isinstance(error, SystemExit):
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)


class _Hello(NamedTuple):
    """What a process says when it calls."""

    process: int
    plan: dict[str, Any]


def _await_others(address: tuple[str, int], own: _Hello, wait: float) -> list[socket.socket]:
    until = time.monotonic() + wait
    came: dict[int, socket.socket] = {}
    everyone, trouble = range(1, own.plan["processes"]), ""
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    with socket.create_server(address, family=family) as door, ExitStack() as if_in_vain:
        while len(came) < len(everyone) and not trouble:
            door.settimeout(max(until - time.monotonic(), 0.001))
            try:
                caller, _ = door.accept()
            except TimeoutError:
                missing = ", ".join(str(each) for each in everyone if each not in came)
                trouble = (
                    f"of {len(everyone) + 1} processes, number {missing} did not come within "
                    f"{wait:g} seconds. Start each with the same command and its own --process."
                )
                break
            if_in_vain.enter_context(caller)
            caller.settimeout(5)
            try:
                other = _Hello(*json.loads(_receive(caller)))
            except (OSError, ValueError, TypeError):  # someone else
                caller.close()
                continue
            trouble = _difference(own, other)
            if other.process in came:
                trouble = f"two processes were started with --process {other.process}."
                _send(caller, trouble.encode())
            came.setdefault(other.process, caller)
        for peer in came.values():
            _send(peer, trouble.encode())
            peer.settimeout(None)
        if trouble:
            raise InputError(trouble)
        if_in_vain.pop_all()
    return [came[number] for number in sorted(came)]


def _difference(own: _Hello, other: _Hello) -> str:
    """What keeps two processes from training one run."""
    for name in own.plan | other.plan:
        here, there = (each.plan.get(name, "nothing") for each in (own, other))
        if here != there:
            return (
                f"process 0 was given {name} = {here}, but process {other.process} {there}. Start "
                "each with the same command and its own --process."
            )
    return ""


def _call(address: tuple[str, int], own: _Hello, wait: float) -> list[socket.socket]:
    until = time.monotonic() + wait
    while True:
        try:
            line = socket.create_connection(address, timeout=5)
            break
        except OSError as error:
            if time.monotonic() > until:
                raise InputError(
                    f"process 0 did not answer at {address[0]}:{address[1]} within {wait:g} "
                    f"seconds ({error}). Is it running, and can it be reached from here?"
                ) from None
            time.sleep(0.1)
    _send(line, json.dumps(own).encode())
    line.settimeout(2 * wait + 5)  # process 0 may wait for the rest, and then says what came of it
    if trouble := _receive(line).decode():
        line.close()
        raise InputError(trouble)
    line.settimeout(None)
    return [line]


def _send(peer: socket.socket, word: bytes) -> None:
    peer.sendall(len(word).to_bytes(8, "big") + word)


def _receive(peer: socket.socket) -> bytes:
    return _exactly(peer, int.from_bytes(_exactly(peer, 8), "big"))


def _exactly(peer: socket.socket, size: int) -> bytes:
    got = bytearray()
    while len(got) < size:
        while peer.gettimeout() is None and not select.select([peer], [], [], 0.2)[0]:
            interrupts.check()
        part = peer.recv(min(size - len(got), 1 << 20))
        if not part:
            raise ConnectionError("another process of this run has ended. See what it says.")
        got += part
    return bytes(got)
