"""The format of a checkpoint: one file, which verifies itself.

A file holds a line of JSON with the round, the caller's notes, and the name, type and shape of
every array; then the bytes of the arrays; then the SHA-256 of all of that. It gets its name when it
is whole.
"""

import hashlib
import json
import math
from collections.abc import Mapping
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
    with replacing(path, path.with_name(".part")) as file:  # the next one uses the same
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


def decode(content: bytes) -> tuple[int, dict[str, np.ndarray], dict[str, Any]]:
    """Return the round, the arrays and the notes of a checkpoint file with this content."""
    position = content.index(b"\n") + 1
    header = json.loads(content[:position])
    arrays = {}
    for name, dtype, shape in header["arrays"]:
        array = np.frombuffer(content, jnp.dtype(dtype), math.prod(shape), position)
        arrays[name] = array.reshape(shape)
        position += array.nbytes
    return header["round"], arrays, header["notes"]


def restored(arrays: Mapping[str, np.ndarray], like: PyTree, what: str, advice: str) -> PyTree:
    """Return arrays by name as a tree.

    Args:
        arrays: What `on_host` gave.
        like: A tree with the structure, types and shapes that are expected. Where its arrays have
            length 0, those of the result may have any length.
        what: What the arrays are of, for an error.
        advice: What to do about an error.

    Raises:
        InputError: The arrays are of other names, types or shapes.
    """
    named = jax.tree_util.tree_leaves_with_path(like)
    leaves = {jax.tree_util.keystr(path): leaf for path, leaf in named}
    for name in {**leaves, **arrays}:
        expected = _data(leaves[name]) if name in leaves else None
        any_length = expected is not None and expected.shape[:1] == (0,)
        there, here = (_type(array, any_length) for array in (arrays.get(name), expected))
        if there != here:
            raise InputError(
                f"{what} is of another algorithm, model, federation or memory_gb, or of JAX with "
                f"another jax_enable_x64: in it {name} is {there}, here {here}. {advice}"
            )
    whole = [_as_keys(arrays[name], leaf) for name, leaf in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(like), whole)


def digest(tree: PyTree) -> str:
    """Return the SHA-256 of the types, shapes and numbers of a tree of arrays."""
    found = hashlib.sha256()
    for array in map(np.asarray, map(_data, jax.tree.leaves(tree))):
        found.update(f"{array.dtype}{array.shape}".encode())
        found.update(_as_bytes(array))
    return found.hexdigest()


def _as_bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _type(array: Any, any_length: bool) -> str:
    return "absent" if array is None else f"{array.dtype}{list(array.shape[any_length:])}"


def _data(leaf: Any) -> Any:
    """Return an array or its shape and type; of random keys, those of the numbers behind them."""
    if not _is_key(leaf):
        return leaf
    keys = isinstance(leaf, jax.Array)
    return jax.random.key_data(leaf) if keys else jax.eval_shape(jax.random.key_data, leaf)


def _as_keys(array: np.ndarray, like: Any) -> Any:
    """Return an array; where random keys are expected, those that it holds the numbers of."""
    if not _is_key(like):
        return array
    impl = jax.random.key_impl(jnp.empty((), like.dtype))
    return jax.random.wrap_key_data(jnp.asarray(array), impl=impl)


def _is_key(leaf: Any) -> bool:
    has_type = isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
    return has_type and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
