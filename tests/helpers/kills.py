"""Processes that are killed between, and within, any two operations on files."""

import builtins
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fedda.storage import files

CHANGES = ("fsync", "replace", "truncate", "unlink", "mkdir", "rmdir")


class Killed(BaseException):
    """The process is dead: nothing that it does from now on has an effect."""


class Operations:
    """The operations of a process on files, counted; the process dies within one of them."""

    def __init__(self, last: int | None, cut: float) -> None:
        self.count, self.last, self.cut = 0, last, cut
        self.events: list[tuple[str, str]] = []

    def __call__(self, name: str, path: Any, change: Callable[[], Any]) -> Any:
        self.count += 1
        if self.last is not None and self.count > self.last:
            raise Killed
        result = change()
        where = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else str(path)
        self.events.append((name, where))
        return result

    def write(self, file: Any, content: bytes) -> int:
        """Write all of it; or a part, if the process dies within."""
        if self.last is not None and self.count == self.last:
            file.write(memoryview(content)[: int(self.cut * len(content))])
            file.flush()
        return int(self("write", file.name, lambda: file.write(content)))


class _File:
    """A file whose writes are operations."""

    def __init__(self, file: Any, operations: Operations) -> None:
        self._file, self.write = file, lambda content: operations.write(file, content)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> "_File":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


@contextmanager
def killed_after(last: int | None, cut: float = 0.5) -> Iterator[Operations]:
    """Let only the first `last` operations of the block have an effect, and `cut` of a last write.

    The block itself, of which any code after that may run, ends with `Killed`; with None, it runs
    to its end, and what it did can be read in `events`.
    """
    operations = Operations(last, cut)

    def opened(path: Any, mode: str = "r", *rest: Any, **more: Any) -> Any:
        usual = partial(builtins.open, path, mode, *rest, **more)
        file = operations("open", path, usual)
        return _File(file, operations)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "open", opened, raising=False)
        for name in CHANGES:
            usual = getattr(os, name)

            def change(path: Any, *rest: Any, name: str = name, usual: Any = usual) -> Any:
                if isinstance(path, str | Path) and str(path).endswith(files.LOCK):
                    return usual(path, *rest)
                return operations(name, path, lambda: usual(path, *rest))

            patch.setattr(os, name, change)
        try:
            yield operations
        except Killed:
            if last is None:
                raise
