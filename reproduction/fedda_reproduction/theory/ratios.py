"""F13: the entries of m-hat / sqrt(v-hat) in FedDA+Adam, which the paper wants to be about 1 or -1.

As in `fedda.algorithms.fedda`, P is the sum of a round's T momenta, M the momentum before it, and

    G     = (P - beta1 M) / (1 - beta1)      V     <- beta2 V + (1 - beta2) G²
    m-hat = P / (1 - beta1^(r+1))            v-hat  = V / (1 - beta2^(r+1))

M is one momentum where P is a sum of T. So the larger T is, the nearer G is to P / (1 - beta1); and
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

import jax
import numpy as np

from fedda import api
from fedda.core import losses
from fedda.data import digits, partition
from fedda.data.federation import from_partition
from fedda.models import Model, mlp
from fedda.simulate import train as simulate
from fedda.tasks import config
from fedda_reproduction.theory.fits import Floats
from fedda_reproduction.theory.problems import dealt, flat

BETA1, BETA2 = 0.9, 0.99
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
NEAR = (0.5, 2.0)  # what is still called about 1


class Rates(NamedTuple):
    client_lr: float
    server_lr: float
    eps: float


PAPER, SMALL = "the paper's", "small eps"
# The first are of its table of hyper-parameters, for Adam on EMNIST. Their eps is far larger than
# most of sqrt(v-hat), so that little is normalised and training is slow.
RATES: Mapping[str, Rates] = {PAPER: Rates(0.1, 0.1, 0.1), SMALL: Rates(0.1, 0.1, 0.001)}
EVERYBODY, COHORTS = "everybody", "cohorts"


def of_constant(T: int, beta1: float = BETA1) -> float:
    """|P| / |G| where all gradients are the same."""
    return T * (1 - beta1) / (T - beta1)


def of_noise(T: int, beta1: float = BETA1) -> float:
    """The root of E P² / E G² where gradients are white noise."""
    of_momentum = (1 - beta1) / (1 + beta1)
    of_round = np.square(1 - beta1 ** np.arange(1, T + 1)).sum()
    P = np.square(beta1 * (1 - beta1**T) / (1 - beta1)) * of_momentum + of_round
    G = np.square(beta1 * (beta1 - beta1**T) / (1 - beta1)) * of_momentum + of_round
    return float((1 - beta1) * np.sqrt(P / G))


class Round(NamedTuple):
    """What the server had in hand in one round: [runs, entries] each."""

    m_hat: Floats
    root: Floats  # sqrt(v-hat)
    P: Floats
    G: Floats
    train_loss: Floats  # [runs]


def rounds_of(
    model: Any, clients: Any, loss: Any, chosen: Sequence[Rates], seed: int, **settings: Any
) -> Iterator[Round]:
    """The rounds of FedDA+Adam, by the library, for two or more rates at once.

    The model's parameters are one vector. V, M and r are in the server's state. m-hat is read off
    its step, server_lr client_lr m-hat / (sqrt(v-hat) + eps): it is what the algorithm had.
    """
    setup, hyper = api.prepare(
        "fedda-adam", model, clients, loss, eval_every=1, beta1=BETA1, beta2=BETA2, **settings
    )
    client_lr, server_lr, eps = np.array(chosen).T
    alike = jax.tree.map(lambda value: np.full(len(chosen), value), hyper)
    hp = alike._replace(client_lr=client_lr, server_lr=server_lr, eps=eps)
    runs = simulate.train(setup, api.traced(hp, model), [seed] * len(chosen))
    seen = ((jax.tree.map(np.array, one.run.state), one.row["train_loss"]) for one in runs)
    for (before, _), (after, train_loss) in itertools.pairwise(seen):
        number = after.rounds[:, None]
        root = np.sqrt(after.second / (1 - BETA2**number))
        moved = (before.params - after.params) / (server_lr * client_lr)[:, None]
        m_hat = moved * (root + eps[:, None])
        P = m_hat * (1 - BETA1**number)
        G = (P - BETA1 * before.momentum) / (1 - BETA1)
        yield Round(m_hat, root, P, G, train_loss)


def ratios(m_hat: Floats, root: Floats) -> Floats:
    """|m-hat| / sqrt(v-hat) of the entries that have one, as one row.

    An entry whose gradient was zero in every step since the start has V = 0, as that of a pixel
    which is blank wherever the unit is active. Its step is 0 / eps, and it has none.
    """
    alive = root > 0
    return np.abs(m_hat[alive]) / root[alive]


def summary(late: Round) -> dict[str, Any]:
    """Of one run's late rounds, [rounds, entries] each.

    The scale is the root of the sums over time of P² and G², by entry: what the predictions are of.
    """
    found = ratios(late.m_hat, late.root)
    alive = late.root[-1] > 0
    P, G = (np.sqrt(np.square(each[:, alive]).mean(0)) for each in (late.P, late.G))
    return {
        "quantiles": np.quantile(found, QUANTILES),
        "mean": found.mean(),
        "near": np.mean((found >= NEAR[0]) & (found <= NEAR[1])),
        "scale": np.median(P[G > 0] / G[G > 0]),
        "V = 0": 1 - alive.mean(),
        "train loss": late.train_loss.mean(),
    }


def federation(name: str, seed: int) -> tuple[Any, dict[str, Any]]:
    """Clients with digits, and how they train.

    Everybody takes part with full batches, and T = 1 is centralised Adam; or cohorts with batches
    do, as the task has them by default.
    """
    if name == EVERYBODY:
        clients, examples = 10, 40
        return dealt(clients, examples, seed), {"cohort": clients, "batch": examples}
    usual, data = config.Config(), digits.load()
    parts = partition.split(
        usual.partition, data.train_y, usual.clients, usual.partition_seed, data.train_coarse
    )
    shards = from_partition(data.train_x / 16.0, data.train_y, parts)
    return shards, {"cohort": usual.cohort, "batch": usual.batch}


def measure(
    federations: Sequence[str], steps: Sequence[int], rounds: int, seed: int
) -> dict[str, Any]:
    """The perceptron's ratios over the second half of the rounds, for every T in `steps`."""
    start, apply = flat(mlp(64, 64, digits.NUM_CLASSES), seed)
    model = Model(lambda key: start, apply)
    shown = np.unique(np.geomspace(1, rounds, 40).round().astype(int))
    grid, curves = [], []
    for name in federations:
        clients, how = federation(name, seed)
        for T in steps:
            how |= {"rounds": rounds, "local_work": T}
            chosen = list(RATES.values())
            followed = rounds_of(model, clients, losses.cross_entropy, chosen, seed, **how)
            every = Round(*(np.stack(each) for each in zip(*followed, strict=True)))
            for index, (label, each) in enumerate(RATES.items()):
                setting = {"clients": name, "rates": label, "T": T}
                run = Round(*(part[:, index] for part in every))
                late = Round(*(part[rounds // 2 :] for part in run))
                grid.append(setting | each._asdict() | summary(late))
                at = [ratios(run.m_hat[number - 1], run.root[number - 1]) for number in shown]
                curves.append(setting | {"medians": [np.median(values) for values in at]})
    return {
        "parameters": start.size,
        "predicted": [{"T": T, "constant": of_constant(T), "noise": of_noise(T)} for T in steps],
        "grid": grid,
        "curves": {"round": shown, "rows": curves},
    }
