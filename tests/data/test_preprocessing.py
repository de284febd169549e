"""Inputs are what TensorFlow, NumPy and plain counting make of the stored examples."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from jax import lax, random

from fedda.data.preprocessing import (
    bag_of_words,
    central_crop,
    random_crop_and_flip,
    scaled,
    standardise,
)
from fedda.errors import InputError

KEY = random.key(0)
UNIT = np.arange(256, dtype=np.float32) / np.float32(255)

crop_and_flip = jax.jit(random_crop_and_flip, static_argnums=2)


def images(*shape):
    return np.random.default_rng(0).integers(0, 256, shape, dtype=np.uint8)


@pytest.fixture
def compiled_as_for_users():
    """With every optimisation: one of them is what `scaled` is about."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


# -------------------------------------------------------------------------------------- values


def in_a_loop(x):
    return lax.fori_loop(0, 2, lambda i, total: total + i.astype("float32") * scaled(x), 0 * UNIT)


@pytest.mark.usefixtures("compiled_as_for_users")
@pytest.mark.parametrize("function", [scaled, jax.vmap(scaled), in_a_loop])
def test_scaled_is_the_quotient_to_the_last_bit(function):
    x = jnp.arange(256, dtype=jnp.uint8)
    found = np.asarray(jax.jit(function)(x))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found.view(np.uint32), UNIT.view(np.uint32))


def test_scaled_keeps_the_shape():
    x = images(2, 5, 4, 3)
    np.testing.assert_array_equal(scaled(jnp.asarray(x)), UNIT[x])


def standardised(x):
    """TensorFlow's definition, in float64."""
    x = x.astype(np.float64)
    mean, deviation = x.mean((1, 2, 3), keepdims=True), x.std((1, 2, 3), keepdims=True)
    return (x - mean) / np.maximum(deviation, 1 / np.sqrt(x[0].size))


@pytest.mark.usefixtures("compiled_as_for_users")
def test_standardise_against_numpy():
    x = images(20, 24, 24, 3)
    x[1] = 250 + x[1] // 128  # of little contrast
    found = jax.jit(standardise)(jnp.asarray(x))
    assert found.dtype == np.float32
    # A mean of up to 255 is rounded to 1 in 2^24, and so is a difference: 3e-5 of a deviation
    # that is 0.5 at least.
    np.testing.assert_allclose(found, standardised(x), rtol=1e-5, atol=6e-5)
    np.testing.assert_allclose(np.std(found, axis=(1, 2, 3)), 1, rtol=1e-5)


@pytest.mark.usefixtures("compiled_as_for_users")
def test_standardise_divides_by_no_less_than_one_over_the_root_of_the_size():
    x = np.full((2, 24, 24, 3), 100, np.uint8)
    x[1, 0, 0, 0] = 101  # deviation √(1/n - 1/n²), a little below the bound 1/√n
    found = jax.jit(standardise)(jnp.asarray(x))
    np.testing.assert_array_equal(found[0], 0)
    # Here an error of 100 / 2^24 counts √n = 42 times.
    np.testing.assert_allclose(found, standardised(x), rtol=1e-5, atol=5e-4)
    assert abs(float(found[1, 0, 0, 0]) - np.sqrt(1728) * (1 - 1 / 1728)) < 5e-4


# --------------------------------------------------------------------------------------- crops


@pytest.mark.parametrize(("shape", "top", "left"), [((32, 32), 4, 4), ((27, 30), 1, 3)])
def test_central_crop_against_slicing(shape, top, left):
    x = images(3, *shape, 3)
    expected = x[:, top : top + 24, left : left + 24]
    np.testing.assert_array_equal(central_crop(jnp.asarray(x), 24), expected)


def where_from(crops):
    """The place and the direction of crops whose pixels tell their own row and column."""
    crops = np.asarray(crops).astype(int)
    top, flipped = crops[:, 0, 0, 0], crops[:, 0, 0, 1] > crops[:, 0, -1, 1]
    return top, crops[:, 0, :, 1].min(1), flipped


def self_telling(number, height, width):
    rows, columns = np.indices((height, width), np.uint8)
    example = np.arange(number, dtype=np.uint8)[:, None, None]
    return np.stack(np.broadcast_arrays(rows, columns, example), axis=-1)


