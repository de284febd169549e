"""FedAvg, FedProx and FedDA against their references, on the batches that the library draws.

The references in NumPy are in `conformance/references`. They solve softmax regression, whose
gradient is one line.
"""

import itertools

import jax
import numpy as np
import pytest

import fedda
from conformance import references
from conformance.problem import mean_gradient
from fedda import algorithms
from fedda.data.federation import from_clients
from helpers.problems import (
    BATCH,
    CLASSIFIED,
    SIZES,
    W0,
    drawn,
    matrix,
    softmax,
    train_losses,
)

pytestmark = pytest.mark.usefixtures("x64")
HYPER = {
    "fedavg": {"client_lr": 0.3, "server_lr": 0.7},
    "fedprox": {"client_lr": 0.3, "server_lr": 0.7, "mu": 0.5},
    "fedda-sgdm": {"client_lr": 0.3, "server_lr": 0.7, "beta1": 0.8},
    "fedda-adam": {"client_lr": 0.3, "server_lr": 0.4, "beta1": 0.8, "beta2": 0.9, "eps": 0.05},
    "fedda-adagrad": {"client_lr": 0.3, "server_lr": 0.4, "beta1": 0.8, "eps": 0.05},
}
# In models: what goes down and up; and in numbers besides, N_i and, if sent, T_i and beta1^T_i.
MODELS = {name: 1 if name in ("fedavg", "fedprox") else 2 for name in HYPER}

SEED, ROUNDS, COHORT, EVAL_EVERY = 7, 8, 3, 5  # 5 is neither at the switch nor at the end
EPOCHS = {"local_work": 2, "local_unit": "epochs"}
STEPS = {"local_work": 3, "local_unit": "steps"}

# Numbers of about 1, and squares of up to 250 in V, after some thousand operations: each errs by
# 1.1e-16 of its result, and the signs of these errors are as good as random.
TOLERANCE = {"rtol": 1e-13, "atol": 1e-14}


def run(name, options, *, rounds=ROUNDS, cohort=COHORT, seed=SEED, **settings):
    return fedda.run(
        name, softmax, CLASSIFIED, fedda.losses.cross_entropy, batch=BATCH, eval_every=EVAL_EVERY,
        rounds=rounds, cohort=cohort, seed=seed, **settings, **options,
    )  # fmt: skip


def check(name, options, *, rounds=ROUNDS, cohort=COHORT, seed=SEED, silent=(), **work):
    """The library and the reference agree on state and history; `silent` rounds are skipped."""
    work |= {"rounds": rounds, "cohort": cohort, "seed": seed}
    result = run(name, options, **work)
    visits = drawn(**work)
    *_, expected = references.run(references.REFERENCES[name], W0, visits, **options)
    for field in ("params", "momentum", "second"):
        tree = getattr(result.state, field, ())
        assert (tree != ()) == (field in expected)
        if tree != ():
            np.testing.assert_allclose(matrix(tree), expected[field], err_msg=field, **TOLERANCE)

    at = [row["round"] for row in result.history]
    assert at == [*range(0, rounds, EVAL_EVERY), rounds]
    seen = train_losses(visits)
    means = [np.nan] + [np.nanmean(seen[a:b]) for a, b in itertools.pairwise(at)]
    np.testing.assert_allclose([row["train_loss"] for row in result.history], means, **TOLERANCE)
    model = cohort * 8 * W0.size  # 8 bytes a number
    alone = options.get("sends") == "model"
    down = model * (1 if alone else MODELS[name])
    counted = options.get("bias") == "steps" or options.get("beta1_per") == "round"
    besides = 1 + counted + (alone or options.get("bias") == "steps")
    up = model * MODELS[name] + cohort * 8 * besides
    assert [row["bytes_down"] for row in result.history] == [r * down for r in at]
    assert [row["bytes_up"] for row in result.history] == [r * up for r in at]
    skipped = [sum(r < until for r in silent) for until in at]
    assert [row["skipped_rounds"] for row in result.history] == skipped
    assert {row["nonfinite_clients"] for row in result.history} == {0}


every_name = pytest.mark.parametrize("name", HYPER)


def test_the_draws_hold_what_the_comparisons_are_for():
    """Clients with many, one and no examples in every part of the run, and short last batches."""
    draws = drawn(seed=SEED, rounds=ROUNDS, cohort=COHORT, stabilise=2, **EPOCHS)
    assert all(len(visits) == COHORT < len(SIZES) for visits in draws)
    for part in (draws[:-2], draws[-2:]):
        assert {0, 1, max(SIZES)} <= {visit.examples for visits in part for visit in visits}
    short = set()
    for visit in itertools.chain(*draws[:-2]):
        sizes = [len(batch.x) for batch in visit.batches]
        assert sum(sizes) == 2 * visit.examples
        assert sizes[:-1] == [BATCH] * (len(sizes) - 1)
        short |= set(sizes[-1:])
    assert len(short) > 1


@every_name
def test_epochs(name):
    """With a proximal term, and FedDA's m, P, V of clients with unequal numbers of steps."""
    check(name, HYPER[name] | ({} if name == "fedavg" else {"mu": 0.5}), **EPOCHS)


@every_name
def test_steps_on_sums_then_full_batches(name):
    """The optimiser's state is carried through the switch, and the gradient keeps its scale.

    All options are changed together. The test vectors have each of them by itself.
    """
    changed = {option: values[-1] for option, values in algorithms.options(name).items()}
    rates = HYPER[name] | changed | {"client_lr": 0.08}
    check(name, rates, reduction="sum", stabilise=2, **STEPS)


def test_a_round_in_which_nobody_has_examples_never_happened():
    """Neither V nor the exponent r moves: one more would show in both corrections."""
    work = {"cohort": 1, "seed": 32, "rounds": ROUNDS, **EPOCHS}
    silent = [r for r, [visit] in enumerate(drawn(**work)) if visit.examples == 0]
    assert silent == [2]
    check("fedda-adam", HYPER["fedda-adam"], silent=silent, **work)


def test_a_full_batch_keeps_the_scale_of_a_mini_batch_whatever_the_largest_client():
    """A.5 under `sum`: min(B, N) times the mean, whether or not another client is larger."""
    x, y = CLASSIFIED[3]
    plan = fedda.core.task.Plan(BATCH, unit="full")
    task = fedda.core.task.Task(softmax, fedda.losses.cross_entropy, plan, reduction="sum")
    for others in ([], [CLASSIFIED[0]]):  # max_count is 3, then 13
        shard = from_clients([(x[:3], y[:3]), *others]).shard(0)
        batches = task.batches(shard, jax.random.key(0))
        gradient, _ = jax.jit(task.gradient)(softmax.init(None), batches.at(0))
        expected = 3 * mean_gradient(W0, x[:3], y[:3])
        np.testing.assert_allclose(matrix(gradient), expected, **TOLERANCE)
