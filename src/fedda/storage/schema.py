"""Check the types of data that were read from a file.

A specification is one of:

- `str`, `bool`, `int` or `float`: a value of that type. An integer within the range of floats
  also matches `float`. A boolean is not a number.
- `None`: null.
- a tuple of specifications: any one of them.
- a list with one specification: a list of such values.
- a dictionary from keys to specifications: a table with these keys. A key that ends in `?` is
  optional. The specification under the key `...`, if present, applies to all other values.
- `Any`: any value.
"""

from typing import Any

from fedda.errors import is_finite, shown

NUMBER_OR_NULL = (float, None)

_NAMES = {str: "text", bool: "true or false", int: "a whole number", float: "a number"}


def mismatch(value: Any, spec: Any, name: str = "the file") -> str | None:
    """Return a description of the first difference between a value and a specification, or None.

    Args:
        value: The value.
        spec: The specification.
        name: The name of the value in the description.
    """
    parts: list[tuple[Any, Any, str]] = []
    if isinstance(spec, tuple):
        matches = any(mismatch(value, option) is None for option in spec)
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
        return f"{name} is {shown(value)}, expected {_name(spec)}"
    return next((difference for part in parts if (difference := mismatch(*part))), None)


def _is(value: Any, kind: Any) -> bool:
    if kind is Any or value is None:
        return kind is Any or kind is None
    if kind not in (int, float):
        return kind is not None and isinstance(value, kind)
    if isinstance(value, float):
        return kind is float
    return isinstance(value, int) and not isinstance(value, bool) and is_finite(value)


def _name(spec: Any) -> str:
    if isinstance(spec, tuple):
        return " or ".join(map(_name, spec))
    if isinstance(spec, dict | list):
        return "a table" if isinstance(spec, dict) else "a list"
    return "null" if spec is None else _NAMES[spec]
