"""Forked processes that run the command `fedda`, without the seconds that imports take.

The process that forks has imported everything, but must never start JAX's backend: its threads
would be missing in the fork.
"""

import atexit
import gc
import importlib
import math
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

COMMANDS = (
    *("matplotlib.figure", "sklearn.datasets", "fedda.cli.main", "fedda.experiments.compare"),
    *("fedda.experiments.sweep", "fedda.reports.comparison", "fedda_reproduction.reproduce"),
)
LONGEST = 60.0  # seconds that a process may take to end after a signal


def preload() -> None:
    """Import what commands import while they run."""
    warnings.filterwarnings("ignore", "os.fork.. was called", RuntimeWarning)
    for name in COMMANDS:
        importlib.import_module(name)
    gc.freeze()  # so that the memory of a fork is not copied when it collects garbage


class Ended(NamedTuple):
    """A process that has ended.

    Attributes:
        code: The exit code; minus the number of a signal.
        printed: What it printed on both outputs.
        work: Seconds of processor time that it and its children took.
    """

    code: int
    printed: str
    work: float


class Process:
    """A forked process that calls a function."""

    def __init__(
        self, call: Callable[[], object], log: Path, environment: Mapping[str, str] | None = None
    ) -> None:
        self.log, self.code, self.work = log, None, 0.0
        sys.stdout.flush()
        bridge = sys.modules.get("jax._src.xla_bridge")
        assert not getattr(bridge, "_backends", None), "a fork would lack the threads of JAX"
        self.pid = os.fork()
        if not self.pid:
            _run(call, log, environment or {})

    def ended(self, within: float, work: float = math.inf) -> bool:
        """Wait for the end of the process, at most this long, or until it has worked this long.

        Moments are drawn by processor time: on a busy machine, a process takes many times longer.
        """
        end = time.monotonic() + within
        while self.code is None:
            pid, status, used = os.wait4(self.pid, os.WNOHANG)
            if pid:
                self.code = os.waitstatus_to_exitcode(status)
                self.work = used.ru_utime + used.ru_stime
            elif time.monotonic() > end or self._work() > work:
                return False
            else:
                time.sleep(0.002)
        return True

    def _work(self) -> float:
        """Return the processor time of the process, and of its children that have not ended."""
        total = 0.0
        tasks = Path(f"/proc/{self.pid}/task/{self.pid}/children")
        with suppress(OSError):  # they have just ended
            for pid in [self.pid, *tasks.read_text().split()]:
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
        return total

    def send(self, number: int) -> None:
        """Send a signal, if the process still runs."""
        if not self.ended(0):
            os.kill(self.pid, number)

    def kill(self) -> bool:
        """Kill the process at once; return whether it was still running."""
        self.send(signal.SIGKILL)
        self.ended(LONGEST)
        return self.code == -signal.SIGKILL

    def result(self, within: float = 600.0) -> Ended:
        """Wait for the end, and check that no traceback was printed. A hang is a failure."""
        if not self.ended(within):
            self.kill()
            raise AssertionError(f"it hangs after {within:.0f} s: {self.printed()}")
        printed = self.printed()
        assert "Traceback" not in printed, printed
        return Ended(self.code, printed, self.work)

    def printed(self) -> str:
        return self.log.read_text(errors="replace")[-3000:] if self.log.exists() else ""


def _run(call: Callable[[], object], log: Path, environment: Mapping[str, str]) -> None:
    """Do what a new process would do, in a fork. Never returns."""
    code = 1
    try:
        os.environ.update(environment)
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        call()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            atexit._run_exitfuncs()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)


def fedda(*words: object, log: Path, environment: Mapping[str, str] | None = None) -> Process:
    """Start the command `fedda` with these words."""
    from fedda.cli.main import main

    def call() -> None:
        sys.argv = ["fedda", *map(str, words)]
        main()

    return Process(call, log, environment)
