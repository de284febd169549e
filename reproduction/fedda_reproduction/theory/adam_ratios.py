"""F13: the entries of m-hat / sqrt(v-hat) in FedDA+Adam, which should be about 1 or -1.

As in `fedda.algorithms.fedda`, P is the sum of a round's T momenta, M the momentum before it, and

    G     = (P - beta1 M) / (1 - beta1)      V     <- beta2 V + (1 - beta2) G²
    m-hat = P / (1 - beta1^(r+1))            v-hat  = V / (1 - beta2^(r+1))

M is one momentum, but P is a sum of T. So the larger T is, the nearer G is to P / (1 - beta1); and
late in a run, when nothing is left to correct, m-hat / sqrt(v-hat) is 1 - beta1 times P over the
root of the mean of its last squares, about 1 / (1 - beta2) of them. For two kinds of gradients the
scale is known at every T. If g is the same in every step, then P = T g and M = g, and

    G = (T - beta1) / (1 - beta1) g          |P| / |G| = T (1 - beta1) / (T - beta1)

If it is white noise of variance 1, then E M² = (1 - beta1) / (1 + beta1) and, by m's recursion,

    P              = beta1 (1 - beta1^T) / (1 - beta1) M     + sum_k (1 - beta1^k) g_k,  k = 1 .. T
    (1 - beta1) G  = beta1 (beta1 - beta1^T) / (1 - beta1) M + the same sum

where the terms are independent, so that E P² / E G² is known. With beta1 = 0.9 the two are 1 and
0.23 for T = 1, 0.122 and 0.117 for T = 5, and both tend to 1 - beta1 = 0.1. An entry of m-hat /
sqrt(v-hat) is smaller than that if its gradients shrink or are rare: V remembers large ones longer
than P does.
"""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import random

from fedda.core import losses
from fedda.data import digits, partition
from fedda.data.federation import from_partition
from fedda.models import Model, mlp
from fedda_reproduction.theory.fits import Floats
from fedda_reproduction.theory.identities import server_states
from fedda_reproduction.theory.problems import digit_clients, flattened

BETA1, BETA2 = 0.9, 0.99
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
NEAR = (0.5, 2.0)  # sizes that count as about 1


PAPER, SMALL = "the paper's", "small eps"
# The first are of its table of hyper-parameters, for Adam on EMNIST. Their eps is far larger than
# most of sqrt(v-hat), so that little is normalised and training is slow.
RATES: Mapping[str, dict[str, float]] = {
    PAPER: {"client_lr": 0.1, "server_lr": 0.1, "eps": 0.1},
    SMALL: {"client_lr": 0.1, "server_lr": 0.1, "eps": 0.001},
}
EVERYBODY, COHORTS = "everybody", "cohorts"


def constant_scale(T: int, beta1: float = BETA1) -> float:
    """Return |P| / |G| if all gradients are the same."""
    return T * (1 - beta1) / (T - beta1)


def noise_scale(T: int, beta1: float = BETA1) -> float:
    """Return the root of E P² / E G² if gradients are white noise."""
    of_momentum = (1 - beta1) / (1 + beta1)
    of_round = np.square(1 - beta1 ** np.arange(1, T + 1)).sum()
    P = np.square(beta1 * (1 - beta1**T) / (1 - beta1)) * of_momentum + of_round
    G = np.square(beta1 * (beta1 - beta1**T) / (1 - beta1)) * of_momentum + of_round
    return float((1 - beta1) * np.sqrt(P / G))


class Round(NamedTuple):
    """The server's variables in one round, one number per parameter; or stacked over rounds."""

    m_hat: Floats
    root: Floats  # sqrt(v-hat)
    P: Floats
    G: Floats


