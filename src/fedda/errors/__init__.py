"""Errors for wrong input. A message says what was got, what was expected, and how to fix it."""

import difflib
import errno
import importlib
import math
import os
import re
import reprlib
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Integral
from pathlib import Path
from typing import Any


class InputError(ValueError):
    """Wrong input of a user. The command line prints the message without a traceback."""


class MissingExtraError(InputError, ImportError):
    """An optional package is not installed. The message says how to install it."""


LARGEST = 2**31 - 1  # the largest 32-bit integer, the integer type of a compiled program

_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 200


def shown(value: object) -> str:
    """Return the `repr` of a value for an error message, shortened if it is long."""
    try:
        return _SHORT.repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits; deeply nested lists
        return f"{type(value).__name__} that is too long to print"


def is_finite(value: Any) -> bool:
    """Return whether a real number is finite. Integers beyond the range of floats are not."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def unknown(kind: str, got: object, known: Iterable[str]) -> InputError:
    """Return the error for an unknown name, with similar known names as suggestions."""
    names = sorted(known)
    text = got if isinstance(got, str) else shown(got)
    completions = [name for name in names if text and name.startswith(text.lower())]  # "FedDA"
    near = completions[:3] or difflib.get_close_matches(text, names, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    return InputError(f"unknown {kind} {shown(got)}. {hint}Known: {', '.join(names)}.")


def unknown_setting(kind: str, name: str, known: Iterable[str]) -> InputError:
    """Return the error for an unknown setting, with advice if another library has this name."""
    names = list(known)
    file = Path(__file__).with_name("other_names.toml")
    for advice in tomllib.loads(file.read_text(encoding="utf-8"))["advice"]:
        if advice["if_known"] in names and name.lower() in advice["names"]:
            return InputError(f"unknown {kind} {shown(name)}. {advice['text']}")
    return unknown(kind, name, names)


def unknown_algorithm(name: object, labels: Mapping[str, str]) -> InputError:
    """Return the error for an unknown algorithm; `labels` are their names in publications."""

    def letters(text: str) -> str:
        return re.sub(r"[\W_]", "", text).lower()

    for known, label in labels.items():
        if letters(label) == letters(str(name)):
            return InputError(f"unknown algorithm {name!r}: {label} is {known} here.")
    return unknown("algorithm", name, labels)


def check_whole_number(name: str, value: Any, least: int) -> None:
    """Raise an `InputError` unless `value` is an integer from `least` to `LARGEST`.

    NumPy integers are allowed, booleans are not.
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise InputError(f"{name} must be a whole number of at least {least}, got {shown(value)}.")
    if int(value) > LARGEST:
        raise InputError(f"{name} must be below 2**31, got {shown(value)}.")


def import_extra(module: str, extra: str, action: str) -> Any:
    """Import a module of an optional package.

    Args:
        module: The full name of the module.
        extra: The extra of `fedda` that installs the package.
        action: The action that needs the package, such as "draw figures".

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
    """Return whether an error says that the disk, or the user's quota, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def writing(option: str) -> Iterator[None]:
    """Turn write errors of the operating system into an `InputError` that names an option.

    Args:
        option: The option with which the user chose the path.
    """
    try:
        yield
    except OSError as error:
        # A missing permission to read a file has nothing to do with the option.
        reading = isinstance(error, PermissionError) and os.path.isfile(error.filename or "")
        if reading or (error.filename is None and not is_full(error)):
            raise
        where = "" if error.filename is None else f" to {error.filename}"
        advice = "Free some space there, or give" if is_full(error) else "Give"
        raise InputError(
            f"cannot write{where} ({error.strerror}). {advice} another {option}."
        ) from None
