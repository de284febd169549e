"""The front door: what it refuses, how cohorts are drawn, when it evaluates, how it continues."""

import itertools
import json
import pickle
import re
import subprocess
import sys
from functools import lru_cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import random
from scipy import stats

import fedda
from fedda import algorithms, api
from fedda.core.losses import squared_error
from fedda.core.task import Plan, Task
from fedda.data.federation import from_clients
from fedda.errors import InputError
from fedda.simulate import train as simulator
from fedda.simulate.cohort import Layout, arrange, draw_cohort
from fedda.simulate.train import Span, begin, segment, train
from helpers.new_models import train_new_models

RNG = np.random.default_rng(0)
CLIENTS = [(RNG.normal(size=(count, 3)), RNG.normal(size=(count, 2))) for count in (4, 7, 2, 5, 6)]
TEST = (RNG.normal(size=(9, 3)), RNG.normal(size=(9, 2)))
MODEL = fedda.Model(
    lambda key: {"w": random.normal(key, (3, 2))}, lambda params, x: x @ params["w"]
)
ROUNDS, EVERY, LAST = 8, 3, 4  # the full-batch rounds begin within an evaluation interval
ADAM = "fedda-adam"  # the algorithm with the largest state


def first_error(outputs, targets):
    """A metric."""
    return jnp.abs(outputs - targets)[:, 0]


SETTINGS = {
    "rounds": ROUNDS,
    "eval_every": EVERY,
    "stabilise": LAST,
    "cohort": 3,
    "batch": 2,
    "local_work": 3,
    "test": TEST,
    "metrics": (first_error,),
}


def run(name=ADAM, **settings):
    return fedda.run(name, MODEL, CLIENTS, squared_error, **(SETTINGS | settings))


def assert_same(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    jax.tree.map(np.testing.assert_array_equal, one, other)


# ---------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("fedavgg", {}, "unknown algorithm 'fedavgg'. Did you mean fedavg"),
        ("qqqq", {}, "unknown algorithm 'qqqq'. Known: "),
        ("fedavg", {"client_rl": 1}, "unknown setting of fedavg 'client_rl'. Did you mean client_"),
        ("fedavg", {"units": "grad"}, "unknown setting of fedavg 'units'. "),
        (ADAM, {"unit": "grad"}, "unknown setting of fedda-adam 'unit'. Did you mean units"),
        (ADAM, {"units": "gard"}, "unknown value of units of fedda-adam 'gard'. Did you mean grad"),
        (ADAM, {"local_unit": "epoch"}, "unknown value of local_unit 'epoch'. Did you mean epochs"),
        ("fedavg", {"reduction": "average"}, "unknown value of reduction 'average'. "),
    ],
)  # fmt: skip
def test_unknown_names_are_answered_with_the_nearest(name, settings, message):
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        run(name, **settings)
    assert "Known: " in str(caught.value)


@pytest.mark.parametrize("value", [-1, 0, np.nan, np.inf, "0.1", True, None], ids=repr)
def test_rates_are_positive_numbers(value):
    message = f"client_lr of fedavg must be a positive number, got {value!r}."
    with pytest.raises(InputError, match=re.escape(message)):
        run("fedavg", client_lr=value)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [("beta1", 1.0, "a number in [0, 1)"), ("mu", -0.1, "zero or a positive number")],
)
def test_each_hyper_parameter_has_its_domain(field, value, words):
    message = f"{field} of fedda-adam must be {words}, got {value!r}."
    with pytest.raises(InputError, match=re.escape(message)):
        run(ADAM, **{field: value})


@pytest.mark.parametrize(
    "name", ["rounds", "cohort", "batch", "local_work", "eval_every", "devices", "chunk"]
)
@pytest.mark.parametrize("value", [0, -2, 2.0, True, "3"], ids=repr)
def test_counts_are_whole_numbers(name, value):
    message = f"{name} must be a whole number of at least 1, got {value!r}."
    with pytest.raises(InputError, match=re.escape(message)):
        run(**{name: value})


def test_a_cohort_larger_than_the_population():
    message = "cohort must be at most the number of clients, which is 5, got 6."
    with pytest.raises(InputError, match=re.escape(message)):
        run(cohort=6)


