"""The format of a checkpoint: one file, which verifies itself.

A file holds a line of JSON with the round, the caller's notes, and the name, type and shape of
every array; then the bytes of the arrays; then the SHA-256 of all of that. It gets its name when it
is whole.
"""

import hashlib
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedda.core.tree import PyTree
from fedda.errors import InputError
from fedda.storage.files import replacing

DIGEST = hashlib.sha256().digest_size


class Checkpoint(NamedTuple):
    """A run after some of its rounds, and what was noted with it."""

    round: int
    run: PyTree
    notes: dict[str, Any]

    @property
    def progress(self) -> dict[str, Any]:
        """What the run itself noted."""
        return self.notes["progress"]


def on_host(run: PyTree) -> dict[str, np.ndarray]:
    """Return the arrays of a run by name; those of JAX are copied, as programs reuse them."""
    return {
        jax.tree_util.keystr(path): np.array(_data(leaf), copy=isinstance(leaf, jax.Array) or None)
        for path, leaf in jax.tree_util.tree_leaves_with_path(run)
    }


def write(path: Path, number: int, arrays: Mapping[str, np.ndarray], notes: Any) -> None:
    """Write the checkpoint of a round."""
    about = [(name, str(array.dtype), array.shape) for name, array in arrays.items()]
    header = json.dumps({"round": number, "arrays": about, "notes": notes})
    digest = hashlib.sha256()
    parts: list[bytes | memoryview] = [f"{header}\n".encode(), *map(_as_bytes, arrays.values())]
    with replacing(path) as file:
        for part in parts:
            file.write(part)
            digest.update(part)
        file.write(digest.digest())


def read(path: Path) -> bytes:
    """Return the content of a checkpoint file.

    Raises:
        InputError: The file is damaged.
    """
    content = path.read_bytes()
    if hashlib.sha256(memoryview(content)[:-DIGEST]).digest() != content[-DIGEST:]:
        raise InputError(
            f"{path} is damaged: its checksum does not match. Nothing was changed. Delete this "
            "file to continue from the checkpoint before it, if there is one, or else from the "
            "beginning."
        )
    return content


def decode(content: bytes, like: PyTree, where: str) -> Checkpoint:
    """Return the checkpoint that a file holds.

    Args:
        content: The content of the file, verified.
        like: A tree with the structure, types and shapes that are expected. Where its arrays have
            length 0, those of the checkpoint may have any length.
        where: The directory, for an error.

    Raises:
        InputError: The arrays are of other types or shapes.
    """
    position = content.index(b"\n") + 1
    header = json.loads(content[:position])
    named = jax.tree_util.tree_leaves_with_path(like)
    expected = [
        [jax.tree_util.keystr(path), str(data.dtype), list(data.shape)]
        for path, data in ((path, _data(leaf)) for path, leaf in named)
    ]
    nothing: list[Any] = ["no", "array", ""]
    for found, wanted in itertools.zip_longest(header["arrays"], expected, fillvalue=nothing):
        fixed = 1 if wanted[2][:1] == [0] else 0  # the first axis of which the length counts
        if [*found[:2], found[2][fixed:]] != [*wanted[:2], wanted[2][fixed:]]:
            raise InputError(
                f"{where} holds a run of another model, or of JAX with another jax_enable_x64: its "
                f"checkpoint of round {header['round']} has {_text(found)}, and this run "
                f"{_text(wanted)}. Nothing was changed. Use what the run was begun with, or choose "
                "another directory."
            )
    arrays: list[Any] = []
    for (_, dtype, shape), (_, leaf) in zip(header["arrays"], named, strict=True):
        array = np.frombuffer(content, jnp.dtype(dtype), math.prod(shape), position)
        position += array.nbytes
        arrays.append(array.reshape(shape))
        if _is_key(leaf):
            impl = jax.random.key_impl(jnp.empty((), leaf.dtype))
            arrays[-1] = jax.random.wrap_key_data(arrays[-1], impl=impl)
    run = jax.tree.unflatten(jax.tree.structure(like), arrays)
    return Checkpoint(header["round"], run, header["notes"])


def digest(tree: PyTree) -> str:
    """Return the SHA-256 of the types, shapes and numbers of a tree of arrays."""
    found = hashlib.sha256()
    for array in map(np.asarray, map(_data, jax.tree.leaves(tree))):
        found.update(f"{array.dtype}{array.shape}".encode())
        found.update(_as_bytes(array))
    return found.hexdigest()


def _as_bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _text(array: Sequence[Any]) -> str:
    return "{} {}{}".format(*array)


def _data(leaf: Any) -> Any:
    """Return an array or its shape and type; of random keys, those of the numbers behind them."""
    if not _is_key(leaf):
        return leaf
    keys = isinstance(leaf, jax.Array)
    return jax.random.key_data(leaf) if keys else jax.eval_shape(jax.random.key_data, leaf)


def _is_key(leaf: Any) -> bool:
    has_type = isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
    return has_type and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
