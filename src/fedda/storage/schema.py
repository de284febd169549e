"""Check the types of data that were read from a file.

A specification is one of:

- `str`, `bool`, `int` or `float`: a value of that type. A whole number within the range of floats
  is a `float` too. Truth values are not numbers.
- `None`: null.
- a tuple of specifications: any one of them.
- a list of one specification: a list of such values.
- a dictionary from keys to specifications: a table that has these keys. A key that ends in `?` may
  miss. The specification under the key `...`, if there is one, is for all further values.
- `Any`: whatever it is.
"""

from typing import Any

from fedda.errors import is_finite, shown

NUMBER_OR_NULL = (float, None)

_WORDS = {str: "text", bool: "true or false", int: "a whole number", float: "a number"}


def mismatch(value: Any, spec: Any, name: str = "the file") -> str | None:
    """Return in words the first difference between a value and a specification, or None."""
    parts: list[tuple[Any, Any, str]] = []
    if isinstance(spec, tuple):
        matches = any(mismatch(value, each) is None for each in spec)
    elif isinstance(spec, dict):
        matches = isinstance(value, dict)
        if matches:
            needed = [key for key in spec if key is not ... and not key.endswith("?")]
            if missing := [key for key in needed if key not in value]:
                return f"{name} lacks {', '.join(missing)}"
            of_others = spec.get(..., Any)
            parts = [
                (part, spec.get(key, spec.get(f"{key}?", of_others)), shown(key))
                for key, part in value.items()
            ]
    elif isinstance(spec, list):
        matches = isinstance(value, list)
        parts = [(item, spec[0], f"an item of {name}") for item in value] if matches else []
    else:
        matches = _is(value, spec)
    if not matches:
        return f"{name} is {shown(value)}, expected {_words(spec)}"
    return next((found for part in parts if (found := mismatch(*part))), None)


def _is(value: Any, kind: Any) -> bool:
    if kind is Any or value is None:
        return kind is Any or kind is None
    if kind not in (int, float):
        return kind is not None and isinstance(value, kind)
    if isinstance(value, float):
        return kind is float
    return isinstance(value, int) and not isinstance(value, bool) and is_finite(value)


def _words(spec: Any) -> str:
    if isinstance(spec, tuple):
        return " or ".join(map(_words, spec))
    if isinstance(spec, dict | list):
        return "a table" if isinstance(spec, dict) else "a list"
    return "null" if spec is None else _WORDS[spec]
