"""Convolution and max-pooling that stay fast under `vmap` over clients.

`vmap` over clients gives every client a separate kernel. XLA turns such a convolution into
a grouped convolution, which is slow on every backend. Here a convolution is a product of image
patches and a matrix, which `vmap` turns into a batched matrix product. Hardware is fast at that.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

Convolution = Callable[..., Array]  # with the arguments of `lax.conv_general_dilated`


def patches_conv(
    inputs: Array,
    kernel: Array,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: Any = None,
    out_sharding: Any = None,
) -> Array:
    """Return a 2-D convolution, computed as image patches times a matrix.

    The arguments are those of `lax.conv_general_dilated`, as `nnx.Conv` passes them. `inputs` have
    the shape [batch, height, width, channels], the kernel [height, width, in, out].

    Raises:
        ValueError: A dilation, feature groups or a sharding are requested, which are not supported.
    """
    height, width, channels, features = kernel.shape
    plain = all(dilation in (None, (1, 1), [1, 1]) for dilation in (lhs_dilation, rhs_dilation))
    if not plain or feature_group_count != 1 or out_sharding is not None:
        raise ValueError("patches_conv has no dilation, groups or sharding; use lax.conv instead.")
    if isinstance(padding, str):
        padding = lax.padtype_to_pads(
            inputs.shape[1:3], (height, width), tuple(window_strides), padding
        )
    padded = jnp.pad(inputs, ((0, 0), *padding, (0, 0)))
    size, strides = (height, width), tuple(window_strides)

    def product(images: Array) -> Array:
        patches = images if size == strides == (1, 1) else windows(images, size, strides)
        # With a single axis of rows, the gradient of the kernel needs no transposed copy.
        outputs = jnp.matmul(
            patches.reshape(-1, height * width * channels),
            kernel.reshape(-1, features),
            precision=precision,
            preferred_element_type=preferred_element_type,
        )
        return outputs.reshape(*patches.shape[:-1], features)

    places = math.prod(
        (n - k) // s + 1 for n, k, s in zip(padded.shape[1:3], size, strides, strict=True)
    )
    if jax.default_backend() == "cpu" and places > features:
        # Image by image, the patches stay in the cache; they are recomputed for the gradient. If
        # the kernel is larger than the patches, it is better to read it only once for all images.
        one = jax.checkpoint(lambda image: product(image[None])[0], prevent_cse=False)
        return lax.map(one, padded)
    return product(padded)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def windows(padded: Array, size: tuple[int, int], strides: tuple[int, int]) -> Array:
    """Return all windows of images, of shape [batch, rows, columns, height * width * channels]."""
    if jax.default_backend() == "cpu":
        return _joined(padded, size, strides)
    # On an accelerator, a gather is faster than a concatenation.
    batch, height, width, channels = padded.shape
    tops, lefts = (
        np.arange(0, length - window + 1, stride)
        for length, window, stride in zip((height, width), size, strides, strict=True)
    )
    rows = tops[:, None, None, None] + np.arange(size[0])[:, None]
    columns = lefts[:, None, None] + np.arange(size[1])
    numbers = (rows * width + columns).astype(np.int32).reshape(-1)
    taken = padded.reshape(batch, -1, channels).at[:, numbers].get(mode="promise_in_bounds")
    return taken.reshape(batch, len(tops), len(lefts), -1)


@windows.defjvp
def _windows_jvp(
    size: tuple[int, int],
    strides: tuple[int, int],
    primals: tuple[Array],
    tangents: tuple[Array],
) -> tuple[Array, Array]:
    (padded,), (change,) = primals, tangents
    # The function is linear. The transpose of a concatenation is a sum of shifted slices; that of
    # a gather would be a scatter, which is slow.
    return windows(padded, size, strides), _joined(change, size, strides)


def _joined(padded: Array, size: tuple[int, int], strides: tuple[int, int]) -> Array:
    bands = shifts(padded, 1, size[0], strides[0])
    parts = [part for band in bands for part in shifts(band, 2, size[1], strides[1])]
    return jnp.concatenate(parts, axis=-1)


def max_pool(inputs: Array, size: int = 2) -> Array:
    """Return the maxima of non-overlapping windows. Incomplete windows at the border are dropped.

    The reshape is several times faster than a window reduction, and so is its gradient.
    """
    batch, height, width, channels = inputs.shape
    rows, columns = height // size, width // size
    windows = inputs[:, : rows * size, : columns * size].reshape(
        batch, rows, size, columns, size, channels
    )
    return windows.max((2, 4))


def max_pool_same(inputs: Array, size: int, stride: int) -> Array:
    """Return the maxima of overlapping windows, with TensorFlow's SAME padding.

    The maximum is taken along the width, then along the height. On a CPU this is about ten times
    faster than a window reduction with its gradient. If a window has several equal maxima, the
    first one gets the whole gradient.
    """
    for axis in (2, 1):
        pads = [(0, 0)] * inputs.ndim
        (pads[axis],) = lax.padtype_to_pads(inputs.shape[axis : axis + 1], [size], [stride], "SAME")
        padded = jnp.pad(inputs, pads, constant_values=-jnp.inf)
        inputs = reduce(first_maximum, shifts(padded, axis, size, stride))
    return inputs


def first_maximum(first: Array, second: Array) -> Array:
    """Return the maximum, or NaN if a value is NaN, so that a diverging model is noticed."""
    return jnp.where((second > first) | jnp.isnan(second), second, first)


def shifts(padded: Array, axis: int, size: int, stride: int) -> list[Array]:
    """Return, for each position in a window, the entries of all windows at that position."""
    last = (padded.shape[axis] - size) // stride * stride
    return [
        lax.slice_in_dim(padded, place, place + last + 1, stride, axis) for place in range(size)
    ]
