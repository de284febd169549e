"""Arithmetic on pytrees of arrays.

A scalar is cast to the dtype of each leaf it is combined with, so a tree keeps its dtypes.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import ArrayLike

PyTree = Any


def add(x: PyTree, y: PyTree) -> PyTree:
    return jax.tree.map(jnp.add, x, y)


def sub(x: PyTree, y: PyTree) -> PyTree:
    return jax.tree.map(jnp.subtract, x, y)


def scale(a: ArrayLike, x: PyTree) -> PyTree:
    return jax.tree.map(lambda leaf: jnp.asarray(a, leaf.dtype) * leaf, x)


def axpy(a: ArrayLike, x: PyTree, y: PyTree) -> PyTree:
    """Return `a x + y`."""
    return add(scale(a, x), y)


def blend(a: ArrayLike, x: PyTree, y: PyTree) -> PyTree:
    """Return `a x + (1 - a) y`, one step of a damped momentum."""
    return add(scale(a, x), scale(1 - jnp.asarray(a), y))


def square(x: PyTree) -> PyTree:
    return jax.tree.map(jnp.square, x)


def over_root(x: PyTree, v: PyTree, eps: ArrayLike) -> PyTree:
    """Return `x / (sqrt(v) + eps)`, the direction of Adam and AdaGrad."""
    return jax.tree.map(lambda x, v: x / (jnp.sqrt(v) + jnp.asarray(eps, v.dtype)), x, v)


def widen(x: PyTree) -> PyTree:
    """Convert floating-point leaves of lower precision to the default precision.

    Sums over clients need this: in bfloat16, 256 + 1 is 256.
    """

    def wide(leaf: ArrayLike) -> ArrayLike:
        given, default = jnp.result_type(leaf), jnp.result_type(float)
        narrow = jnp.issubdtype(given, jnp.floating) and given.itemsize < default.itemsize
        return jnp.asarray(leaf, default) if narrow else leaf

    return jax.tree.map(wide, x)


def as_types_of(like: PyTree, x: PyTree) -> PyTree:
    """Convert floating-point leaves of `x` to the dtypes of `like`, which has its structure."""

    def cast(like: ArrayLike, leaf: ArrayLike) -> ArrayLike:
        old, new = jnp.result_type(leaf), jnp.result_type(like)
        floating = jnp.issubdtype(old, jnp.floating) and jnp.issubdtype(new, jnp.floating)
        return jnp.asarray(leaf, new) if floating else leaf

    return jax.tree.map(cast, like, x)


def zeros_like(x: PyTree) -> PyTree:
    return jax.tree.map(jnp.zeros_like, x)


def where(condition: Array, x: PyTree, y: PyTree) -> PyTree:
    """Return `x` if the scalar `condition` is true, else `y`."""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), x, y)


def sum_leading(x: PyTree) -> PyTree:
    """Return the sum over the leading axis. Integers and booleans are added as int32."""

    def total(leaf: Array) -> Array:
        return leaf.sum(0, dtype=None if jnp.issubdtype(leaf.dtype, jnp.inexact) else "int32")

    return jax.tree.map(total, x)


def take(table: PyTree, rows: Array | int) -> PyTree:
    return jax.tree.map(lambda leaf: leaf[rows], table)


def all_finite(x: PyTree) -> Array:
    """Return whether all numbers of `x` are finite."""
    # A number minus itself is zero if it is finite, else NaN. A CPU computes a sum of floats five
    # times as fast as a conjunction. Zero times a number would read an array of zeros as well.
    default = jnp.result_type(float)

    def zeros_of(leaf: Array) -> Array:
        parts = [leaf.real, leaf.imag] if jnp.iscomplexobj(leaf) else [leaf]
        return jnp.ravel(sum(part - part for part in parts)).astype(default)

    inexact = [  # others are finite
        jnp.asarray(leaf)
        for leaf in jax.tree.leaves(x)
        if jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)
    ]
    zeros = [*map(zeros_of, inexact)]
    # One reduction for all small leaves: on a GPU, time depends on the number of reductions.
    small = [jnp.zeros(1), *(leaf for leaf in zeros if leaf.size < 1_000_000)]
    groups = [jnp.concatenate(small), *(leaf for leaf in zeros if leaf.size >= 1_000_000)]
    return jnp.stack([jnp.sum(group) for group in groups]).sum() == 0


def size(x: PyTree) -> int:
    """Return the total number of entries of the arrays of `x`."""
    return sum(leaf.size for leaf in jax.tree.leaves(x))


def nbytes(x: PyTree) -> int:
    """Return the total size in bytes of the arrays of `x`, which may also be shapes."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(x))


def types(name: str, x: PyTree) -> dict[str, str]:
    """Return the type and shape of every leaf, by its path below `name`."""
    return {
        name + jax.tree_util.keystr(path): f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}"
        for path, leaf in jax.tree_util.tree_leaves_with_path(x)
    }
