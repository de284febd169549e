"""Cohorts: those of published experiments are drawn again; none computes much in vain."""

import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from jax.sharding import Mesh

from fedda import api
from fedda.core import tree
from fedda.core.task import Plan, Task
from fedda.data.federation import Shards
from fedda.models import Model
from fedda.simulate.cohort import (
    SAMPLERS,
    Layout,
    arrange,
    automatic_chunk,
    draw_cohort,
    fedopt_cohort,
    sum_over_clients,
    with_widths,
)
from fedda.simulate.train import Setup, padding_waste, train

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


def layout_of(devices, chunk=None):
    mesh = Mesh(np.array(jax.devices()[:1] * devices), ("clients",)) if devices > 1 else None
    return Layout(chunk, mesh)


def test_arranged_clients_are_alike_beside_one_another_and_on_each_device():
    count = np.array([5, 90, 7, 80, 1, 60, 2, 70])
    cohort = np.array([7, 0, 1, 4, 5, 3])
    assert arrange(cohort, count, layout_of(1)).tolist() == [1, 3, 7, 5, 0, 4]
    assert arrange(cohort, count, layout_of(2)).tolist() == [1, 7, 0, 3, 5, 4]
    for devices, chunk in itertools.product((1, 2, 4, 7), (None, 1, 2, 3)):
        assert sorted(arrange(cohort, count, layout_of(devices, chunk))) == sorted(cohort)


