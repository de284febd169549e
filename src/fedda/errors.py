"""One voice for everything a user can get wrong: what was got, what was expected, how to fix it."""

import difflib
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from numbers import Integral
from typing import Any


class InputError(ValueError):
    """The input is wrong, not the program: the command prints the message without a traceback."""


def unknown(kind: str, got: object, known: Iterable[str]) -> InputError:
    """The error for a name that is not one of `known`, with the nearest of them first."""
    names = sorted(known)
    begun = [name for name in names if got and name.startswith(str(got).lower())]  # as in FedDA
    near = begun[:3] or difflib.get_close_matches(str(got), names, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    return InputError(f"unknown {kind} {got!r}. {hint}Known: {', '.join(names)}.")


def check_whole_number(name: str, value: Any, least: int) -> None:
    """Refuses all but whole numbers from `least` on; NumPy's are some, True is none."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < least:
        raise InputError(f"{name} must be a whole number of at least {least}, got {value!r}.")


@contextmanager
def writing(option: str) -> Iterator[None]:
    """Turns the system's refusal to write into advice to give another of this option."""
    try:
        yield
    except OSError as error:
        # Permission may be lacking to read a file as well, and then the option is not to blame.
        reading = isinstance(error, PermissionError) and os.path.isfile(error.filename or "")
        if error.filename is None or reading:
            raise
        raise InputError(
            f"cannot write to {error.filename} ({error.strerror}). Give another {option}."
        ) from None
