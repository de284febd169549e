"""One voice for everything a user can get wrong: what was got, what was expected, how to fix it."""

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """The input is wrong, not the program: the command prints the message without a traceback."""


def unknown(kind: str, got: object, known: Iterable[str]) -> InputError:
    """The error for a name that is not one of `known`, with the nearest of them first."""
    names = sorted(known)
    near = difflib.get_close_matches(str(got), names, n=3, cutoff=0.5)
    hint = f"Did you mean {' or '.join(near)}? " if near else ""
    return InputError(f"unknown {kind} {got!r}. {hint}Known: {', '.join(names)}.")
