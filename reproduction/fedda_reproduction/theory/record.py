"""The record of all measurements as a file."""

import json
from typing import Any


def text_of(found: dict[str, Any]) -> str:
    """JSON with one line for each row of a table, so that changes can be read."""

    def lines(value: Any, depth: int) -> str:
        pad = " " * (depth + 1)
        if isinstance(value, dict) and (depth < 3 or not _is_row(value)):
            parts = [f"{pad}{json.dumps(key)}: {lines(of, depth + 1)}" for key, of in value.items()]
            return "{\n" + ",\n".join(parts) + "\n" + " " * depth + "}"
        if isinstance(value, list) and value and isinstance(value[0], dict):
            rows = [pad + json.dumps(row, allow_nan=False) for row in value]
            return "[\n" + ",\n".join(rows) + "\n" + " " * depth + "]"
        return json.dumps(value, allow_nan=False)

    return lines(found, 0) + "\n"


def _is_row(value: dict[str, Any]) -> bool:
    return not any(isinstance(each, dict) for each in value.values())
