"""Who works on what: several processes, on one machine or many, fill one folder.

A claim is a file that only one process can create. It names its process, which touches it twice a
minute; so one that was not touched for ten minutes, or whose process is gone from this machine, is
stale and may be taken over. Takeovers are made one at a time, under a lock that the system lets go
of when its holder dies.
"""

import contextlib
import fcntl
import json
import os
import platform
import threading
import time
import uuid
from pathlib import Path
from types import TracebackType
from typing import Self

from fedda.storage import interrupts
from fedda.storage.files import read_json

RENEWED = 30.0  # seconds
STALE = 600.0  # seconds without renewal


class Claims:
    """The claims of this process in one folder; they end with the block."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._own: dict[str, str] = {}  # the text of each claim
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        interrupts.finish_first.append(self._drop_all)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        interrupts.finish_first.remove(self._drop_all)
        self._over.set()
        self._thread.join()
        self._drop_all()

    def take(self, name: str) -> bool:
        """Whether this is ours to do now."""
        path = self._path(name)
        text = json.dumps({"host": _host(), "pid": os.getpid(), "id": uuid.uuid4().hex})
        try:
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            if not self._taken_over(path, text):
                return False
        else:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
        self._own[name] = text
        return True

    def drop(self, name: str) -> None:
        """Gives a claim back, if nobody took it over."""
        text, path = self._own.pop(name), self._path(name)
        if _text(path) == text:
            path.unlink(missing_ok=True)

    def _drop_all(self) -> None:
        for name in list(self._own):
            self.drop(name)

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.claim"

    def _taken_over(self, path: Path, text: str) -> bool:
        with open(self._folder / "takeover.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not _is_stale(path):
                return False
            path.write_text(text, encoding="utf-8")  # in place: the file never ceases to exist
            return True

    def _renew(self) -> None:
        while not self._over.wait(RENEWED):
            for name, text in list(self._own.items()):
                # It may be given back this moment, or a network file system may not answer.
                with contextlib.suppress(OSError):
                    if _text(self._path(name)) == text:
                        os.utime(self._path(name))


def _is_stale(path: Path) -> bool:
    """Whether whoever claimed it cannot be at work any more."""
    try:
        age = time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return False  # it was given back this moment, and done: whoever asks again will see
    try:
        claim = read_json(path, {"host": str, "pid": int})
        gone = claim["host"] == _host() and not _is_alive(claim["pid"])
    except (FileNotFoundError, ValueError):
        gone = False  # given back this moment, or not written to the end yet
    return gone or age > STALE


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


def _host() -> str:
    """The machine since it started, and how it numbers processes: a container is another."""
    parts = [platform.node()]
    boot = Path("/proc/sys/kernel/random/boot_id")
    if boot.exists():
        parts += [boot.read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:  # it is another user's
        return True
    return True
