"""Every algorithm against a reference in NumPy, written from the equations and nothing else.

The references are loops over lists in the notation of the papers: W, m, P, S, G, V are matrices,
eta is the client's and alpha the server's learning rate. They solve softmax regression, whose
gradient is one line (`problems.mean_gradient`). The sections are those of the specification.
"""

import itertools

import jax
import numpy as np
import pytest

import fedda
from fedda import algorithms
from fedda.data.federation import from_clients
from helpers.problems import (
    BATCH,
    CLASSIFIED,
    SIZES,
    W0,
    drawn,
    losses_of,
    matrix,
    mean_gradient,
    softmax,
)

pytestmark = pytest.mark.usefixtures("x64")
PROVES = ("fedavg", "fedprox", "fedda-sgdm", "fedda-adam", "fedda-adagrad")


def fedavg(draws, W, *, client_lr, server_lr, mu=0.0):
    """B.1, and with mu > 0 FedProx, B.10."""
    train_losses = []
    for visits in draws:
        total, delta, losses = sum(N for N, _ in visits), 0 * W, []
        for N, batches in visits:
            y = W
            for x, labels, factor in batches:
                losses.extend(losses_of(y, x, labels))
                g = factor * mean_gradient(y, x, labels)
                y = y - client_lr * (g + mu * (y - W))
            delta = delta + N / total * (y - W)
        W = W + server_lr * delta
        train_losses.append(np.mean(losses))
    return {"params": W}, train_losses


def fedda_client(W_r, m_r, batches, eta, beta1, mu):
    """A.0 with A.4; S is the plain sum of the gradients."""
    W, m, P, S, losses = W_r, m_r, 0 * m_r, 0 * m_r, []
    for x, y, factor in batches:
        losses.extend(losses_of(W, x, y))
        g = factor * mean_gradient(W, x, y) + mu * (W - W_r)
        W = W - eta * g
        m = beta1 * m + (1 - beta1) * g
        P = P + m
        S = S + g
    return P, m, S, losses


def fedda_rounds(
    step, draws, W, *, client_lr, server_lr, beta1, mu=0.0, sends="both", momentum="kept",
    beta1_per="step", **options,
):  # fmt: skip
    """A.0; `step` is a server step. c is A.8-14's: P, a step, had all gradients been 1.

    Whether the server `sends` its momentum, or adds later what that would have done (A.7), is a
    matter of messages: the numbers are the same. With beta1 per round, a client with T steps has
    beta1^(1/T), and the server beta1^(1/mean T), by which it computes P from S and m (A.7).
    """
    per_round = beta1_per == "round"
    m, V, r, m_ones, train_losses = 0 * W, 0 * W, 0, 0.0, []
    for visits in draws:
        total, P, S, m_next, losses = sum(N for N, _ in visits), 0 * W, 0 * W, 0 * W, []
        T, P_ones, m_ones_next = 0.0, 0.0, 0.0
        if total == 0:  # the weights are 0/0, so nothing happens, not even a step of r
            train_losses.append(np.nan)
            continue
        for N, batches in visits:
            beta = beta1 ** (1 / max(1, len(batches))) if per_round else beta1
            P_i, m_i, S_i, losses_i = fedda_client(W, m, batches, client_lr, beta, mu)
            P, m_next, S = P + N / total * P_i, m_next + N / total * m_i, S + N / total * S_i
            T, losses = T + N / total * len(batches), losses + losses_i
            one = m_ones
            for _ in batches:
                one = beta * one + (1 - beta) * 1
                P_ones = P_ones + N / total * one
            m_ones_next = m_ones_next + N / total * one
        beta = beta1 ** (1 / T) if per_round else beta1
        if per_round:
            P = S + beta / (1 - beta) * (m - m_next)
            P_ones = T + beta / (1 - beta) * (m_ones - m_ones_next)
        if per_round and step is adam:
            options = options | {"unbiased": beta1}
        W, V = step(W, m, V, P, S, r, P_ones / T, client_lr, server_lr, beta, **options)
        m, r, m_ones = m_next, r + 1, m_ones_next
        if momentum == "restarted":  # F12
            m, m_ones = 0 * W, 0.0
        train_losses.append(np.mean(losses))
    return {"params": W, "momentum": m, "second": V}, train_losses


