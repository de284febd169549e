"""What every algorithm of the folder promises, and what the rounds around it promise to all.

The algorithms are found, never listed, and nothing here asks for their names. Everything runs in
float64, where rounding is near 1e-16 and a real difference is not. One program costs a second or
two to compile, so the tests share two for each algorithm: the plain one, and one for runs that are
trained together and laid out differently.
"""

import functools
import inspect
import re
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from jax.sharding import Mesh

import fedda
from conformance.references import REFERENCES
from fedda import algorithms, api
from fedda.algorithms import registry
from fedda.core import tree
from fedda.core.algorithm import Algorithm, Phase, Positive, Seen
from fedda.core.losses import squared_error
from fedda.core.round import one_round, traffic
from fedda.errors import InputError
from fedda.simulate.cohort import Layout, draw_cohort, sum_over_clients
from fedda.simulate.train import Setup, Span, begin, segment, train
from fedda.testing.checks import CHECKS, case_of, differ, other_values
from fedda.testing.federation import (
    CLIENTS,
    COHORT,
    COHORTS,
    COUNTS,
    MODEL,
    PLAIN,
    ROUNDS,
    apply,
    federation,
    init,
    played,
    with_huge,
)
from fedda.testing.federation import TASK as PLAIN_TASK
from helpers.variants import Variant, assert_near, assert_same, every_variant

pytestmark = pytest.mark.usefixtures("x64")


SETTINGS = {
    "batch": 3,
    "local_work": 2,
    "local_unit": "epochs",
    "cohort": COHORT,
    "eval_every": ROUNDS,
}


def again(outputs, y):
    """The loss once more, as a metric."""
    return squared_error(outputs, y)


def as_parts(outputs, y):
    """And as one that gives what is divided, and by what."""
    return 3 * squared_error(outputs, y), jnp.full(len(y), 3.0)


TASK = PLAIN_TASK._replace(train_metrics=(again, as_parts))


@functools.cache
def case(variant):
    """The checks of a variant share its programs. An option may set a hyper-parameter aside."""
    unused = variant.algorithm.Hyper._fields if variant.chosen else ()
    return case_of(variant.algorithm, TASK, unused)


def simulated(variant, rounds, seed=0, **hyper):
    """The state and the history of a run whose cohorts are drawn, by the program of the checks."""
    setup, chosen = api.prepare(
        variant.name, MODEL, federation(), squared_error,
        rounds=rounds, **SETTINGS, **dict(variant.chosen), **hyper,
    )  # fmt: skip
    setup = setup._replace(algorithm=case(variant).algorithm, task=TASK, layout=PLAIN)
    rows = []
    for evaluation in train(setup, api.traced(chosen, MODEL), [seed]):
        rows.append(evaluation.row)
    return evaluation.run.state, rows


# ---------------------------------------------------------------------------- the algorithms


every_name = pytest.mark.parametrize("name", algorithms.names())


# ---------------------------------------------------------------- what a module says of itself


def test_every_module_has_algorithms_and_no_two_share_a_name():
    names = [name for module in registry.modules() for name in module.variants]
    assert sorted(names) == sorted(set(names)) == sorted(algorithms.names())
    assert all(module.variants for module in registry.modules())


def test_every_algorithm_is_described():
    variants = registry.variants().values()
    assert len({variant.label for variant in variants}) == len(variants)
    for variant in variants:
        assert re.search(r"\d{4}$", variant.reference)
        assert variant.label.partition("+")[0] in variant.make.__doc__
        assert variant.summary[-1] != "."


@every_name
def test_the_docstring_says_what_a_user_must_know(name):
    text = registry.module_of(name).__doc__
    assert "Weighting: " in text
    assert "Communication, in models: " in text


def test_every_algorithm_has_a_reference():
    assert sorted(REFERENCES) == sorted(algorithms.names())


@every_name
def test_defaults_are_in_their_domains(name):
    Hyper = algorithms.get(name).Hyper
    assert set(Hyper._field_defaults) == set(Hyper._fields)
    for field, domain in registry.domains(Hyper).items():
        assert domain.allows(Hyper._field_defaults[field]), field
        assert domain.description