@pytest.mark.parametrize(("devices", "chunk"), [(2, 30), (3, 9), (4, 3), (1, 7)])
def test_every_device_has_large_clients_first(devices, chunk):
    """Also where places stay empty, which are the last device's."""
    count = np.random.default_rng(0).permutation(100)
    layout = layout_of(devices, chunk)
    each = len(count) / devices
    places = -(-math.ceil(each) // chunk) * chunk
    sizes = count[arrange(np.arange(100), count, layout)]
    parts = [sizes[first : first + places] for first in range(0, 100, places)]
    for part in parts:
        assert (np.diff(part) < 0).all()
    shortest = min(map(len, parts))
    for place in range(shortest):
        values = [part[place] for part in parts]
        assert max(values) - min(values) == len(parts) - 1


def computed_in(plan, counts, cohort, chunk, rounds, stabilise=0):
    """Counts, in the program itself, the examples the model is applied to in local work."""
    seen = []
    clients = [(np.full((n, 1), i, np.float32), np.zeros((n, 1))) for i, n in enumerate(counts)]

    def apply(params, x):
        jax.debug.callback(lambda x: seen.append(x.size), x)
        return x * params

    setup, hyper = api.prepare(
        "fedavg",
        Model(lambda key: jnp.ones(()), apply),
        clients,
        lambda outputs, y: ((outputs - y) ** 2)[:, 0],
        rounds=rounds,
        cohort=cohort,
        batch=plan.batch,
        local_work=plan.amount,
        local_unit=plan.unit,
        stabilise=stabilise,
        chunk=chunk,
        client_lr=0.1,
    )
    for evaluation in train(setup, api.traced(hyper, setup.task.model), [3]):
        jax.block_until_ready(evaluation.run)
    jax.effects_barrier()
    return sum(seen), setup


@pytest.mark.parametrize(
    ("plan", "stabilise", "chunk"),
    [
        (Plan(4, 1, "epochs"), 0, 1),
        (Plan(4, 1, "epochs"), 0, 2),
        (Plan(4, 1, "epochs"), 0, 5),
        (Plan(4, 3, "epochs"), 1, 3),
        (Plan(4, 3, "steps"), 0, 2),
        (Plan(4, 1, "epochs"), 3, 2),
    ],
)
def test_padding_is_what_the_program_computes_too_much(plan, stabilise, chunk):
    counts, cohort, rounds = [3, 17, 0, 8, 1, 30, 9], 5, 3
    computed, setup = computed_in(plan, counts, cohort, chunk, rounds, stabilise)
    useful = needed = 0
    for number in range(rounds):
        for client in draw_cohort(3, number, len(counts), cohort):
            examples = {"epochs": plan.amount * counts[client], "steps": plan.amount * plan.batch}
            own = counts[client] if number >= rounds - stabilise else examples[plan.unit]
            useful += own if counts[client] else 0
            needed += -(-own // plan.batch) * plan.batch if counts[client] else 0
    waste = padding_waste(setup, seed=3)
    assert waste["total"] == pytest.approx(1 - useful / computed)
    assert waste["unequal_clients"] == pytest.approx(1 - needed / computed)


def lognormal(sigma, mean=100):
    sizes = np.random.default_rng(0).lognormal(0, sigma, 5000) * mean / np.exp(sigma**2 / 2)
    return np.maximum(sizes.round().astype(int), 1)


EPOCH = Plan(20, 1, "epochs")


def waste_of(layout, count):
    shards = Shards(None, None, None, count, int(count.max()), len(count))
    setup = Setup(
        algorithm=None, task=Task(None, None, EPOCH), shards=shards, test=None, rounds=50,
        cohort=100, eval_every=50, stabilise=0, layout=layout,
    )  # fmt: skip
    return padding_waste(setup, seed=0)


@pytest.mark.parametrize("devices", [1, 2])
def test_clients_of_unequal_sizes_hardly_wait(devices):
    """For any model, also one of which thousands are worked on together if they are alike."""
    count = lognormal(sigma=1)
    layout = layout_of(devices)
    chunk = automatic_chunk(4, EPOCH, count, 100, layout.mesh)
    assert chunk > 1
    assert waste_of(layout._replace(chunk=chunk), count)["total"] < 0.3
    assert waste_of(layout, count)["unequal_clients"] > 0.75


def test_arranging_wastes_less():
    count = lognormal(sigma=1)
    arranged = waste_of(Layout(2), count)
    assert arranged["unequal_clients"] < 0.06
    batches = -(-count[draw_cohort(0, 0, 5000, 100)] // 20).reshape(50, 2)
    assert 1 - batches.mean() / batches.max(1).mean() > 0.25


@pytest.mark.parametrize("unit", ["epochs", "full"])
@pytest.mark.parametrize("chunk", [1, 2])
def test_small_clients_compute_fewer_padded_examples(unit, chunk):
    counts = [1, 2, 1, 40, 1, 5, 1, 2, 1, 1, 3, 1]
    stabilise = 2 if unit == "full" else 0
    computed, setup = computed_in(Plan(32, 1, "epochs"), counts, 12, chunk, 2, stabilise)
    assert setup.layout.widths
    assert set(setup.layout.widths) <= {1, 2, 4, 8, 16}
    assert computed < 0.5 * 2 * 32 * (len(counts) + chunk)  # only the first chunk has two batches
    assert padding_waste(setup, seed=3)["total"] == pytest.approx(1 - 2 * sum(counts) / computed)


@pytest.mark.parametrize(
    ("plan", "counts"),
    [
        (EPOCH, [1000] * 10),  # no client is smaller than a batch
        (EPOCH, [5] * 10),  # one narrow program suits all
        (EPOCH, [1000] * 9 + [1]),  # a small client saves little
        (Plan(20, 5), [1] * 9 + [1000]),  # the batches of steps are full
        (Plan(20, 20, "epochs"), [2] * 9 + [1000]),  # nobody has less than a batch
    ],
)
def test_one_program_is_enough(plan, counts):
    assert with_widths(Layout(1), plan, np.array(counts), 5).widths == ()


@pytest.mark.parametrize(("seeds", "order"), [([0], slice(None)), ([0, 3], slice(None, None, -1))])
def test_narrow_programs_change_only_rounding(seeds, order):
    """Also of noise, of a cohort that is not in order, and of runs that are trained together."""
    rng = np.random.default_rng(0)
    counts = np.array([1, 2, 1, 9, 1, 4, 0, 3])
    clients = [(rng.normal(size=(n, 3)), rng.normal(size=(n, 2))) for n in counts]

    def noisy(params, x, key):
        return x @ params + 0.1 * random.normal(key, (len(x), 2))

    model = Model(lambda key: random.normal(key, (3, 2)), lambda w, x: x @ w, train=noisy)
    setup, hyper = api.prepare(
        "scaffold", model, clients, "squared_error", cohort=8, rounds=2, batch=4, local_work=1,
        local_unit="epochs", chunk=1, client_lr=0.1, control="I",
    )  # fmt: skip
    hp = api.traced(hyper, model)
    hps = hp if len(seeds) == 1 else jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), hp)
    setup = setup._replace(sample=lambda seed, number, *_: np.arange(8, dtype=np.int32)[order])
    ends = [
        jax.device_get([*train(setup._replace(layout=layout), hps, seeds)][-1].run)
        for layout in (Layout(1), Layout(1, widths=(1, 2)), Layout(2, widths=(1, 4)), Layout(3))
    ]
    for end in ends[1:]:
        jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6), end, ends[0])