def sgdm(W, m, V, P, S, r, c, eta, alpha, beta1):
    """A.1."""
    return W - alpha * eta * P, V


def adagrad(W, m, V, P, S, r, c, eta, alpha, beta1, eps, units="grad", gradient="momentum"):
    """A.3, with the options of A.8-7 and A.8-13."""
    G = (P - beta1 * m) / (1 - beta1) if gradient == "momentum" else S
    V = V + G**2
    s, e = (alpha * eta, eps) if units == "grad" else (alpha, eps / eta)
    return W - s * G / (np.sqrt(V) + e), V


def adam(
    W, m, V, P, S, r, c, eta, alpha, beta1, beta2, eps, units="grad", gradient="momentum",
    bias="rounds", unbiased=None,
):  # fmt: skip
    """A.2, with the options of A.8-7, A.8-13 and A.8-14. `unbiased` is beta1 per round."""
    G = (P - beta1 * m) / (1 - beta1) if gradient == "momentum" else S
    V = beta2 * V + (1 - beta2) * G**2
    m_hat = P / (1 - (unbiased or beta1) ** (r + 1)) if bias == "rounds" else P / c
    V_hat = V / (1 - beta2 ** (r + 1))
    s, e = (alpha * eta, eps) if units == "grad" else (alpha, eps / eta)
    return W - s * m_hat / (np.sqrt(V_hat) + e), V


def fedda_with(step):
    return lambda draws, W, **settings: fedda_rounds(step, draws, W, **settings)


REFERENCES = {
    "fedavg": fedavg,
    "fedprox": fedavg,
    "fedda-sgdm": fedda_with(sgdm),
    "fedda-adam": fedda_with(adam),
    "fedda-adagrad": fedda_with(adagrad),
}
HYPER = {
    "fedavg": {"client_lr": 0.3, "server_lr": 0.7},
    "fedprox": {"client_lr": 0.3, "server_lr": 0.7, "mu": 0.5},
    "fedda-sgdm": {"client_lr": 0.3, "server_lr": 0.7, "beta1": 0.8},
    "fedda-adam": {"client_lr": 0.3, "server_lr": 0.4, "beta1": 0.8, "beta2": 0.9, "eps": 0.05},
    "fedda-adagrad": {"client_lr": 0.3, "server_lr": 0.4, "beta1": 0.8, "eps": 0.05},
}
# In models: what goes down and up; and in numbers besides, N_i and, if sent, T_i and beta1^T_i.
MODELS = {name: 1 if name in ("fedavg", "fedprox") else 2 for name in REFERENCES}

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
    expected, train_losses = REFERENCES[name](drawn(**work), W0, **options)
    assert set(result.state._fields) - {"rounds", "unfilled"} == set(expected)
    for field, value in expected.items():
        tree = getattr(result.state, field)
        if tree != ():  # SGDM has no V
            np.testing.assert_allclose(matrix(tree), value, err_msg=field, **TOLERANCE)

    at = [row["round"] for row in result.history]
    assert at == [*range(0, rounds, EVAL_EVERY), rounds]
    means = [np.nan] + [np.nanmean(train_losses[a:b]) for a, b in itertools.pairwise(at)]
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


def variants(parity):
    """Every algorithm with those of its options of which an even or an odd number is changed.

    So each combination is in one of two tests, and each value of an option is in both. Of five
    options half the combinations are left out, and of six three quarters: each pair of values is
    still in one of the tests.
    """
    found = []
    for name in REFERENCES:
        choices = algorithms.options(name)
        for values in itertools.product(*choices.values()):
            changed = [choices[key].index(v) > 0 for key, v in zip(choices, values, strict=True)]
            left_out = len(changed) > 4 and sum((*changed[:2], changed[-1])) % 2 == 1
            left_out |= len(changed) > 5 and sum((changed[0], changed[2], changed[4])) % 2 == 1
            if not choices or (sum(changed) % 2 == parity and not left_out):
                options = HYPER[name] | dict(zip(choices, values, strict=True))
                found.append(pytest.param(name, options, id="-".join((name, *values))))
    return pytest.mark.parametrize(("name", "options"), found)


