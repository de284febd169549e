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
from fedda.core.task import Plan, Task
from fedda.data.federation import Shards, from_clients
from fedda.errors import InputError
from fedda.simulate.cohort import Layout, draw_cohort, sum_over_clients
from fedda.simulate.train import Setup, Span, begin, segment, train
from helpers.variants import VARIANTS, assert_near, assert_same, every_variant

pytestmark = pytest.mark.usefixtures("x64")


# ------------------------------------------------------------------------- the federation

COUNTS = (5, 3, 0, 4, 2, 6, 3, 4)  # clients of unequal sizes; number 2 has no examples
CLIENTS = range(len(COUNTS))
GAP = 2  # rows that belong to nobody, before each client and after the last
COHORTS = np.array([[0, 2, 1, 5], [4, 3, 2, 0], [2, 6, 1, 3]], np.int32)
ROUNDS, COHORT = COHORTS.shape
STARTS = np.cumsum([GAP, *(count + GAP for count in COUNTS)])[:-1]


def examples(client):
    """Each client has its own linear map to learn, and noise."""
    rng = np.random.default_rng(client)
    x = rng.normal(size=(COUNTS[client], 3))
    return x, x @ rng.normal(size=(3, 2)) + 0.1 * rng.normal(size=(COUNTS[client], 2))


def federation(junk=0.0, data=None, counts=COUNTS):
    """The clients' examples, or `data` in their place, with gaps full of `junk` between them."""
    rows = sum(COUNTS) + GAP * (len(COUNTS) + 1)
    x, y = np.full((rows, 3), junk), np.full((rows, 2), junk)
    for client, start in enumerate(STARTS):
        own = slice(start, start + COUNTS[client])
        x[own], y[own] = examples(client) if data is None else data(client)
    start, count = (jnp.asarray(np.array(each, np.int32)) for each in (STARTS, counts))
    return Shards(jnp.asarray(x), jnp.asarray(y), start, count, max(COUNTS), len(COUNTS))


def with_huge(*clients):
    """Finite examples of these clients, so large that their gradients are not finite."""
    huge = {
        client: (np.full((COUNTS[client], 3), 1e200), examples(client)[1]) for client in clients
    }
    return federation(data=lambda client: huge.get(client) or examples(client))


def init(key):
    return {"hidden": {"kernel": random.normal(key, (3, 2))}, "bias": jnp.zeros(2)}


def apply(params, x):
    return x @ params["hidden"]["kernel"] + params["bias"][None]


MODEL = fedda.Model(init, apply)
# Unequal clients take 2 to 4 local steps a visit; some batches are short, some span two epochs.
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


TASK = Task(MODEL, squared_error, Plan(3, 2, "epochs"), train_metrics=(again, as_parts))
SILENT = TASK._replace(train_metrics=())  # for an algorithm that tells of no metrics
PLAIN = Layout()


def play(*arguments, **keywords):
    """The run after some rounds with these cohorts."""
    run, _ = played(*arguments, **keywords)
    return run


def played(algorithm, hp=None, shards=None, cohorts=COHORTS, seed=0, rounds=ROUNDS):
    """That run, and the training losses and metrics of its rounds."""
    shards = federation() if shards is None else shards
    hp = api.traced(algorithm.Hyper() if hp is None else hp, MODEL)
    run = begin(algorithm, MODEL, False, shards.num_clients)(hp, random.key(seed))
    span = Span(first=0, last=rounds, cohorts=cohorts, shards=shards)
    return segment(algorithm, TASK, PLAIN, False)(hp, run, random.key(seed), span)


def simulated(variant, rounds, seed=0, **hyper):
    """The state and the history of a run whose cohorts are drawn, by the program of `play`."""
    setup, chosen = api.prepare(
        variant.name, MODEL, federation(), squared_error,
        rounds=rounds, **SETTINGS, **dict(variant.chosen), **hyper,
    )  # fmt: skip
    setup = setup._replace(task=TASK, layout=PLAIN)
    rows = []
    for evaluation in train(setup, api.traced(chosen, MODEL), [seed]):
        rows.append(evaluation.row)
    return evaluation.run.state, rows


