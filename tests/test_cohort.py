"""The cohorts of published experiments are drawn again, client by client."""

import numpy as np
import pytest

from fedda.cohort import SAMPLERS, arrange, automatic_chunk, draw_cohort, fedopt_cohort

MODULUS = 2**31 - 1  # a prime, of which 16807 is a primitive root: Park and Miller's generator


def published_ids(seed, number, ids, size):
    """The ids a round of this number draws, by the words of the specification, step by step."""
    state = int(np.random.RandomState(seed).randint(1, 2**31 - 2))
    for _ in range(number):
        state = 16807 * state % MODULUS
    return np.random.RandomState(state).choice(sorted(ids), size=size, replace=False).tolist()


@pytest.mark.parametrize("number", [0, 1, 2, 3, 10, 1499, 4000])
@pytest.mark.parametrize(("population", "size"), [(500, 10), (12, 3), (3400, 10)])
def test_cohort_is_the_published_one(number, population, size):
    ids = [str(i) for i in range(population)]
    positions = fedopt_cohort(1, number, population, size)
    assert [sorted(ids)[i] for i in positions] == published_ids(1, number, ids, size)


def test_positions_are_in_the_order_of_ids_as_text():
    ids = [str(i) for i in range(12)]
    as_text = sorted(ids)
    assert as_text.index("10") < as_text.index("9")
    drawn = published_ids(1, 5, ids, 12)  # everybody, so the order shows
    positions = fedopt_cohort(1, 5, 12, 12)
    assert [as_text[i] for i in positions] == drawn
    assert [ids[i] for i in positions] != drawn


def test_choice_over_ids_is_choice_over_positions():
    ids = np.array([f"f{i:04d}_{i % 50:02d}" for i in range(3400)])
    for seed in range(20):
        of_ids = np.random.RandomState(seed).choice(ids, 10, replace=False)
        positions = np.random.RandomState(seed).choice(len(ids), 10, replace=False)
        np.testing.assert_array_equal(of_ids, ids[positions])


def test_no_step_of_the_arithmetic_overflows():
    # 16807 is a primitive root, so only after all 2**31 - 2 steps is the first cohort drawn again.
    first = fedopt_cohort(1, 0, 100, 5)
    np.testing.assert_array_equal(fedopt_cohort(1, MODULUS - 1, 100, 5), first)
    assert fedopt_cohort(1, MODULUS - 2, 100, 5).tolist() != first.tolist()


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_sampler_draws_distinct_clients_by_seed_and_round(name):
    draw = SAMPLERS[name]
    cohorts = {(s, n): draw(s, n, 100, 20) for s in range(4) for n in range(8)}
    for cohort in cohorts.values():
        assert cohort.dtype == np.int32
        assert len(set(cohort.tolist())) == 20
        assert cohort.min() >= 0
        assert cohort.max() < 100
    assert len({tuple(cohort) for cohort in cohorts.values()}) == len(cohorts)
    for (seed, number), cohort in cohorts.items():
        np.testing.assert_array_equal(draw(seed, number, 100, 20), cohort)
    assert sorted(draw(0, 0, 7, 7)) == list(range(7))


@pytest.mark.parametrize("name", SAMPLERS)
def test_every_client_is_drawn_equally_often(name):
    rounds, population, size = 2000, 20, 5
    counts = np.zeros(population)
    for number in range(rounds):
        counts[SAMPLERS[name](1, number, population, size)] += 1
    share = size / population
    deviation = np.sqrt(rounds * share * (1 - share))  # binomial
    assert np.abs(counts - rounds * share).max() < 4 * deviation


def test_samplers_number_rounds_as_their_loops_do():
    for number in range(5):
        old, new, uniform = (
            SAMPLERS[name](1, number, 500, 10).tolist() for name in ("fedopt", "tff21", "uniform")
        )
        ids = [f"{i:03d}" for i in range(500)]
        assert [ids[i] for i in old] == published_ids(1, number, ids, 10)
        assert [ids[i] for i in new] == published_ids(1, number + 1, ids, 10)
        assert uniform == draw_cohort(1, number, 500, 10).tolist()


def test_arranged_clients_are_alike_beside_one_another_and_on_each_device():
    count = np.array([5, 90, 7, 80, 1, 60, 2, 70])
    cohort = np.array([7, 0, 1, 4, 5, 3])
    assert arrange(cohort, count, 1).tolist() == [1, 3, 7, 5, 0, 4]
    assert arrange(cohort, count, 2).tolist() == [1, 7, 0, 3, 5, 4]
    for devices in (1, 2, 4, 7):
        assert sorted(arrange(cohort, count, devices)) == sorted(cohort)


def test_arranging_wastes_less():
    """Of the steps that are computed, for 100 clients of log-normal sizes, two at a time."""
    rng = np.random.default_rng(0)
    count = rng.lognormal(4, 1, 5000).astype(int) + 1
    cohort = draw_cohort(0, 0, 5000, 100)

    def waste(order):
        steps = -(-count[order] // 20)
        return 1 - steps.sum() / (2 * steps.reshape(50, 2).max(1)).sum()

    assert waste(arrange(cohort, count, 1)) < 0.1
    assert waste(cohort) > 0.25


def test_small_models_together_and_large_ones_alone():
    assert automatic_chunk(20_000) >= 100
    assert automatic_chunk(5_000_000) == 1
