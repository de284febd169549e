"""An algorithm in a Python file of the user: the only `Algorithm` that the file defines.

The file must not need other files: a run directory keeps its checksum, but not that of others.
"""

import sys
import traceback
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from fedda.core.algorithm import Algorithm
from fedda.core.check_structure import check_parts
from fedda.errors import InputError

HOW = "Define one, as in docs/own_algorithm.md: name = fedda.Algorithm(...)"
_loaded: set[str] = set()


class Loaded(NamedTuple):
    """The algorithm of a file, and the docstring of the file."""

    algorithm: Algorithm
    about: str


@lru_cache
def load(path: Path, sha256: str) -> Loaded:
    """Run a file, and return the algorithm that it defines.

    Args:
        path: The file.
        sha256: The checksum of its content, so that a changed file is another algorithm.

    Raises:
        InputError: The file cannot be run, or does not define exactly one algorithm.
    """
    _loaded.add(str(path))
    module = ModuleType(f"fedda_algorithm_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # where the types of Hyper are looked up
    try:
        exec(compile(path.read_bytes(), path, "exec"), module.__dict__)
    except Exception as error:
        raise InputError(mistake(error) or f"{path}: {error}") from error
    records = {id(v): (k, v) for k, v in vars(module).items() if isinstance(v, Algorithm)}
    if len(records) != 1:
        names = ", ".join(name for name, _ in records.values()) or "none"
        raise InputError(f"{path} must define one fedda.Algorithm, got {names}. {HOW}")
    ((name, record),) = records.values()
    try:
        check_parts(record)
    except InputError as error:
        raise InputError(f"{path}, {name}: {error}") from error
    return Loaded(record, (module.__doc__ or "").strip())


def mistake(error: BaseException) -> str | None:
    """Return file, line and message of an error that comes from the file of an algorithm."""
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        places.append((error.filename or "", error.lineno))
    found = [(file, line) for file, line in places if file in _loaded]
    if not found:
        return None
    message = error.msg if isinstance(error, SyntaxError) else str(error)
    return "{}, line {}: {}: {}".format(*found[-1], type(error).__name__, message)