@every_name
def test_names_of_settings_do_not_collide(name):
    reserved = {
        parameter
        for function in (api.prepare, api.run, api.run_grid)
        for parameter in inspect.signature(function).parameters
    }
    fields, options = set(algorithms.get(name).Hyper._fields), set(algorithms.options(name))
    assert not fields & options
    assert not (fields | options) & reserved


@every_variant
def test_the_models_sent_are_as_declared_and_as_the_docstring_says(variant):
    # The model is 8 kB, so a few scalars beside it are less than a hundredth of a model.
    model = fedda.Model(lambda key: init(key) | {"ballast": jnp.zeros(1000)}, apply)
    params = jax.eval_shape(model.init, random.key(0))
    hp = api.traced(variant.algorithm.Hyper(), model)
    sent = traffic(variant.algorithm, TASK._replace(model=model), hp, params, federation())
    models = np.array(sent) / tree.nbytes(params)
    assert (models % 1 < 0.01).all()
    down, up = models.astype(int)
    declared = registry.variants()[variant.name]
    assert variant.chosen or (down, up) == (declared.down, declared.up)
    # In the docstring, numbers are those of the algorithms in brackets, or of all.
    text = " ".join(registry.module_of(variant.name).__doc__.partition("Communication")[2].split())
    stated = re.findall(r"(\d+) down, (\d+) up(?: \(([^)]*)\))?", text)
    named = [row for row in stated if variant.name in row[2].split(", ")] or stated
    assert (str(down), str(up)) in [row[:2] for row in (stated if variant.chosen else named[:1])]


# -------------------------------------------------------------------------------- the contract


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@every_variant
def test_the_contract(variant, check):
    """What `fedda.testing.check_algorithm` checks for anybody's algorithm."""
    check(case(variant))


@every_variant
def test_history_counts_every_byte(variant):
    state, rows = simulated(variant, ROUNDS + 1)
    hp = api.traced(variant.algorithm.Hyper(), MODEL)
    down, up = traffic(variant.algorithm, TASK, hp, state.params, federation())
    assert [row["round"] for row in rows] == [0, ROUNDS, ROUNDS + 1]
    for row in rows:
        clients = row["round"] * COHORT
        assert (row["bytes_down"], row["bytes_up"]) == (clients * down, clients * up)
    assert down > 0
    assert up > 0


@every_variant
def test_the_order_of_batches_depends_on_the_seed(variant):
    # Same start and same cohorts: what is left for the key of the rounds is the order of batches.
    algorithm, shards = case(variant).algorithm, federation()
    hp = api.traced(algorithm.Hyper(), MODEL)

    def rounds(seed):
        run = begin(algorithm, False, shards.num_clients)(hp, MODEL.init(random.key(0)))
        span = Span(first=0, last=ROUNDS, cohorts=COHORTS, shards=shards)
        return segment(algorithm, TASK, PLAIN, False)(hp, run, random.key(seed), span)[0]

    assert differ(rounds(0).state.params, rounds(1).state.params, 1e-9)


@every_variant
def test_metrics_in_training_are_of_the_examples_that_the_loss_is_of(variant):
    """Also where some phases have nothing to tell, or some clients are left out."""
    for shards in (federation(), with_huge(5)):
        _, tally = played(case(variant).algorithm, task=TASK, shards=shards)
        assert tally.loss > 0
        np.testing.assert_allclose(tally.metrics, [tally.loss] * 2, rtol=1e-12)


REDUCTIONS = [r for module in registry.modules() for r in getattr(module, "reductions", ())]


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=lambda r: f"{r.name}-{r.other}")
def test_declared_reductions_hold(reduction):
    # For the defaults, and for any other value of what the two have in common and do not fix.
    one, other = (
        case(Variant(name, tuple(options.items()))).algorithm
        for name, options in ((reduction.name, reduction.options), (reduction.other, {}))
    )
    fixed = {*reduction.hyper, *reduction.other_hyper}
    shared = (set(one.Hyper._fields) & set(other.Hyper._fields)) - fixed
    free = {field: value for field, value in other_values(one).items() if field in shared}
    for values in ({}, free):
        left, _ = played(one, one.Hyper(**reduction.hyper, **values), task=TASK)
        right, _ = played(other, other.Hyper(**reduction.other_hyper, **values), task=TASK)
        assert_near(left.state.params, right.state.params)