def test_chunks_in_the_wrong_order_get_the_program_of_a_larger_one():
    def work(shared, client, most):
        number, _ = client
        return (jnp.ones(()), jnp.asarray(most or 9)), number

    sizes = jnp.array([1, 3, 1, 9, 2, 1, 2, 1])
    ids = jnp.arange(8, dtype="int32")
    total, kept = sum_over_clients(
        Layout(1, widths=(1, 4)), work, tree.all_finite, tree.zeros_like, (), (ids, ids), sizes
    )
    # The smallest program that suits a client and all that follow it.
    assert (total[0], total[1]) == (8, 9 + 9 + 9 + 9 + 4 + 4 + 4 + 1)
    np.testing.assert_array_equal(kept, ids)


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("bad", [[], [3], [0, 15, 16, 39], [*range(40)]], ids=str)
def test_clients_one_by_one_without_those_that_are_not_finite(bad, devices):
    """Also in the same program as a run in which other clients are not finite."""
    ids, sizes = jnp.arange(40), jnp.ones(40, "int32")
    mesh = Mesh(np.array(jax.devices()[:2]), ("clients",)) if devices == 2 else None

    def work(poison, client, most):
        number, memory = client
        value = jnp.where(poison[number], jnp.nan, number.astype("float32") ** 2)
        return {"value": value, "lost": jnp.asarray(False)}, memory + number

    def dropped(part):
        return {"value": jnp.zeros((), "float32"), "lost": jnp.ones((), part["lost"].dtype)}

    def total(poison):
        return sum_over_clients(
            Layout(1, mesh), work, lambda part: tree.all_finite(part["value"]), dropped, poison,
            (ids, 100 * ids), sizes, axis="runs",
        )  # fmt: skip

    poison = np.zeros((3, 40), bool)
    poison[0, bad], poison[1, 7] = True, True
    sums, memory = jax.device_get(jax.jit(jax.vmap(total, axis_name="runs"))(poison))
    for run, lost in enumerate(poison):
        assert sums["value"][run] == (np.flatnonzero(~lost) ** 2).sum()
        assert sums["lost"][run] == lost.sum()
        np.testing.assert_array_equal(memory[run], np.where(lost, 100, 101) * np.arange(40))


@pytest.mark.parametrize(
    ("plan", "sigma", "together"),
    [(EPOCH, 0, 100), (Plan(20, 5), 1, 100), (EPOCH, 0.5, 10), (EPOCH, 1, 6)],
)
def test_as_many_clients_together_as_do_not_wait_long(plan, sigma, together):
    assert automatic_chunk(4, plan, lognormal(sigma), 100, None) == together


def test_small_models_together_and_large_ones_alone():
    count = lognormal(0)
    assert automatic_chunk(20_000, EPOCH, count, 10, None) == 10
    assert automatic_chunk(500_000, EPOCH, count, 10, None) == 1
    # No places stay empty: 2 chunks of 8 instead of 10 and 6.
    assert automatic_chunk(20_000, EPOCH, count, 16, None) == 8
