"""The deployed example for tests: its files, its page, and faults of a real federation."""

import importlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from helpers.pages import ROOT, blocks

EXAMPLE = ROOT / "examples" / "flower-digits"
sys.path.insert(0, str(EXAMPLE))
example = importlib.import_module("federation")
problem = importlib.import_module("flower_digits.problem")

PAGE = ROOT / "docs" / "flower.md"
COMMANDS = [  # of the page, as lists of words
    shlex.split(line, comments=True)
    for block in blocks(PAGE, "sh")
    for line in block.text.replace("\\\n", " ").splitlines()
]


def summary(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "summary.json").read_text())


def soon(happened: Callable[[], bool], within: float = 180.0) -> None:
    """Wait until something has happened."""
    end = time.monotonic() + within
    while not happened():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


def descendants(pid: int) -> dict[int, str]:
    """Return the processes that this one started, and those that they started, with commands."""
    listed = subprocess.run(
        ["ps", "-A", "-ww", "-o", "pid=,ppid=,args="], capture_output=True, text=True, check=True
    ).stdout
    table = [line.split(None, 2) for line in listed.splitlines()]
    found: dict[int, str] = {}
    parents = {pid}
    while parents:
        children = {int(row[0]): row[2] for row in table if int(row[1]) in parents and len(row) > 2}
        found |= children
        parents = set(children)
    return found


def alive(pid: int) -> bool:
    """Return whether a process runs, and is no zombie."""
    state = Path(f"/proc/{pid}/stat")
    with suppress(FileNotFoundError, ProcessLookupError):
        return state.read_text().rsplit(")", 1)[1].split()[0] != "Z"
    return False


def kill(federation: Any, name: str) -> None:
    """End a process of a federation as a power cut would, with those that it started."""
    process = federation.processes[name]
    started = descendants(process.pid)
    process.kill()
    process.wait()
    kill_all(started)


def kill_serverapp(federation: Any) -> None:
    """Kill the process of a run's ServerApp, and nothing else."""
    started = descendants(federation.processes["superlink"].pid)
    found = [pid for pid, command in started.items() if "flwr-serverapp" in command]
    assert found, "there is no ServerApp to kill"
    kill_all(found)


def kill_all(pids: Collection[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    soon(lambda: not any(map(alive, pids)), within=5)