# ------------------------------------------------------------------- clients that are not finite


def test_history_counts_what_was_not_finite():
    bad, rounds = 0, 2 * ROUNDS
    result = fedda.run(
        "fedavg", MODEL, with_huge(bad), squared_error, rounds=rounds, seed=4, **SETTINGS
    )
    drawn = [bad in draw_cohort(4, number, len(COUNTS), COHORT) for number in range(rounds)]
    expected = [sum(drawn[:number]) for number in (0, ROUNDS, rounds)]
    assert [row["nonfinite_clients"] for row in result.history] == expected
    assert expected[-1] > 0
    assert [row["skipped_rounds"] for row in result.history] == [0, 0, 0]
    assert all(np.isfinite(row["train_loss"]) for row in result.history[1:])


def test_history_counts_skipped_rounds():
    settings = ("fedavg", MODEL, with_huge(*CLIENTS), squared_error)
    rows = []
    message = f"all {2 * ROUNDS} rounds were skipped.*not finite .* Lower client_lr"
    with pytest.raises(InputError, match=message):
        fedda.run(*settings, rounds=2 * ROUNDS, on_evaluation=rows.append, **SETTINGS)
    assert [row["skipped_rounds"] for row in rows] == [0, ROUNDS, 2 * ROUNDS]
    # Of many runs some diverge: these are in the table. Who stops a run knows what it is like.
    stopped = fedda.run(*settings, on_evaluation=lambda row: row["round"] > 0, **SETTINGS)
    assert stopped.history[-1]["skipped_rounds"] == ROUNDS
    result = fedda.run_grid(*settings, grid={}, seeds=[0, 1], rounds=ROUNDS, **SETTINGS)[0].result
    assert [row["skipped_rounds"] for row in result.history] == [0, ROUNDS]
    assert all(np.isnan(row["train_loss"]) for row in result.history)
    assert_same(result.params, init(random.fold_in(random.key(0), 0)))


# --------------------------------------------------- phases, memory and keys, seen from inside
#
# An algorithm that learns nothing and writes everything down, by client: each client's first
# example holds its number, and its upload is a table that is zero but for its own entry. The sum
# over clients is then exact, whatever its order.


class LedgerHyper(typing.NamedTuple):
    gain: Positive = 1.0


class LedgerMemory(typing.NamedTuple):
    visits: typing.Any
    heard: typing.Any  # the last message


class LedgerState(typing.NamedTuple):
    params: typing.Any
    draws: typing.Any  # [phases, clients]: what each client drew from its key
    visits: typing.Any  # [phases, clients]: what each remembered
    rounds: typing.Any


class LedgerUpload(typing.NamedTuple):
    draws: typing.Any
    visits: typing.Any
    poison: typing.Any  # finite, unless the client's first example says otherwise for this phase


def ledger_init(hp, params):
    table = jnp.zeros((2, len(COUNTS)))
    return LedgerState(params, table, table, jnp.zeros(()))


def ledger_memory(hp, params):
    return LedgerMemory(jnp.zeros(()), jnp.zeros(()))


def ledger_send(phase, hp, state):
    return 10 * state.rounds + phase


def ledger_work(phase, hp, task, message, memory, shard, key):
    (client, *poison), _ = jax.tree.map(lambda leaf: leaf[0], shard.rows(jnp.zeros(1, "int32")))
    entry = jnp.zeros(len(COUNTS)).at[client.astype("int32")]
    upload = LedgerUpload(
        entry.set(hp.gain * random.uniform(key)), entry.set(memory.visits), poison[phase]
    )
    return upload, LedgerMemory(memory.visits + 1, message), Seen(client, jnp.ones(()))