@pytest.mark.parametrize("value", [-1, -0.1, 1.5, ROUNDS + 1, np.nan], ids=repr)
def test_stabilise_is_a_share_or_a_number_of_rounds(value):
    message = (
        f"stabilise must be a share of the rounds below 1 or a whole number of rounds up to "
        f"{ROUNDS}, got {value!r}."
    )
    with pytest.raises(InputError, match=re.escape(message)):
        run(stabilise=value)


def test_more_devices_than_there_are():
    with pytest.raises(InputError, match=r"devices must be at most 2, .* got 3\."):
        run(devices=3)


@pytest.mark.parametrize("name", ["x", "y"])
def test_a_test_set_that_is_not_finite(name):
    test = {"x": TEST[0].copy(), "y": TEST[1].copy()}
    test[name][4, 1] = np.nan
    message = f"{name} of the test set has a non-finite value in row 4."
    with pytest.raises(InputError, match=re.escape(message)):
        run(test=tuple(test.values()))


def test_examples_the_model_cannot_take():
    message = "the model cannot be applied to examples of shape (4,): "
    with pytest.raises(InputError, match=re.escape(message)):
        fedda.run("fedavg", MODEL, [(np.zeros((5, 4)), np.zeros((5, 2)))], squared_error, cohort=1)


@pytest.mark.parametrize("where", ["loss", "metrics"])
def test_a_loss_or_metric_that_averages_over_the_batch(where):
    def averaged(outputs, targets):
        return squared_error(outputs, targets).mean()

    loss = averaged if where == "loss" else squared_error
    with pytest.raises(
        InputError, match=r"averaged must return one number for each example, .* shape \(\)"
    ):
        fedda.run("fedavg", MODEL, CLIENTS, loss, **SETTINGS | {"metrics": [averaged]})


def test_a_loss_that_gives_an_example_a_row_is_told_what_it_was_given():
    """[n, 2] of two outputs; and [n, n] of labels that broadcast against outputs."""
    message = r"got shape \(batch, {}\)\. .* shapes \(\(2,\), \({}\)\)\. Average over"
    with pytest.raises(InputError, match=message.format(2, "2,")):
        fedda.run("fedavg", MODEL, CLIENTS, lambda outputs, y: (outputs - y) ** 2, **SETTINGS)
    clients = [(x, y[:, 0]) for x, y in CLIENTS]
    with pytest.raises(InputError, match=message.format("batch", "")):
        fedda.run("fedavg", MODEL, clients, lambda outputs, y: outputs[:, :1] - y[None], cohort=2)


@pytest.mark.parametrize(
    ("grid", "seeds", "message"),
    [
        ({"client_lr": [0.1]}, (0,), "run_grid trains at least two runs, got 1. Use run for one."),
        ({"client_lr": [0.1, -1]}, (0,), "client_lr of fedavg must be a positive number, got -1."),
        ({"client_rl": [1, 2]}, (0,), "unknown hyper-parameter of fedavg 'client_rl'. Did you"),
    ],
)  # fmt: skip
def test_what_run_grid_refuses(grid, seeds, message):
    with pytest.raises(InputError, match=re.escape(message)):
        fedda.run_grid("fedavg", MODEL, CLIENTS, squared_error, grid=grid, seeds=seeds, **SETTINGS)


# ------------------------------------------------------------------------------------- cohorts


def plausible(observed, expected, freedom):
    """A chi-square test that a fair generator fails once in a million."""
    statistic = np.sum((np.asarray(observed) - expected) ** 2 / expected)
    assert stats.chi2.sf(statistic, freedom) > 1e-6, statistic


def test_cohorts_are_drawn_without_replacement_and_uniformly():
    pairs = dict.fromkeys(itertools.combinations(range(6), 2), 0)
    for number in range(6000):
        cohort = draw_cohort(0, number, 6, 2)
        pairs[tuple(sorted(cohort.tolist()))] += 1  # fails on a client drawn twice
    plausible(list(pairs.values()), 6000 / 15, freedom=14)


def test_rounds_and_seeds_draw_independently():
    for neighbour in ((0, 1), (1, 0)):  # the next round, the next seed
        table = np.zeros((4, 4))
        for start in range(0, 6400, 2):
            (here,) = draw_cohort(start, start, 4, 1)
            (there,) = draw_cohort(start + neighbour[0], start + neighbour[1], 4, 1)
            table[here, there] += 1
        plausible(table, 3200 / 16, freedom=15)