def rounds_of(
    model: Model, clients: Any, loss: Any, rates: Mapping[str, float], **settings: Any
) -> Iterator[Round]:
    """Yield the rounds of FedDA+Adam, as the library runs it.

    The model's parameters are one vector. V, M and r are in the server's state. m-hat follows from
    the server's step, server_lr client_lr m-hat / (sqrt(v-hat) + eps).
    """
    settings |= {"beta1": BETA1, "beta2": BETA2, **rates}
    states = server_states("fedda-adam", model, clients, loss, **settings)
    for before, after in itertools.pairwise(states):
        root = np.sqrt(after.second / (1 - BETA2**after.rounds))
        moved = (before.params - after.params) / (rates["server_lr"] * rates["client_lr"])
        m_hat = moved * (root + rates["eps"])
        P = m_hat * (1 - BETA1**after.rounds)
        G = (P - BETA1 * before.momentum) / (1 - BETA1)
        yield Round(m_hat=m_hat, root=root, P=P, G=G)


def ratios(m_hat: Floats, root: Floats) -> Floats:
    """Return |m-hat| / sqrt(v-hat) of the entries with V > 0, as one row.

    V = 0 if an entry's gradient was zero in every step since the start, for example that of a pixel
    which is blank whenever the unit is active. Its step is 0 / eps.
    """
    alive = root > 0
    return np.abs(m_hat[alive]) / root[alive]


def summary(late: Round) -> dict[str, Any]:
    """Summarise a run's late rounds, [rounds, entries] each.

    `scale` is the root of the sums over time of P² and G² of the median entry, which the
    predictions are about.
    """
    sizes = ratios(late.m_hat, late.root)
    alive = late.root[-1] > 0
    P, G = (np.sqrt(np.square(values[:, alive]).mean(0)) for values in (late.P, late.G))
    return {
        "quantiles": np.quantile(sizes, QUANTILES),
        "mean": sizes.mean(),
        "near": np.mean((sizes >= NEAR[0]) & (sizes <= NEAR[1])),
        "scale": np.median(P[G > 0] / G[G > 0]),
        "V = 0": 1 - alive.mean(),
    }


def federation(name: str, seed: int) -> tuple[Any, dict[str, int]]:
    """Return clients with digits, and their cohort and batch size.

    `EVERYBODY` trains with full batches, and T = 1 is centralised Adam. `COHORTS` is the digits
    task with its default settings.
    """
    if name == EVERYBODY:
        return digit_clients(10, 40, seed), {"cohort": 10, "batch": 40}
    data = digits.load()
    rows = partition.dirichlet(data.train_y, 100, 0.3, 0)
    clients = from_partition(data.train_x / 16.0, data.train_y, rows)
    return clients, {"cohort": 10, "batch": 10}


def measure(steps: Sequence[int], rounds: int, seed: int) -> dict[str, Any]:
    """Measure a perceptron's ratios over the second half of the rounds, for every T in `steps`."""
    model = flattened(mlp(64, 64, digits.NUM_CLASSES), seed)
    shown = np.unique(np.geomspace(1, rounds, 40).round().astype(int))
    grid, curves = [], []
    for name, T in itertools.product((EVERYBODY, COHORTS), steps):
        clients, settings = federation(name, seed)
        settings |= {"seed": seed, "rounds": rounds, "local_work": T}
        for label, rates in RATES.items():
            run = rounds_of(model, clients, losses.cross_entropy, rates, **settings)
            every = Round(*(np.stack(values) for values in zip(*run, strict=True)))
            late = Round(*(values[rounds // 2 :] for values in every))
            setting: dict[str, Any] = {"clients": name, "rates": label, "T": T}
            predicted = {"constant": constant_scale(T), "noise": noise_scale(T)}
            grid.append(setting | rates | predicted | summary(late))
            medians = [np.median(ratios(every.m_hat[r - 1], every.root[r - 1])) for r in shown]
            curves.append(setting | {"medians": medians})
    return {
        "parameters": model.init(random.key(0)).size,
        "grid": grid,
        "curves": {"round": shown, "rows": curves},
    }
