"""A real terminal of any size: tmux, whose screen can be read."""

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


class Terminal:
    """A terminal in which one program runs."""

    def __init__(self, server: str) -> None:
        self.server = server

    def tmux(self, *words: str) -> str:
        command = ["tmux", "-L", self.server, *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    def lines(self) -> list[str]:
        """Return the lines on the screen that are not empty."""
        return [line for line in self.tmux("capture-pane", "-p").splitlines() if line.strip()]

    def type(self, *keys: str) -> None:
        self.tmux("send-keys", *keys)

    def wait_for(self, text: str, seconds: float = 120) -> list[str]:
        """Wait until a text is on the screen; return the lines."""
        end = time.monotonic() + seconds
        while text not in "\n".join(lines := self.lines()):
            assert time.monotonic() < end, f"{text!r} did not come: {lines}"
            time.sleep(0.05)
        return lines


@contextmanager
def terminal(
    command: list[str], folder: Path, width: int, kind: str = "screen-256color"
) -> Iterator[Terminal]:
    """Run a program in a terminal, which stays open when the program has ended.

    Args:
        command: The program, with its arguments.
        folder: Where it runs.
        width: The number of columns.
        kind: The value of TERM.
    """
    if shutil.which("tmux") is None:
        reason = "tmux not found on PATH (Debian: tmux)"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(reason)
    shown = Terminal(f"{folder.name}-{os.getpid()}")
    hold = ["sh", "-c", '"$@"; echo "exit code $?"; exec sleep 600', "sh"]
    size = ["-x", str(width), "-y", "50", "-c", str(folder)]
    # The server passes on its own environment, but not TERM and COLUMNS.
    fresh = ["env", "-u", "COLUMNS", f"TERM={kind}"]
    try:
        shown.tmux("-f", "/dev/null", "new-session", "-d", *size, *fresh, *hold, *command)
        yield shown
    finally:
        subprocess.run(["tmux", "-L", shown.server, "kill-server"], check=False)