def test_a_cohort_is_the_same_whenever_it_is_drawn():
    first, again = (draw_cohort(3, 17, 100, 10) for _ in range(2))
    np.testing.assert_array_equal(first, again)
    several = {
        tuple(draw_cohort(seed, number, 100, 10)) for seed in range(4) for number in range(4)
    }
    assert len(several) == 16  # the next seed does not repeat the rounds of this one
    everyone = draw_cohort(3, 17, 12, 12)
    assert sorted(everyone.tolist()) == list(range(12))
    assert everyone.dtype == np.int32


# --------------------------------------------------------------------------- rounds and rows


def test_a_run_ends_where_its_listener_says_so():
    """As a shorter run does; a listener that returns anything else only listens."""
    whole = run()
    short = run(on_evaluation=lambda row: np.equal(row["round"], 3))
    assert str(short.history) == str(whole.history[:2])
    kept = []
    run(on_evaluation=lambda row: kept.append(row) or "go on")
    assert len(kept) == len(whole.history)
    again = run(rounds=3, stabilise=0)
    assert_same(short.params, again.params)


def test_rows_come_at_every_evaluation():
    heard = []
    result = run(on_evaluation=heard.append)
    assert str(heard) == str(result.history)  # as text, for NaN is not itself
    assert [row["round"] for row in result.history] == [0, 3, 6, 8]
    for row in result.history:
        assert list(row) == [
            "round", "train_loss", "loss", "first_error",
            "bytes_down", "bytes_up", "nonfinite_clients", "skipped_rounds",
        ]  # fmt: skip
        assert {type(value) for value in row.values()} == {int, float}
        json.dumps(row)
    assert np.isnan(result.history[0]["train_loss"])
    assert result.params is result.state.params
    # The last row is about the parameters that are returned.
    x, y = TEST
    errors = x @ np.asarray(result.params["w"], np.float64) - y
    np.testing.assert_allclose(result.history[-1]["loss"], (errors**2).mean(), rtol=1e-5)
    np.testing.assert_allclose(
        result.history[-1]["first_error"], np.abs(errors[:, 0]).mean(), rtol=1e-5
    )


def test_without_a_test_set():
    result, tested = run(test=None, metrics=()), run()
    assert_same(result.state, tested.state)
    for row, other in zip(result.history, tested.history, strict=True):
        assert set(other) - set(row) == {"loss", "first_error"}
        assert str(row) == str({name: other[name] for name in row})


def test_the_last_rounds_are_evaluated_more_often():
    """Of 8 rounds the last 4 are what results are means over; training is the same."""
    result, usual = run(eval_every=8, late_every=2), run(eval_every=8)
    assert [row["round"] for row in result.history] == [0, 4, 6, 8]
    assert [row["round"] for row in run(eval_every=3, late_every=3).history] == [0, 3, 5, 6, 8]
    np.testing.assert_allclose(result.params["w"], usual.params["w"], rtol=1e-5)
    losses = [row["train_loss"] for row in result.history]
    whole = (4 * losses[1] + 2 * losses[2] + 2 * losses[3]) / 8
    np.testing.assert_allclose(usual.history[-1]["train_loss"], whole, rtol=1e-5)


@pytest.mark.parametrize("value", [-1, 2.0, True, "3"], ids=repr)
def test_late_evaluations_are_none_or_so_many_rounds_apart(value):
    message = f"late_every must be a whole number of at least 0, got {value!r}."
    with pytest.raises(InputError, match=re.escape(message)):
        run(late_every=value)


def test_evaluation_changes_nothing():
    often, once = run(eval_every=EVERY), run(eval_every=ROUNDS)
    np.testing.assert_allclose(often.params["w"], once.params["w"], rtol=1e-5)
    assert [row["round"] for row in once.history] == [0, ROUNDS]