# ---------------------------------------------------------------------------- the algorithms


every_name = pytest.mark.parametrize("name", algorithms.names())


def moved(value):
    """Another number that any domain with (0, 1) in it allows; 0.46 is the only one it keeps."""
    return 0.5 * value + 0.23


# ------------------------------------------------------------------------------ comparisons


def differ(one, other, tolerance=1e-9):
    """Whether two trees differ by more than rounding."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return any(np.abs(np.asarray(a) - np.asarray(b)).max() > tolerance for a, b in pairs)


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


# ------------------------------------------------------------------------- the shape of a round


@pytest.mark.parametrize("double", [True, False], ids=["float64", "float32"])
@every_variant
def test_a_round_keeps_structure_shapes_and_dtypes(variant, double):
    with jax.enable_x64(double):
        assert_a_round_keeps_types(variant.algorithm, MODEL)


@every_variant
def test_a_round_keeps_dtypes_of_parameters_in_mixed_precision(variant):
    def mixed(key):
        params = init(key)
        return params | {"bias": params["bias"].astype("bfloat16")}

    with jax.enable_x64(False), jax.numpy_dtype_promotion("standard"):
        assert_a_round_keeps_types(variant.algorithm, fedda.Model(mixed, apply))


def assert_a_round_keeps_types(algorithm, model):
    shards, hp = federation(), api.traced(algorithm.Hyper(), model)
    task = TASK._replace(model=model)

    def at_the_start(hp):
        run = begin(algorithm, model, False, shards.num_clients)(hp, random.key(0))
        return run.state, run.memory

    def after_a_round(hp, state, memory):
        add_up = functools.partial(sum_over_clients, Layout(chunk=3))
        return one_round(
            algorithm, task, add_up, hp=hp, state=state, memory=memory,
            shards=shards, cohort=jnp.asarray(COHORTS[0]), key=random.key(0),
        )[:2]  # fmt: skip

    def types(values):
        return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.weak_type), values)

    before = jax.eval_shape(at_the_start, hp)
    after = jax.eval_shape(after_a_round, hp, *before)
    assert jax.tree.structure(before) == jax.tree.structure(after)
    assert types(before) == types(after)
    assert before[0].params == jax.eval_shape(model.init, random.key(0))
    assert all(leaf.shape[0] == len(COUNTS) for leaf in jax.tree.leaves(before[1]))


@every_variant
def test_one_program_for_any_numbers_and_any_number_of_rounds(variant, compilations):
    simulated(variant, ROUNDS)
    compilations.clear()
    defaults = variant.algorithm.Hyper._field_defaults
    for rounds in (1, ROUNDS + 1, 3 * ROUNDS):
        hyper = {field: moved(value) for field, value in defaults.items()}
        simulated(variant, rounds, seed=rounds, **hyper)
    assert not {"jit(segment)", "jit(begin)"} & {*compilations}


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


# ----------------------------------------------------------------------- what a round depends on


@every_variant
def test_equal_seeds_agree_and_different_seeds_differ(variant):
    first, again, other = (simulated(variant, ROUNDS, seed) for seed in (0, 0, 1))
    assert_same(first[0], again[0])
    assert str(first[1]) == str(again[1])  # as text, for NaN is not itself
    assert differ(first[0].params, other[0].params)


@every_variant
def test_the_order_of_batches_depends_on_the_seed(variant):
    # Same start and same cohorts: what is left for the key of the rounds is the order of batches.
    algorithm, shards = variant.algorithm, federation()
    hp = api.traced(algorithm.Hyper(), MODEL)

    def rounds(seed):
        run = begin(algorithm, MODEL, False, shards.num_clients)(hp, random.key(0))
        span = Span(first=0, last=ROUNDS, cohorts=COHORTS, shards=shards)
        return segment(algorithm, TASK, PLAIN, False)(hp, run, random.key(seed), span)[0]

    assert differ(rounds(0).state.params, rounds(1).state.params)


@every_name
def test_every_hyper_parameter_matters(name):
    # ... with some option at least: an option may set a part of the algorithm aside.
    def matters(algorithm, field):
        value = moved(algorithm.Hyper._field_defaults[field])
        assert registry.domains(algorithm.Hyper)[field].allows(value)
        changed = play(algorithm, algorithm.Hyper(**{field: value}))
        return differ(play(algorithm).state.params, changed.state.params)

    records = [variant.algorithm for variant in VARIANTS if variant.name == name]
    for field in records[0].Hyper._fields:
        assert any(matters(algorithm, field) for algorithm in records), field


@every_variant
def test_metrics_in_training_are_of_the_examples_that_the_loss_is_of(variant):
    """Also where some phases have nothing to tell, or some clients are left out."""
    for shards in (federation(), with_huge(5)):
        _, tally = played(variant.algorithm, shards=shards)
        assert tally.loss > 0
        np.testing.assert_allclose(tally.metrics, [tally.loss] * 2, rtol=1e-12)


@every_variant
def test_rows_of_nobody_have_exactly_no_effect(variant):
    clean = play(variant.algorithm)
    for junk in (np.nan, 1e30):
        assert_same(clean, play(variant.algorithm, shards=federation(junk)))


@every_variant
def test_clients_that_are_not_asked_have_exactly_no_effect(variant):
    absent = set(CLIENTS) - set(COHORTS.ravel().tolist())
    assert absent, "the cohorts leave someone out"

    def poisoned(client):
        x, y = examples(client)
        return (np.nan * x, np.nan * y) if client in absent else (x, y)

    clean = play(variant.algorithm)
    assert_same(clean, play(variant.algorithm, shards=federation(data=poisoned)))


@every_variant
def test_runs_together_order_layout_gaps_and_empty_clients_change_only_rounding(variant):
    # One program against another that differs in all of these: two runs with numbers and seeds of
    # their own are trained together, the cohorts are in another order and lack the empty client,
    # the store has no gaps, and of two devices each takes its clients one by one, the last of them
    # an absent one. What is left is the order of the server's sum.
    algorithm, seeds = variant.algorithm, (0, 3)
    defaults = algorithm.Hyper._field_defaults
    other = {field: moved(value) for field, value in defaults.items()}
    hypers = [algorithm.Hyper(), algorithm.Hyper(**other)]
    alone = [played(algorithm, hp, seed=seed) for hp, seed in zip(hypers, seeds, strict=True)]
    compact = from_clients([examples(client) for client in CLIENTS])
    cohorts = np.array([[c for c in reversed(cohort) if COUNTS[c]] for cohort in COHORTS], np.int32)
    assert cohorts.shape == (ROUNDS, COHORT - 1)
    hps, keys = [api.traced(hp, MODEL) for hp in hypers], [random.key(seed) for seed in seeds]
    starts = map(begin(algorithm, MODEL, False, compact.num_clients), hps, keys)
    hp, run = (jax.tree.map(lambda *leaves: np.stack(leaves), *trees) for trees in (hps, starts))
    layout = Layout(chunk=1, mesh=Mesh(np.array(jax.devices()[:2]), ("clients",)))
    span = Span(first=0, last=ROUNDS, cohorts=np.stack([cohorts] * 2), shards=compact)
    together = segment(algorithm, TASK, layout, True)(hp, run, jnp.stack(keys), span)
    for number, expected in enumerate(alone):
        assert_near(expected, jax.tree.map(lambda leaf, i=number: np.asarray(leaf)[i], together))
    assert differ(*(run.state.params for run, _ in alone))


@every_variant
def test_order_of_the_cohort_changes_only_rounding(variant):
    assert_near(play(variant.algorithm), play(variant.algorithm, cohorts=COHORTS[:, ::-1].copy()))


REDUCTIONS = [r for module in registry.modules() for r in getattr(module, "reductions", ())]


@pytest.mark.parametrize("reduction", REDUCTIONS, ids=lambda r: f"{r.name}-{r.other}")
def test_declared_reductions_hold(reduction):
    # For the defaults, and for any other value of what the two have in common and do not fix.
    one = algorithms.get(reduction.name, **reduction.options)
    other = algorithms.get(reduction.other)
    fixed = {*reduction.hyper, *reduction.other_hyper}
    shared = (set(one.Hyper._fields) & set(other.Hyper._fields)) - fixed
    free = {field: moved(one.Hyper._field_defaults[field]) for field in shared}
    for values in ({}, free):
        left = play(one, one.Hyper(**reduction.hyper, **values))
        right = play(other, other.Hyper(**reduction.other_hyper, **values))
        assert_near(left.state.params, right.state.params)


# ------------------------------------------------------------------- clients that are not finite


@every_variant
def test_a_client_that_is_not_finite_counts_as_absent(variant):
    # Absent, exactly: as if it had no examples.
    bad = 1
    algorithm = variant.algorithm
    without = [0 if client == bad else count for client, count in enumerate(COUNTS)]
    run, expected = (
        play(algorithm, shards=with_huge(bad)),
        play(algorithm, shards=federation(counts=without)),
    )
    assert_same((run.state, run.memory), (expected.state, expected.memory))
    assert tree.all_finite(run.state)
    visits = sum(bad in cohort for cohort in COHORTS)
    assert run.nonfinite == visits * len(algorithm.phases) > 0
    assert (expected.nonfinite, run.skipped, expected.skipped) == (0, 0, 0)


@every_variant
def test_a_round_with_no_finite_client_never_happened(variant):
    bad = set(COHORTS[-1].tolist()) - {2}
    cohorts = np.array([[0, 4, 5, 7], [5, 0, 7, 2], COHORTS[-1]], np.int32)
    shards = with_huge(*bad)
    before = play(variant.algorithm, shards=shards, cohorts=cohorts, rounds=2)
    after = play(variant.algorithm, shards=shards, cohorts=cohorts, rounds=3)
    assert_same((before.state, before.memory), (after.state, after.memory))
    assert (before.skipped, after.skipped) == (0, 1)
    assert after.nonfinite > before.nonfinite


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
    run = begin(LEDGER, MODEL, False, labelled().num_clients)(hp, random.key(0))
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


def test_one_client_that_is_not_finite_keeps_its_memory():
    bad = 0  # in both cohorts
    state, memory, info = ledger_twice(PLAIN, poison=[bad])
    expected, kept, _ = ledger_twice(PLAIN)
    others = (np.arange(len(COUNTS)) != bad).astype(float)
    assert_same(memory, tree.scale(others, kept))
    np.testing.assert_array_equal(state.draws, expected.draws * others[None])
    np.testing.assert_array_equal(state.visits, expected.visits * others[None])
    assert (info.nonfinite, info.skipped) == (2, 0)  # two uploads in a round


@pytest.mark.parametrize("phase", [0, 1])
def test_a_round_with_one_unusable_phase_leaves_no_trace(phase):
    # All of the cohort is lost in one phase, and none in the other.
    lost = [client for client in COHORTS[0] if COUNTS[client]]
    hp, state, memory = ledger_start()
    shards, key = labelled(lost, phases=[phase]), random.key(5)
    state, memory, info = ledger_round(
        PLAIN, hp, state, memory, shards, jnp.asarray(COHORTS[0]), key
    )
    assert_same((hp, state, memory), ledger_start())
    assert (info.nonfinite, info.skipped) == (len(lost), 1)


def test_a_sum_that_overflows_leaves_no_trace():
    # Every upload is finite and their sum is not: all of the memory goes back, in both phases.
    hp, state, memory = ledger_start()
    spoilt = federation(
        data=lambda client: (np.tile([client, 1e308, 0.0], (COUNTS[client], 1)), 0.0)
    )
    cohort, key = jnp.asarray(COHORTS[0]), random.key(5)
    state, memory, info = ledger_round(PLAIN, hp, state, memory, spoilt, cohort, key)
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