def ledger_merge(phase, hp, state, total):
    return state._replace(
        draws=state.draws.at[phase].set(total.draws),
        visits=state.visits.at[phase].set(total.visits),
        rounds=state.rounds + phase,  # both phases make one round
    )


LEDGER = Algorithm(
    Hyper=LedgerHyper,
    init=ledger_init,
    memory=ledger_memory,
    phases=tuple(
        Phase(*(functools.partial(f, phase) for f in (ledger_send, ledger_work, ledger_merge)))
        for phase in range(2)
    ),
)
PRESENT = np.array(COUNTS) > 0
SILENT = PLAIN_TASK  # this algorithm reports no metrics


def labelled(poison=(), phases=(0, 1)):
    """Every client's examples hold its number; those of `poison` spoil its uploads in `phases`."""

    def data(client):
        spoilt = [np.inf if client in poison and phase in phases else 0.0 for phase in range(2)]
        return np.tile([client, *spoilt], (COUNTS[client], 1)), np.zeros((COUNTS[client], 2))

    return federation(junk=np.nan, data=data)


@functools.partial(jax.jit, static_argnames="layout")
def ledger_round(layout, hp, state, memory, shards, cohort, key):
    add_up = functools.partial(sum_over_clients, layout)
    return one_round(
        LEDGER, SILENT, add_up, hp=hp, state=state, memory=memory, shards=shards, cohort=cohort,
        key=key,
    )  # fmt: skip


def ledger_start(gain=1.0):
    hp = LedgerHyper(jnp.asarray(gain))
    run = begin(LEDGER, False, labelled().num_clients)(hp, MODEL.init(random.key(0)))
    return hp, run.state, run.memory


def ledger_twice(layout, order=slice(None), poison=()):
    hp, state, memory = ledger_start()
    shards = labelled(poison)
    for number in range(2):
        cohort = jnp.asarray(COHORTS[number][order])
        state, memory, info = ledger_round(
            layout, hp, state, memory, shards, cohort, random.key(number)
        )
    return state, memory, info


def test_two_phases_with_memory_and_keys_by_client():
    state, memory, info = ledger_twice(PLAIN)
    first, second = (np.isin(CLIENTS, cohort) & PRESENT for cohort in COHORTS[:2])
    times = first.astype(int) + second
    # Keys: folded by phase, then by client.
    for phase in range(2):
        folded = [
            random.uniform(random.fold_in(random.fold_in(random.key(1), phase), client))
            for client in CLIENTS
        ]
        np.testing.assert_array_equal(state.draws[phase], np.where(second, folded, 0))
    drawn = np.concatenate([draws[second] for draws in state.draws])
    assert len(set(drawn.tolist())) == len(drawn)
    # Memory, gathered: the clients of a cohort are visited once in each of the two phases.
    np.testing.assert_array_equal(state.visits[0], np.where(second, 2 * first, 0))
    np.testing.assert_array_equal(state.visits[1], np.where(second, 2 * first + 1, 0))
    # Memory, scattered: the empty client keeps what it began with.
    np.testing.assert_array_equal(memory.visits, 2 * times)
    # The last message came in the second phase of the last round with the client.
    np.testing.assert_array_equal(memory.heard, np.where(second, 11, np.where(first, 1, 0)))
    assert state.rounds == 2
    # What was seen, over both phases: here, the sum of the clients' numbers.
    both = np.tile(np.flatnonzero(second), 2)
    assert jax.device_get(info.seen) == (both.sum(), len(both), ())
    assert (info.nonfinite, info.skipped) == (0, 0)


@pytest.mark.parametrize(("chunk", "devices"), [(1, 1), (3, 1), (None, 2), (3, 2)])
def test_keys_and_memory_do_not_depend_on_position_chunk_or_device(chunk, devices):
    # A cohort of four: chunks of 3 leave slots to fill.
    mesh = Mesh(np.array(jax.devices()[:2]), ("clients",)) if devices == 2 else None
    expected = ledger_twice(PLAIN)
    for order in ([0, 1, 2, 3], [2, 0, 3, 1]):
        assert_same(jax.device_get(ledger_twice(Layout(chunk, mesh), order)), expected)