def test_the_last_rounds_take_one_step_with_all_data():
    # One round after another, each with its own task, against `run`: the switch after round 4 lies
    # within the interval from 3 to 6, whose training loss is the mean of both kinds of rounds.
    result = run(seed=5)
    algorithm = algorithms.get(ADAM)
    hp, key = api.traced(algorithm.Hyper(), MODEL), random.key(5)
    shards = from_clients(CLIENTS)
    task = Task(MODEL, squared_error, Plan(2, 3), (first_error,))
    full = task._replace(plan=Plan(2, 1, "full"))
    state = begin(algorithm, False, shards.num_clients)(hp, MODEL.init(random.fold_in(key, 0)))
    losses = []
    for number in range(ROUNDS):
        cohorts = np.zeros((EVERY, 3), np.int32)
        drawn = draw_cohort(5, number, len(CLIENTS), 3)
        cohorts[0] = arrange(drawn, np.asarray(shards.count), Layout())
        kind = task if number < ROUNDS - LAST else full
        span = Span(first=number, last=number + 1, cohorts=cohorts, shards=shards)
        state, tally = segment(algorithm, kind, Layout(), False)(hp, state, key, span)
        assert tally.rounds == 1
        losses.append(float(tally.loss))
    assert_same(result.state, state.state)
    means = [np.mean(losses[first:last]) for first, last in ((0, 3), (3, 6), (6, 8))]
    np.testing.assert_allclose([row["train_loss"] for row in result.history[1:]], means, rtol=1e-6)


def test_stabilise_as_a_share_and_as_a_number():
    share, number = run(stabilise=LAST / ROUNDS), run(stabilise=LAST)
    assert_same(share.state, number.state)
    assert str(share.history) == str(number.history)
    assert str(run(stabilise=0).history) != str(number.history)


@pytest.mark.usefixtures("x64")
def test_all_clients_with_all_data_is_gradient_descent():
    # W <- W - lr 2 X'(X W - Y) / (2 N) for the pooled examples: two outputs share an error's mean.
    result = run("fedavg", stabilise=ROUNDS, cohort=len(CLIENTS), client_lr=0.3, server_lr=0.5)
    x, y = (np.concatenate(parts) for parts in zip(*CLIENTS, strict=True))
    w = np.asarray(MODEL.init(random.fold_in(random.key(0), 0))["w"])
    for _ in range(ROUNDS):
        w = w - 0.3 * 0.5 * x.T @ (x @ w - y) / len(x)
    np.testing.assert_allclose(result.params["w"], w, rtol=1e-12)


@pytest.mark.usefixtures("x64")
def test_two_devices_change_only_rounding_and_compile_once(compilations):
    plain = run()
    compilations.clear()
    spread = run(devices=2, chunk=1)
    assert compilations.count("jit(segment)") == 2  # mini-batches and all data
    run(devices=2, chunk=1, seed=1, client_lr=0.2)
    assert compilations.count("jit(segment)") == 2
    for one, other in zip(jax.tree.leaves(plain.state), jax.tree.leaves(spread.state), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12)


# ------------------------------------------------------------------- many models in one process


def test_programs_of_models_that_are_no_longer_used_are_freed(monkeypatch):
    # Of one model: one to begin, one to train, and one to evaluate.
    @lru_cache(maxsize=2 * 3)
    def program(function, donated, *fixed):
        return jax.jit(partial(function, *fixed), donate_argnames=donated)

    monkeypatch.setattr(simulator, "_program", program)
    client = jax.local_devices()[0].client
    alive, models = [], []
    for _, model in train_new_models(4):
        alive.append(len(client.live_executables()))
        models.append(model)
    assert alive[2] == alive[3], "as many programs are freed as are compiled"
    assert [model() is None for model in models] == [True, True, False, False]


