"""Limits relative to the median: which replies are refused, and whose weight is lowered."""

import numpy as np
import pytest

from fedda.algorithms import climb, fedda, scaffold
from fedda.core.local import Counter, Weighted
from fedda.core.losses import accuracy, cross_entropy
from fedda.core.task import Plan, Task
from fedda.models import linear

pytest.importorskip("flwr")

from fedda.flower import Settings
from fedda.flower.outliers import Comparison, measure

MODEL = {"kernel": np.zeros((3, 2)), "bias": np.zeros(2)}
TASK = Task(linear(3, 2), cross_entropy, Plan(2, 1), (accuracy,))
SETTINGS = Settings("fedda-adam", TASK, (np.zeros((1, 3)), np.zeros(1, int)), 1, 1)


def copy(value):
    """A copy of the model whose 8 entries have this value: its norm is sqrt(8) times it."""
    return {name: np.full_like(array, value) for name, array in MODEL.items()}


def size(gradient=1.0, momentum=1.0, weight=1.0, steps=5.0):
    """The size of FedDA's upload of a client, from its means."""
    parts = copy(weight * gradient), copy(weight * momentum)
    upload = fedda.Upload(*parts, Counter(np.float64(weight * steps)))
    return measure(Weighted(upload, np.float64(weight)), MODEL)


def test_the_parts_of_an_upload_are_its_copies_of_the_model():
    found = size(gradient=2.0, momentum=3.0, weight=4.0)
    np.testing.assert_allclose(found.means, [2 * 8**0.5, 3 * 8**0.5])
    np.testing.assert_allclose(found.sums, [8 * 8**0.5, 12 * 8**0.5])
    np.testing.assert_allclose(found.norm, 104**0.5)  # sqrt(8 (2^2 + 3^2))
    assert (found.rest, found.counters, found.weights) == (0.0, [5.0], [4.0])
    change = scaffold.Change(copy(2.0), copy(6.0))
    found = measure(scaffold.Upload(Weighted(change, 2.0), Counter(np.float64(1))), MODEL)
    np.testing.assert_allclose(found.means, [8**0.5, 3 * 8**0.5])
    assert found.counters == [1.0]


def test_losses_and_plain_sums_are_measured_too():
    upload = climb.Upload(Weighted(copy(4.0), 2.0), Weighted(np.float64(9.0), 3.0))
    found = measure(upload, MODEL)
    np.testing.assert_allclose(found.means, [2 * 8**0.5])
    assert (found.rest, found.weights) == (3.0, [2.0, 3.0])
    plain = measure({"sum": copy(1.0), "layer": np.array([3.0, 4.0])}, MODEL)
    np.testing.assert_allclose(plain.means, [8**0.5])
    assert (plain.sums, plain.rest, plain.weights) == ([], 5.0, [])


def comparison(**settings):
    return Comparison(SETTINGS._replace(**settings))


@pytest.mark.parametrize("part", ["gradient", "momentum"])
def test_a_part_far_above_the_median_is_refused_whatever_the_others_are(part):
    sizes = {client: size(gradient=100.0) for client in range(9)}
    for factor, refused in ((29.0, set()), (31.0, {9})):
        usual = 100.0 if part == "gradient" else 1.0
        sizes[9] = size(**{"gradient": 100.0} | {part: factor * usual})
        assert comparison().faults(sizes, 0.0).keys() == refused
        assert not comparison(most_norm_ratio=None).faults(sizes, 0.0)


def test_the_weight_is_lowered_until_no_part_adds_too_much():
    """The median of sums is 1 (times sqrt(8)), so a client may add 3."""
    sizes = {client: size() for client in range(9)}
    for given, expected in (
        (size(gradient=3.0), 1.0),
        (size(gradient=12.0), 1 / 4),
        (size(momentum=12.0), 1 / 4),
        (size(weight=6.0), 3.0),
        (size(weight=6.0, gradient=10.0), 3 / 10),
        (size(weight=1e6), 3.0),
        (size(weight=1e6, gradient=1e-9, momentum=1e-9), 30.0),  # by most_weight_ratio
    ):
        lowered = comparison().lowered(sizes | {9: given})
        np.testing.assert_allclose(lowered.pop(9), [expected])
        assert set(map(tuple, lowered.values())) == {(1.0,)}
    free = comparison(most_sum_ratio=None, most_weight_ratio=None).lowered({9: size(weight=1e6)})
    assert free == {9: [1e6]}


def test_earlier_replies_count_and_zeros_do_not():
    """Two replies have no median; the client may add 3 times that of the three before."""
    limits = comparison()
    assert limits.lowered({0: size(), 1: size(gradient=12.0)})[1] == [1.0]
    limits.accepted += [size(), size(), size()]
    np.testing.assert_allclose(limits.lowered({0: size(gradient=12.0)})[0], [1 / 4])
    limits.accepted += [size(gradient=0.0)] * 10
    np.testing.assert_allclose(limits.lowered({0: size(gradient=12.0)})[0], [1 / 4])


def test_a_loss_may_be_as_large_as_the_model():
    sizes = {client: size()._replace(rest=0.01) for client in range(9)} | {
        9: size()._replace(rest=2.0)
    }
    assert not comparison().faults(sizes, model_norm=2.0)
    assert comparison().faults(sizes, model_norm=1.0).keys() == {9}


@pytest.mark.parametrize(("steps", "refused"), [(-1.0, True), (150.0, False), (151.0, True)])
def test_a_count_of_steps_above_30_times_the_median_is_refused(steps, refused):
    sizes = {client: size() for client in range(9)} | {9: size(steps=steps)}
    assert bool(comparison().faults(sizes, 0.0)) == refused
