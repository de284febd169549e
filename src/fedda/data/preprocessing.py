"""Preparation of stored examples on the device, before a model gets them.

Images have the shape [examples, height, width, channels]. Texts are ranks of words and have the
shape [examples, width].
"""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random

from fedda.errors import InputError

UNIT = np.arange(256, dtype=np.float32) / np.float32(255)


def scaled(x: Array) -> Array:
    """Return bytes 0..255 as exactly k / 255 in float32, and other numbers unchanged.

    A table is used because XLA replaces a division by a constant by a product with its rounded
    inverse, and 126 of the 256 quotients would differ.
    """
    return jnp.asarray(UNIT)[x] if x.dtype == jnp.uint8 else x.astype(jnp.float32)


def standardise(x: Array) -> Array:
    """Subtract its mean from each image, and divide by its standard deviation, as TensorFlow does.

    The divisor is at least 1 / √(number of values), so an image of one colour becomes zero.
    """
    x = x.astype(jnp.float32)
    centred = x - x.mean((1, 2, 3), keepdims=True)
    deviation = jnp.sqrt(jnp.square(centred).mean((1, 2, 3), keepdims=True))
    return centred / jnp.maximum(deviation, np.float32(x[0].size ** -0.5))


def central_crop(x: Array, size: int) -> Array:
    """Return the middle `size` x `size` pixels. An odd margin is smaller above and left."""
    top, left = ((length - size) // 2 for length in _lengths(x, size))
    return x[:, top : top + size, left : left + size]


def random_crop_and_flip(x: Array, key: Array, size: int) -> Array:
    """Return `size` x `size` pixels at a random place of each image, and mirror half of the images.

    All places are equally likely.
    """
    height, width = _lengths(x, size)
    top_key, left_key, flip_key = random.split(key, 3)
    top = random.randint(top_key, x.shape[:1], 0, height - size + 1)
    left = random.randint(left_key, x.shape[:1], 0, width - size + 1)
    flipped = random.bernoulli(flip_key, shape=x.shape[:1])

    def crop(image: Array, top: Array, left: Array) -> Array:
        return lax.dynamic_slice(image, (top, left, 0), (size, size, image.shape[-1]))

    crops = jax.vmap(crop)(x, top, left)
    return jnp.where(flipped[:, None, None, None], crops[:, :, ::-1], crops)


def bag_of_words(ids: Array, vocabulary: int, denominator: Literal["all", "known"]) -> Array:
    """Return the frequencies of the first `vocabulary` words in each text.

    Args:
        ids: The ranks of the words. The largest number of their type is padding.
        vocabulary: The number of words to count.
        denominator: The words to divide by: all words of a text, or only the `"known"` words of the
            vocabulary. Without such words, the frequencies are 0.
    """
    padding = np.iinfo(ids.dtype).max
    if vocabulary > padding:
        raise InputError(
            f"bag_of_words got a vocabulary of {vocabulary} words, but ranks of type {ids.dtype} "
            f"allow at most {padding}. Use a smaller vocabulary."
        )

    def counts(text: Array) -> Array:
        return jnp.zeros(vocabulary, jnp.float32).at[text].add(1, mode="drop")

    counted = ids < (padding if denominator == "all" else vocabulary)
    total = jnp.maximum(counted.sum(1, keepdims=True, dtype=jnp.float32), 1)
    return jax.vmap(counts)(ids.astype(jnp.int32)) / total


def _lengths(x: Array, size: int) -> tuple[int, int]:
    height, width = x.shape[1:3]
    if size > min(height, width):
        raise InputError(
            f"a crop of {size}x{size} pixels does not fit into images of {height}x{width}. "
            "Use a smaller crop or none."
        )
    return height, width