MANY_MODELS = """
import sys
sys.path.insert(0, "tests")
from pathlib import Path
from helpers.new_models import train_new_models

most = 0
for number, _ in train_new_models(150):
    most = max(most, Path("/proc/self/maps").read_bytes().count(b"\\n"))
    if number == 99:
        after_100 = most
print(after_100, most)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="the limit is of Linux")
def test_a_process_trains_any_number_of_models():
    """Linux would end it with a segmentation fault when it has 65,530 memory maps."""
    done = subprocess.run(
        [sys.executable, "-c", MANY_MODELS],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    after_100, most = map(int, done.stdout.split())
    assert most < 40_000
    assert most < 1.2 * after_100, "there are no more of them"


# --------------------------------------------------------------------------- runs that go on


@pytest.mark.parametrize("seeds", [[2], [2, 4]], ids=["one", "several together"])
def test_a_run_continues_from_any_evaluation(seeds):
    setup, hyper = api.prepare(ADAM, MODEL, CLIENTS, squared_error, **SETTINGS)
    hp = api.traced(hyper, MODEL)
    if len(seeds) > 1:
        hp = jax.tree.map(lambda value: jnp.stack([value, 2 * value / 3]), hp)
    rows, runs = [], []
    for evaluation in train(setup, hp, seeds):
        assert evaluation.round == evaluation.row["round"]
        rows.append(evaluation.row)
        runs.append(jax.tree.map(np.array, evaluation.run))  # a copy, for its memory is reused
    assert [row["round"] for row in rows] == [0, 3, 6, 8]
    for number, row in enumerate(rows):
        run = jax.tree.map(jnp.asarray, runs[number])
        later = list(train(setup, hp, seeds, first=row["round"], run=run))
        assert str([evaluation.row for evaluation in later]) == str(rows[number + 1 :])
        if later:
            assert_same(later[-1].run, runs[-1])


@pytest.mark.parametrize(
    ("name", "memory_gb"), [(ADAM, 4.0), ("scaffold", 4.0), ("scaffold", 1e-9)], ids=str
)
def test_calls_that_go_on_come_to_what_one_long_call_does(name, memory_gb, compilations):
    """Kept in a file between them, and with nothing compiled anew."""
    settings = {"memory_gb": memory_gb, "seed": 6}
    whole = run(name, **settings)
    compilations.clear()
    part = run(name, rounds=3, stabilise=0, **settings)
    before = pickle.dumps(part)
    two = run(name, rounds=5, start=pickle.loads(before), **settings)
    assert str(two.history) == str(whole.history)
    assert_same(two.state, whole.state)
    assert_same(jax.tree.leaves(two.memory), jax.tree.leaves(whole.memory))
    assert jax.tree.leaves(whole.memory) or name == ADAM, "SCAFFOLD's clients keep something"
    assert "jit(segment)" not in compilations
    heard = []
    again = run(name, rounds=5, start=part, on_evaluation=heard.append, **settings)
    assert_same(again.state, whole.state)
    assert str(heard) == str(whole.history[2:]), "only what is new is told"
    assert_same(part.state, pickle.loads(before).state)  # a start is left as it was
    assert_same(*map(jax.tree.leaves, (part.memory, pickle.loads(before).memory)))
    assert [row["round"] for row in part.history] == [0, 3]


def test_a_stopped_run_goes_on_with_its_totals():
    """A round of two clients sends less than one of five; uploads left out stay counted."""
    damaged = [*CLIENTS[:-1], (np.full((6, 3), 1e38), CLIENTS[-1][1])]
    settings = SETTINGS | {"stabilise": 0, "cohort": 5}
    part = fedda.run("fedavg", MODEL, damaged, squared_error, **settings)
    assert part.history[-1]["nonfinite_clients"] == ROUNDS
    more = fedda.run(
        "fedavg", MODEL, CLIENTS, squared_error, **(settings | {"cohort": 2}), start=part
    )
    last, first = more.history[-1], part.history[-1]
    assert (last["round"], last["nonfinite_clients"]) == (2 * ROUNDS, ROUNDS)
    alone = run("fedavg", cohort=2).history[-1]
    for name in ("bytes_down", "bytes_up"):
        assert last[name] == first[name] + alone[name]


def test_parameters_of_ones_own_are_where_a_run_begins():
    params = {"w": np.full((3, 2), 0.25, np.float32)}
    own = MODEL._replace(init=lambda key: params)
    result = fedda.run("fedavg", own, CLIENTS, squared_error, **SETTINGS)
    errors = TEST[0] @ params["w"] - TEST[1]
    np.testing.assert_allclose(result.history[0]["loss"], (errors**2).mean(), rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"start": {"w": 1}}, "start must be the result of an earlier run, got dict. To begin"),
        ({"name": ADAM}, "in it .state.momentum['w'] is absent, here float32[3, 2]"),
        ({"name": "scaffold"}, "in it .state.control['w'] is absent, here float32[3, 2]"),
    ],
    ids=str,
)
def test_what_a_run_cannot_go_on_from(settings, message):
    given = {"name": "fedavg", "start": run("fedavg")} | settings
    with pytest.raises(InputError, match=re.escape(message)):
        run(**given)


def test_memory_on_the_device_does_not_go_on_where_it_is_kept_on_the_host():
    with pytest.raises(InputError, match=r"start is of another .* memory_gb.* in it \.memory"):
        run("scaffold", start=run("scaffold"), memory_gb=1e-9)


def test_a_point_of_a_grid_goes_on_if_its_clients_keep_nothing():
    def best(name):
        grid = {"client_lr": [0.1, 0.2]}
        return fedda.run_grid(name, MODEL, CLIENTS, squared_error, grid=grid, **SETTINGS)[1].result

    more = run("fedavg", client_lr=0.2, start=best("fedavg"))
    assert [row["round"] for row in more.history] == [0, 3, 6, 8, 9, 12, 15, 16]
    message = "in it .memory['w'] is absent, here float32[5, 3, 2]"
    with pytest.raises(InputError, match=re.escape(message)):
        run("scaffold", start=best("scaffold"))


def test_run_grid_gives_every_combination_in_order():
    grid, seeds = {"client_lr": [0.1, 0.2], "mu": [0.0, 0.5]}, (4, 1)
    points = fedda.run_grid(ADAM, MODEL, CLIENTS, squared_error, grid=grid, seeds=seeds, **SETTINGS)
    expected = [
        ({"client_lr": rate, "mu": mu}, seed)
        for rate in grid["client_lr"]
        for mu in grid["mu"]
        for seed in seeds
    ]
    assert [(point.hyper, point.seed) for point in points] == expected
    for point in points:
        assert [row["round"] for row in point.result.history] == [0, 3, 6, 8]
        for row in point.result.history:
            assert {type(value) for value in row.values()} == {int, float}
        assert point.result.params["w"].shape == (3, 2)
        loss = float(np.mean((TEST[0] @ np.asarray(point.result.params["w"]) - TEST[1]) ** 2))
        np.testing.assert_allclose(point.result.history[-1]["loss"], loss, rtol=1e-5)
    assert len({point.result.history[-1]["loss"] for point in points}) == len(points)


@pytest.mark.usefixtures("x64")
def test_the_training_metric_is_that_of_local_batches_before_each_step():
    """FedAvg by hand: every client's share of answers that are right, over rounds of the cohort."""
    rng = np.random.default_rng(4)
    sizes, plan, rounds = (7, 12, 4), Plan(5, 2, "epochs"), 3
    clients = [(rng.normal(size=(n, 3)), rng.integers(0, 4, size=n)) for n in sizes]
    model = fedda.Model(lambda key: random.normal(key, (3, 4)), lambda w, x: x @ w)
    setup, hyper = api.prepare(
        "fedavg", model, from_clients(clients), fedda.losses.cross_entropy,
        cohort=3, rounds=rounds, eval_every=1, batch=5, local_work=2, local_unit="epochs",
        client_lr=0.5,
    )  # fmt: skip
    setup = setup._replace(task=setup.task._replace(train_metrics=(fedda.losses.accuracy,)))
    rows = [each.row for each in train(setup, api.traced(hyper, model), [9])]
    assert np.isnan(rows[0]["train_accuracy"])
    key, w = random.key(9), np.asarray(model.init(random.fold_in(random.key(9), 0)))
    drawn = Task(model, fedda.losses.cross_entropy, plan)
    for number in range(rounds):
        own_key = random.fold_in(random.fold_in(random.fold_in(key, 1), number), 0)
        ends, right, visited = [], 0, 0
        for client, (x, y) in enumerate(clients):
            shard = setup.shards.shard(client)
            batches = drawn.batches(shard, random.fold_in(own_key, client))
            own = w.copy()
            for step in range(int(batches.steps)):
                batch = batches.at(step)
                chosen = np.asarray(batch.rows)[np.asarray(batch.mask)]
                scores, labels = x[chosen] @ own, y[chosen]
                right += (scores.argmax(axis=1) == labels).sum()
                visited += len(labels)
                odds = np.exp(scores - scores.max(axis=1, keepdims=True))
                odds /= odds.sum(axis=1, keepdims=True)
                own -= 0.5 * x[chosen].T @ (odds - np.eye(4)[labels]) / len(labels)
            ends.append(own)
        w = np.average(ends, axis=0, weights=sizes)
        assert rows[number + 1]["train_accuracy"] == pytest.approx(right / visited, abs=1e-12)
    assert len({row["train_accuracy"] for row in rows[1:]}) == rounds, "it moves"
