"""Losses and metrics against optax, scikit-learn and plain counting."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import sklearn.metrics
from jax import random

from fedda.core import losses


def normal(number, shape):
    return random.normal(random.key(number), shape)


@pytest.mark.usefixtures("x64")
def test_cross_entropy_against_optax():
    logits, labels = 5 * normal(0, (20, 7)), random.randint(random.key(1), (20,), 0, 7)
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    # Differences of numbers near 10.
    found = losses.cross_entropy(logits, labels)
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-14)


def test_cross_entropy_of_extreme_logits():
    # exp(1000) overflows; log softmax of (1000, 0) is (0, -1000).
    logits = jnp.asarray([[1000.0, 0.0], [1000.0, 0.0]])
    np.testing.assert_array_equal(losses.cross_entropy(logits, jnp.asarray([0, 1])), [0, 1000])


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("shape", [(6,), (6, 3), (6, 2, 5)], ids=str)
def test_squared_error_against_numpy(shape):
    outputs, targets = np.asarray(normal(0, shape)), np.asarray(normal(1, shape))
    expected = [np.mean((o - t) ** 2) for o, t in zip(outputs, targets, strict=True)]
    found = losses.squared_error(jnp.asarray(outputs), jnp.asarray(targets))
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    pairs = (each.reshape(6, -1) for each in (targets, outputs))
    np.testing.assert_allclose(found.mean(), sklearn.metrics.mean_squared_error(*pairs), rtol=1e-12)


def test_accuracy_against_numpy():
    logits = np.asarray(normal(0, (50, 4)))
    labels = np.random.default_rng(0).integers(0, 4, 50)
    found = losses.accuracy(jnp.asarray(logits), jnp.asarray(labels))
    np.testing.assert_array_equal(found, logits.argmax(-1) == labels)
    assert found.mean() == np.float32(sklearn.metrics.accuracy_score(labels, logits.argmax(-1)))
    assert 0 < found.sum() < 50
    assert found.dtype == logits.dtype


# ---------------------------------------------------------------------------------------- tags

TAGS, PADDING = 30, 65535


def tagged(examples=200, width=6):
    """Rows of tags among 40, of which the model knows 30: some twice, some rows without any."""
    rng = np.random.default_rng(3)
    tags = rng.integers(0, 40, (examples, width)).astype(np.uint16)
    tags[rng.random(tags.shape) < 0.4] = PADDING
    tags[:5], tags[5:10, 1] = PADDING, tags[5:10, 0]
    known = [{tag for tag in row if tag < TAGS} for row in tags.tolist()]
    assert any(len(set(row) - {PADDING}) < sum(tag != PADDING for tag in row) for row in tags)
    assert {len(row) for row in known} >= {0, 1, 2, 3}
    return tags, known


def indicator(known):
    return np.asarray([[tag in row for tag in range(TAGS)] for row in known])


@pytest.mark.usefixtures("x64")
def test_tag_cross_entropy_against_optax_and_scikit_learn():
    tags, known = tagged()
    logits, truth = 3 * normal(0, (len(tags), TAGS)), indicator(known)
    found = losses.tag_cross_entropy(logits, jnp.asarray(tags))
    expected = optax.sigmoid_binary_cross_entropy(logits, jnp.asarray(truth, float)).mean(-1)
    np.testing.assert_allclose(found, expected, rtol=1e-12)
    # As the mean over examples and tags of the log loss of a yes or no.
    chances = np.asarray(jax.nn.sigmoid(logits)).ravel()
    np.testing.assert_allclose(
        found.mean(), sklearn.metrics.log_loss(truth.ravel(), chances), rtol=1e-12
    )


def test_tag_cross_entropy_of_extreme_logits():
    # exp(500) overflows. log(1 + e^-20) is 2.06e-9, where 20 - log(1 + e^20) is 0 in float32.
    logits = jnp.asarray([[500.0, -500.0], [500.0, -500.0], [20.0, -20.0]])
    tags = jnp.asarray([[0], [1], [0]], jnp.uint16)
    loss, pull = jax.vjp(lambda logits: losses.tag_cross_entropy(logits, tags), logits)
    np.testing.assert_allclose(loss, [0, 500, np.log1p(np.exp(-20.0))], rtol=1e-6)
    # Half of sigmoid(logit) less 1 for a tag that is there, less 0 for one that is not.
    np.testing.assert_allclose(pull(jnp.ones(3))[0], [[0, 0], [0.5, -0.5], [0, 0]], atol=2e-9)


def test_recall_at_5_against_counting_and_scikit_learn():
    tags, known = tagged()
    logits = np.asarray(normal(1, (len(tags), TAGS)))
    found, sought = jax.jit(losses.recall_at_5)(jnp.asarray(logits), jnp.asarray(tags))
    best = np.argsort(-logits, axis=1)[:, :5]
    np.testing.assert_array_equal(
        found, [len(row & set(top)) for row, top in zip(known, best.tolist(), strict=True)]
    )
    np.testing.assert_array_equal(sought, [len(row) for row in known])
    assert 0 < found.sum() < sought.sum()
    chosen = np.zeros_like(logits, bool)
    np.put_along_axis(chosen, best, True, axis=1)
    recall = sklearn.metrics.recall_score(indicator(known), chosen, average="micro")
    np.testing.assert_allclose(found.sum() / sought.sum(), recall, rtol=1e-6)


def test_recall_at_5_takes_the_first_of_equal_logits():
    tags = jnp.asarray([[tag] for tag in range(8)], "uint16")
    found, sought = losses.recall_at_5(jnp.zeros((8, 8)), tags)
    np.testing.assert_array_equal(found, [1, 1, 1, 1, 1, 0, 0, 0])
    np.testing.assert_array_equal(sought, 1)


def test_recall_at_5_of_fewer_than_five_tags():
    found, sought = losses.recall_at_5(jnp.zeros((1, 3)), jnp.asarray([[2, 7]], "uint16"))
    assert (found.item(), sought.item()) == (1, 1)
