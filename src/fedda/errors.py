"""One voice for everything a user can get wrong: what was got, what was expected, how to fix it."""

import difflib
import errno
import importlib
import math
import os
import reprlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Any


class InputError(ValueError):
    """The input is wrong, not the program: the command prints the message without a traceback."""


class MissingExtraError(InputError, ImportError):
    """An optional package is not installed: the message says how to install it."""


LARGEST = 2**31 - 1  # what a 32-bit integer of a compiled program can hold

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200


def shown(value: object) -> str:
    """Return the representation of a value for an error message, shortened if it is long."""
    try:
        return _SHORT.repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits; deeply nested lists
        return f"{type(value).__name__} that is too long to print"


def is_finite(value: Any) -> bool:
    """Return whether a real number is finite, and not an integer beyond the range of floats."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def unknown(kind: str, got: object, known: Iterable[str]) -> InputError:
    """The error for a name that is not one of `known`, with the nearest of them first."""
    names = sorted(known)
    text = got if isinstance(got, str) else shown(got)
    begun = [name for name in names if text and name.startswith(text.lower())]  # as in FedDA
    near = begun[:3] or difflib.get_close_matches(text, names, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    return InputError(f"unknown {kind} {shown(got)}. {hint}Known: {', '.join(names)}.")


def check_whole_number(name: str, value: Any, least: int) -> None:
    """Refuse all but whole numbers from `least` to `LARGEST`. NumPy's are allowed, True is not."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise InputError(f"{name} must be a whole number of at least {least}, got {shown(value)}.")
    if int(value) > LARGEST:
        raise InputError(f"{name} must be below 2**31, got {shown(value)}.")


def import_extra(module: str, extra: str, action: str) -> Any:
    """Import a module of an optional package.

    Args:
        module: The module.
        extra: The extra of `fedda` that installs its package.
        action: What cannot be done without it, such as "draw figures".

    Raises:
        MissingExtraError: The package is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingExtraError(
            f"cannot {action}: {package} is not installed. Install it: pip install 'fedda[{extra}]'"
        ) from error


def is_full(error: OSError) -> bool:
    """Whether the disk is full, or the user's share of it."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def writing(option: str) -> Iterator[None]:
    """Turns the system's refusal to write into advice to give another of this option."""
    try:
        yield
    except OSError as error:
        # Permission may be lacking to read a file as well, and then the option is not to blame.
        reading = isinstance(error, PermissionError) and os.path.isfile(error.filename or "")
        if reading or (error.filename is None and not is_full(error)):
            raise
        where = "" if error.filename is None else f" to {error.filename}"
        advice = "Free some space there, or give" if is_full(error) else "Give"
        raise InputError(
            f"cannot write{where} ({error.strerror}). {advice} another {option}."
        ) from None
