"""The file format of checkpoints.

A checkpoint is one file. It starts with a line of JSON, which has the round, the caller's notes,
and the name, type and shape of every array. The bytes of the arrays follow, then the SHA-256 of
everything before. The file is written under a temporary name and renamed when it is complete.
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
    """A saved run: the number of finished rounds, its arrays, and notes.

    Attributes:
        round: The number of finished rounds.
        run: A tree of the arrays that the next round needs.
        notes: JSON that `RunDirectory.save` stored with the arrays.
    """

    round: int
    run: PyTree
    notes: dict[str, Any]

    @property
    def progress(self) -> dict[str, Any]:
        """The `progress` that was passed to `RunDirectory.save`."""
        return self.notes["progress"]


def on_host(run: PyTree) -> dict[str, np.ndarray]:
    """Return the arrays of a run by name, as NumPy arrays.

    Arrays of JAX are copied, because a compiled program may reuse their memory.
    """
    return {
        jax.tree_util.keystr(path): np.array(_data(leaf), copy=isinstance(leaf, jax.Array) or None)
        for path, leaf in jax.tree_util.tree_leaves_with_path(run)
    }


def write(
    path: Path,
    number: int,
    arrays: Mapping[str, np.ndarray],
    notes: Any,
    temporary: Path | None = None,
) -> None:
    """Write a checkpoint file.

    Args:
        path: The file.
        number: The number of finished rounds.
        arrays: The arrays by name, from `on_host`.
        notes: Anything that can be written as JSON.
        temporary: Where to write until the file is complete; by default a name that only this
            process uses.
    """
    about = [(name, str(array.dtype), array.shape) for name, array in arrays.items()]
    header = json.dumps({"round": number, "arrays": about, "notes": notes})
    digest = hashlib.sha256()
    parts: list[bytes | memoryview] = [f"{header}\n".encode(), *map(_as_bytes, arrays.values())]
    with replacing(path, temporary) as file:
        for part in parts:
            file.write(part)
            digest.update(part)
        file.write(digest.digest())


def read(path: Path) -> bytes:
    """Return the content of a checkpoint file, after a check of its SHA-256.

    Raises:
        InputError: The file is damaged.
    """
    content = path.read_bytes()
    if not is_whole(content):
        raise InputError(
            f"{path} is damaged: its checksum does not match. Nothing was changed. Delete this "
            "file to continue from the previous checkpoint, or from the beginning if there is none."
        )
    return content


def is_whole(content: bytes) -> bool:
    """Return whether the content of a file has the SHA-256 that it ends with."""
    return hashlib.sha256(memoryview(content)[:-DIGEST]).digest() == content[-DIGEST:]


def decode(content: bytes) -> tuple[int, dict[str, np.ndarray], dict[str, Any]]:
    """Return the round, the arrays and the notes from the content of a checkpoint file.

    Raises:
        ValueError: The content has a right checksum, but `write` has not written it.
    """
    arrays = {}
    try:
        position = content.index(b"\n") + 1
        header = json.loads(content[:position])
        for name, dtype, shape in header["arrays"]:
            array = np.frombuffer(content, _checked(jnp.dtype(dtype)), math.prod(shape), position)
            arrays[str(name)] = array.reshape(shape)
            position += array.nbytes
        return header["round"], arrays, header["notes"]
    except (LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"{type(error).__name__}: {error}") from error


def _checked(dtype: np.dtype) -> np.dtype:
    """Return a type that JAX has, or raise a `ValueError`: NumPy has others, such as dates."""
    known = dtype.kind == "b" or jnp.issubdtype(dtype, jnp.number)
    if not known or dtype.itemsize > (16 if dtype.kind == "c" else 8):
        raise ValueError(f"an array has the type {dtype}")
    return dtype


def restored(arrays: Mapping[str, np.ndarray], like: PyTree, what: str, advice: str) -> PyTree:
    """Return a tree of arrays from arrays by name, the inverse of `on_host`.

    Args:
        arrays: The arrays by name.
        like: A tree with the expected structure, types and shapes. An array of length 0 stands for
            an array of any length.
        what: The subject of an error message, such as "the checkpoint of round 3".
        advice: The last sentence of an error message.

    Raises:
        InputError: The arrays have other names, types or shapes.
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
    values = [_as_keys(arrays[name], leaf) for name, leaf in leaves.items()]
    return jax.tree.unflatten(jax.tree.structure(like), values)


def digest(tree: PyTree) -> str:
    """Return the SHA-256 of the types, shapes and numbers of a tree of arrays."""
    sha256 = hashlib.sha256()
    for array in map(np.asarray, map(_data, jax.tree.leaves(tree))):
        sha256.update(f"{array.dtype}{array.shape}".encode())
        sha256.update(_as_bytes(array))
    return sha256.hexdigest()


def _as_bytes(array: np.ndarray) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _type(array: Any, any_length: bool) -> str:
    return "absent" if array is None else f"{array.dtype}{list(array.shape[any_length:])}"


def _data(leaf: Any) -> Any:
    """Return an array, or for random keys the array of their integers. Also works on shapes."""
    if not _is_key(leaf):
        return leaf
    keys = isinstance(leaf, jax.Array)
    return jax.random.key_data(leaf) if keys else jax.eval_shape(jax.random.key_data, leaf)


def _as_keys(array: np.ndarray, like: Any) -> Any:
    """Return an array, or random keys made from its integers if `like` is an array of keys."""
    if not _is_key(like):
        return array
    impl = jax.random.key_impl(jnp.empty((), like.dtype))
    return jax.random.wrap_key_data(jnp.asarray(array), impl=impl)


def _is_key(leaf: Any) -> bool:
    has_type = isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)
    return has_type and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