@pytest.mark.parametrize("layout", [PLAIN, Layout(1)], ids=["together", "one by one"])
def test_one_client_that_is_not_finite_keeps_its_memory(layout):
    bad = 0  # in both cohorts
    state, memory, info = ledger_twice(layout, poison=[bad])
    expected, kept, _ = ledger_twice(PLAIN)
    others = (np.arange(len(COUNTS)) != bad).astype(float)
    assert_same(memory, tree.scale(others, kept))
    np.testing.assert_array_equal(state.draws, expected.draws * others[None])
    np.testing.assert_array_equal(state.visits, expected.visits * others[None])
    assert (info.nonfinite, info.skipped) == (2, 0)  # two uploads in a round


@pytest.mark.parametrize("layout", [PLAIN, Layout(1)], ids=["together", "one by one"])
@pytest.mark.parametrize("phase", [0, 1])
def test_a_round_with_one_unusable_phase_leaves_no_trace(phase, layout):
    # All of the cohort is lost in one phase, and none in the other.
    lost = [client for client in COHORTS[0] if COUNTS[client]]
    hp, state, memory = ledger_start()
    shards, key = labelled(lost, phases=[phase]), random.key(5)
    state, memory, info = ledger_round(
        layout, hp, state, memory, shards, jnp.asarray(COHORTS[0]), key
    )
    assert_same((hp, state, memory), ledger_start())
    assert (info.nonfinite, info.skipped) == (len(lost), 1)


@pytest.mark.parametrize("layout", [PLAIN, Layout(1)], ids=["together", "one by one"])
def test_a_sum_that_overflows_leaves_no_trace(layout):
    # Every upload is finite and their sum is not: all of the memory goes back, in both phases.
    hp, state, memory = ledger_start()
    spoilt = federation(
        data=lambda client: (np.tile([client, 1e308, 0.0], (COUNTS[client], 1)), 0.0)
    )
    cohort, key = jnp.asarray(COHORTS[0]), random.key(5)
    state, memory, info = ledger_round(layout, hp, state, memory, spoilt, cohort, key)
    assert_same((hp, state, memory), ledger_start())
    assert (info.nonfinite, info.skipped) == (0, 1)


def test_a_record_trains_without_being_registered():
    # ... and several runs together, with numbers, keys and memory of their own.
    setup = Setup(
        algorithm=LEDGER, task=SILENT, shards=labelled(), test=None, rounds=ROUNDS + 1,
        cohort=COHORT, eval_every=ROUNDS, stabilise=0,
    )  # fmt: skip
    gains, seeds = jnp.asarray([1.0, 3.0]), [0, 1]
    *_, together = train(setup, LedgerHyper(gains), seeds)
    for number, seed in enumerate(seeds):
        *_, alone = train(setup, LedgerHyper(gains[number]), [seed])
        assert_near(tree.take(together.run, number), alone.run)
        # Visits: two for each cohort that a client was in.
        visits = np.zeros(len(COUNTS))
        for round_number in range(ROUNDS + 1):
            cohort = draw_cohort(seed, round_number, len(COUNTS), COHORT)
            visits[cohort] += 2
        np.testing.assert_array_equal(alone.run.memory.visits, visits * PRESENT)
        # Keys of the last round: by seed, round, phase and client.
        key = functools.reduce(random.fold_in, (1, ROUNDS, 1), random.key(seed))
        draws = [gains[number] * random.uniform(random.fold_in(key, c)) for c in CLIENTS]
        present = PRESENT & np.isin(CLIENTS, cohort)
        np.testing.assert_allclose(alone.run.state.draws[1], present * np.array(draws), rtol=1e-15)
        # Bytes: down a number, up two tables and a number, to and from the cohort in both phases.
        messages = 2 * (ROUNDS + 1) * COHORT
        assert alone.row["bytes_down"] == messages * 8
        assert alone.row["bytes_up"] == messages * 8 * (2 * len(COUNTS) + 1)