def test_the_draws_hold_what_the_comparisons_are_for():
    """Clients with many, one and no examples in every part of the run, and short last batches."""
    draws = drawn(seed=SEED, rounds=ROUNDS, cohort=COHORT, stabilise=2, **EPOCHS)
    assert all(len(visits) == COHORT < len(SIZES) for visits in draws)
    for part in (draws[:-2], draws[-2:]):
        assert {0, 1, max(SIZES)} <= {N for visits in part for N, _ in visits}
    short = set()
    for N, batches in itertools.chain(*draws[:-2]):
        sizes = [len(x) for x, _, _ in batches]
        assert sum(sizes) == 2 * N
        assert sizes[:-1] == [BATCH] * (len(sizes) - 1)
        short |= set(sizes[-1:])
    assert len(short) > 1


@variants(parity=0)
def test_epochs(name, options):
    """With a proximal term, and FedDA's m, P, V of clients with unequal numbers of steps."""
    check(name, options | ({} if name == "fedavg" else {"mu": 0.5}), **EPOCHS)


@pytest.mark.usefixtures("quickly")  # each value of an option is in the test above, too
@variants(parity=1)
def test_steps_on_sums_then_full_batches(name, options):
    """The optimiser's state is carried through the switch, and the gradient keeps its scale."""
    check(name, options | {"client_lr": 0.08}, reduction="sum", stabilise=2, **STEPS)


def test_a_round_in_which_nobody_has_examples_never_happened():
    """Neither V nor the exponent r moves: one more would show in both corrections."""
    work = {"cohort": 1, "seed": 32, "rounds": ROUNDS, **EPOCHS}
    silent = [r for r, [(N, _)] in enumerate(drawn(**work)) if N == 0]
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


def adam_with_exponent_r(W, m, V, P, S, r, c, eta, alpha, beta1, beta2, eps):
    """A.8-1 as printed."""
    V = beta2 * V + (1 - beta2) * ((P - beta1 * m) / (1 - beta1)) ** 2
    with np.errstate(divide="ignore", invalid="ignore"):
        m_hat, V_hat = P / (1 - beta1**r), V / (1 - beta2**r)
        return W - alpha * eta * m_hat / (np.sqrt(V_hat) + eps), V


def adam_with_exponent_r_from_the_second_round(W, m, V, P, S, r, *rest, **options):
    """A.8-1 as one might repair it."""
    return adam(W, m, V, P, S, max(r - 1, 0), *rest, **options)


def adam_without_hat(W, m, V, P, S, r, c, eta, alpha, beta1, beta2, eps):
    """A.8-2 as printed in the algorithm: the root of V."""
    V = beta2 * V + (1 - beta2) * ((P - beta1 * m) / (1 - beta1)) ** 2
    return W - alpha * eta * P / (1 - beta1 ** (r + 1)) / (np.sqrt(V) + eps), V


def adam_with_hat_of_the_old(W, m, V, P, S, r, c, eta, alpha, beta1, beta2, eps):
    """A.8-2 as printed in the text: the corrected V of before this round."""
    V_hat = V / (1 - beta2 ** (r + 1))
    V = beta2 * V + (1 - beta2) * ((P - beta1 * m) / (1 - beta1)) ** 2
    return W - alpha * eta * P / (1 - beta1 ** (r + 1)) / (np.sqrt(V_hat) + eps), V


def sgdm_with_eta_twice(W, m, V, P, S, r, c, eta, alpha, beta1):
    """A.8-5: in the momentum and in the server's step."""
    return W - alpha * eta**2 * P, V


@pytest.mark.parametrize(
    ("name", "misread"),
    [
        ("fedda-adam", adam_with_exponent_r),
        ("fedda-adam", adam_with_exponent_r_from_the_second_round),
        ("fedda-adam", adam_without_hat),
        ("fedda-adam", adam_with_hat_of_the_old),
        ("fedda-sgdm", sgdm_with_eta_twice),
    ],
)
def test_a_misreading_would_be_noticed(name, misread):
    """By more than ten orders of magnitude above the tolerance."""
    defaults = {key: choices[0] for key, choices in algorithms.options(name).items()}
    right = matrix(run(name, HYPER[name] | defaults, **EPOCHS).params)
    draws = drawn(seed=SEED, rounds=ROUNDS, cohort=COHORT, **EPOCHS)
    wrong = fedda_rounds(misread, draws, W0, **HYPER[name])[0]["params"]
    difference = np.abs(wrong - right).max()
    assert np.isnan(difference) if misread is adam_with_exponent_r else difference > 0.01
