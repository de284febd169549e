"""Rebuild trees from the names of their arrays, if their structure is not known.

`checkpoint.on_host` names an array by its path, such as `.params['layers'][0]['kernel']`. A tree of
such names has nodes that give their arrays the same names again: an attribute becomes a `Node`, and
a key or a number becomes an entry of a dictionary.
"""

import ast
import re
from collections.abc import Iterable, Mapping
from typing import Any

import jax
from jax.tree_util import FlattenedIndexKey, GetAttrKey

STEP = re.compile(
    r"""\.(?P<attribute>\w+)"""
    r"""|\[<flat\ index\ (?P<place>\d+)>\]"""
    r"""|\[(?P<key>'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|\d+)\]""",
    re.VERBOSE,
)


@jax.tree_util.register_pytree_with_keys_class
class Node:
    """A part of a loaded tree with named parts, such as the state of a server's optimiser."""

    def __init__(self, parts: Mapping[str | int, Any]) -> None:
        self.parts = dict(parts)

    def __getattr__(self, name: str) -> Any:
        if name in vars(self).get("parts", ()):
            return self.parts[name]
        raise AttributeError(f"a loaded {self!r} has no {name!r}")

    def __repr__(self) -> str:
        return f"Node({', '.join(map(str, vars(self).get('parts', ())))})"

    def tree_flatten_with_keys(self) -> tuple[list[tuple[Any, Any]], list[str | int]]:
        """Return the parts with the keys of attributes, or of places if they have no names."""
        children = [
            (GetAttrKey(name) if isinstance(name, str) else FlattenedIndexKey(name), part)
            for name, part in self.parts.items()
        ]
        return children, list(self.parts)

    @classmethod
    def tree_unflatten(cls, names: list[str | int], parts: Iterable[Any]) -> "Node":
        """Undo `tree_flatten_with_keys`."""
        return cls(dict(zip(names, parts, strict=True)))


def steps(name: str) -> list[tuple[bool, str | int]]:
    """Return the path of an array: for each step, whether it is to a `Node`, and the key."""
    found = list[tuple[bool, str | int]]()
    position = 0
    while position < len(name):
        step = STEP.match(name, position)
        if step is None:  # a key of an unusual type: kept as it is
            return [*found, (False, name[position:])]
        if step["attribute"] is not None:
            found.append((True, step["attribute"]))
        elif step["place"] is not None:
            found.append((True, int(step["place"])))
        else:
            found.append((False, ast.literal_eval(step["key"])))
        position = step.end()
    return found


def nested(arrays: Mapping[str, Any]) -> Any:
    """Return the tree of arrays by name."""
    root: dict[Any, Any] = {}
    for name, array in arrays.items():
        path, here = steps(name), root
        for step in path[:-1]:
            here = here.setdefault(step, {})
        if not path:
            return array
        here[path[-1]] = array
    return _as_tree(root)


def _as_tree(part: Any) -> Any:
    if not isinstance(part, dict):
        return part
    parts = {key: _as_tree(value) for (_, key), value in part.items()}
    return Node(parts) if any(is_node for is_node, _ in part) else parts
