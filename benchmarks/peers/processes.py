"""Start the peers and talk to them over pipes, and measure who used the processors.

Standard library only. Processor time is read from /proc; where there is none, it is not reported.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

STARTS_WITHIN, ANSWERS_WITHIN = 300, 900  # seconds


class PeerError(Exception):
    """A peer ended, or did not answer."""


class Peer:
    """A process that was started with a problem, and waits to be told."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], log: Path) -> None:
        self.log = log
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            env=os.environ | environment,
            text=True,
            start_new_session=True,  # so that a Ctrl-C is ours, and all of it can be ended
        )

    def hear(self, within: float = ANSWERS_WITHIN) -> dict[str, Any]:
        pipe = self.process.stdout
        assert pipe is not None
        heard, _, _ = select.select([pipe], [], [], within)  # an answer is one line, never more
        line = pipe.readline() if heard else ""
        if not line:
            why = self.log.read_text().strip().splitlines() or ["no answer"]
            raise PeerError(f"{why[-1]} (see {self.log})" if heard else f"no answer in {within} s")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, line: str) -> dict[str, Any]:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended; its last line is reported below
            print(line, file=self.process.stdin, flush=True)
        return self.hear()

    def close(self) -> None:
        """Closes its input, at which a peer ends; one that does not is killed."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.close()
            self.process.wait(30)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


class Usage(NamedTuple):
    """Processor seconds since the machine started."""

    when: float
    busy: float
    by_process: dict[int, tuple[int, float]]  # parent, seconds


def usage() -> Usage | None:
    if not Path("/proc/stat").exists():
        return None
    tick = os.sysconf("SC_CLK_TCK")
    user, nice, system, _, _, irq, softirq, steal = (
        int(word) / tick for word in Path("/proc/stat").read_text().split()[1:9]
    )
    processes = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = stat.read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        processes[int(stat.parent.name)] = (int(words[1]), (int(words[11]) + int(words[12])) / tick)
    busy = user + nice + system + irq + softirq + steal
    return Usage(time.monotonic(), busy, processes)


def of_tree(usage: Usage, root: int) -> float:
    """Processor seconds of a process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for number, (parent, _) in usage.by_process.items():
        children.setdefault(parent, []).append(number)
    total, waiting = 0.0, [root]
    while waiting:
        number = waiting.pop()
        total += usage.by_process.get(number, (0, 0.0))[1]
        waiting += children.get(number, [])
    return total


class Shares(NamedTuple):
    """Of the time between two readings, in cores."""

    foreign: float  # what neither this driver nor a peer used
    idle: dict[str, float]  # what peers used that were not asked


def shares(before: Usage, after: Usage, peers: dict[str, Peer], asked: str) -> Shares:
    elapsed = after.when - before.when
    used = {
        name: (of_tree(after, peer.process.pid) - of_tree(before, peer.process.pid)) / elapsed
        for name, peer in peers.items()
    }
    ours = (of_tree(after, os.getpid()) - of_tree(before, os.getpid())) / elapsed
    foreign = (after.busy - before.busy) / elapsed - ours
    return Shares(foreign, {name: share for name, share in used.items() if name != asked})