@pytest.mark.parametrize("shape", [(32, 32), (28, 33)], ids=str)
def test_random_crops_are_slices_of_their_images(shape):
    x = self_telling(40, *shape)
    crops = crop_and_flip(jnp.asarray(x), random.key(0), 24)
    assert crops.dtype == np.uint8
    places = list(zip(*where_from(crops), strict=True))
    for number, (top, left, flipped) in enumerate(places):
        expected = x[number, top : top + 24, left : left + 24]
        np.testing.assert_array_equal(crops[number], expected[:, ::-1] if flipped else expected)
    assert len(set(places)) > 25  # of 40 draws from 162 or 100 places about 35 or 33 differ


def test_random_crops_come_from_everywhere_alike():
    places, draws = 9 * 9 * 2, 100
    x = np.broadcast_to(self_telling(1, 12, 12), (places * draws, 12, 12, 3))
    top, left, flipped = where_from(crop_and_flip(jnp.asarray(x), random.key(1), 4))
    counts = np.bincount((9 * top + left) * 2 + flipped, minlength=places)
    assert counts.size == places
    # A sum of squares that fair draws exceed once in a million keys.
    surprise = np.sum((counts - draws) ** 2 / draws)
    assert surprise < scipy.stats.chi2.ppf(1 - 1e-6, places - 1)


def test_random_crops_follow_the_key():
    x = jnp.asarray(self_telling(20, 32, 32))
    first, again, other = (crop_and_flip(x, random.key(key), 24) for key in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_random_crops_of_clients_are_those_of_each_alone():
    x, keys = jnp.asarray(images(3, 4, 32, 32, 3)), random.split(random.key(0), 3)
    together = jax.jit(jax.vmap(lambda x, key: random_crop_and_flip(x, key, 24)))(x, keys)
    for one, key, found in zip(x, keys, together, strict=True):
        np.testing.assert_array_equal(found, crop_and_flip(one, key, 24))


@pytest.mark.parametrize("crop", [central_crop, lambda x, size: crop_and_flip(x, KEY, size)])
def test_crops_must_fit(crop):
    x = jnp.zeros((1, 32, 20, 3), jnp.uint8)
    with pytest.raises(InputError, match="24x24 pixels does not fit into images of 32x20"):
        crop(x, 24)
    assert crop(x, 20).shape == (1, 20, 20, 3)


# --------------------------------------------------------------------------------------- texts

PADDING = 65535


def texts(number=30, width=50):
    """Texts of all lengths from none to `width`, of words that are known, rare or unranked."""
    rng = np.random.default_rng(0)
    words = [rng.choice([*range(40), 65534], rng.integers(0, width + 1)) for _ in range(number)]
    words[0], words[1] = np.asarray([], int), np.asarray([35, 20, 65534])  # nothing to count
    words[2] = np.full(width, 19)
    return [row.tolist() for row in words]


@pytest.mark.usefixtures("compiled_as_for_users")
@pytest.mark.parametrize("denominator", ["all", "known"])
def test_bag_of_words_against_counting(denominator):
    vocabulary, rows = 20, texts()
    ids = np.full((len(rows), 50), PADDING, np.uint16)
    expected = np.zeros((len(rows), vocabulary), np.float32)
    for number, words in enumerate(rows):
        ids[number, : len(words)] = words
        known = Counter(word for word in words if word < vocabulary)
        total = len(words) if denominator == "all" else sum(known.values())
        for word, count in known.items():
            expected[number, word] = np.float32(count) / np.float32(total)
    bags = jax.jit(jax.vmap(lambda part: bag_of_words(part, vocabulary, denominator)))
    found = bags(jnp.asarray(ids.reshape(3, 10, 50))).reshape(expected.shape)
    assert found.dtype == np.float32
    # XLA may round the inverse of a denominator before it multiplies: twice 1 in 2^24.
    np.testing.assert_allclose(found, expected, rtol=2.0**-23, atol=0)
    assert not expected[:2].any()
    assert expected[2].max() == 1


def test_bag_of_words_refuses_a_vocabulary_that_takes_padding_for_a_word():
    ids = jnp.zeros((1, 2), jnp.uint16)
    assert bag_of_words(ids, 65535, "all").shape == (1, 65535)
    with pytest.raises(InputError, match="vocabulary of 65536 words, but ranks of type uint16"):
        bag_of_words(ids, 65536, "all")
