"""What happens on the device to stored examples before a model sees them.

Images are [examples, height, width, channels], texts [examples, width] ranks of words.
"""

from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax, random

from fedda.errors import InputError

UNIT = np.arange(256, dtype=np.float32) / np.float32(255)


def scaled(x: Array) -> Array:
    """Bytes 0..255 as k / 255 in float32, to the last bit; other numbers as they are.

    A table, as XLA makes a division by a constant a product with its rounded inverse: 126 of the
    256 quotients would differ.
    """
    return jnp.asarray(UNIT)[x] if x.dtype == jnp.uint8 else x.astype(jnp.float32)


def standardise(x: Array) -> Array:
    """Every image less its mean, divided by its standard deviation: TensorFlow's, in float32.

    The divisor is at least 1 / √(number of values), so that an image of one colour is zero.
    """
    x = x.astype(jnp.float32)
    centred = x - x.mean((1, 2, 3), keepdims=True)
    deviation = jnp.sqrt(jnp.square(centred).mean((1, 2, 3), keepdims=True))
    return centred / jnp.maximum(deviation, np.float32(x[0].size ** -0.5))


def central_crop(x: Array, size: int) -> Array:
    """The middle `size` x `size` pixels; of an odd margin, the smaller half is above and left."""
    top, left = ((length - size) // 2 for length in _lengths(x, size))
    return x[:, top : top + size, left : left + size]


def random_crop_and_flip(x: Array, key: Array, size: int) -> Array:
    """`size` x `size` pixels of each image from anywhere in it, half of them mirrored.

    Every image has its own place, and all places are equally likely.
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
    """How often each of the first `vocabulary` words occurs, as shares of a text's words.

    `ids` are ranks of words; the largest number of their type is padding. Words beyond the
    vocabulary are not counted, but "all" has them in the denominator and "known" does not. A text
    without words to divide by is zero.
    """
    padding = np.iinfo(ids.dtype).max
    if vocabulary > padding:
        raise InputError(
            f"bag_of_words got a vocabulary of {vocabulary} words and ranks of type {ids.dtype}, "
            f"which tell at most {padding} words and padding apart. Use a smaller vocabulary."
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
