"""FedProx's synthetic federation: clients differ in their inputs and in their labelling rule.

Li et al. (2020), "Federated optimization in heterogeneous networks", section 5.1. The paper writes
N(0, alpha) and N(0, beta), where alpha and beta look like variances. The authors' program uses them
as standard deviations, and so does this module, because the paper's results are made with this
program. The two differ only if a value is neither 0 nor 1, as in synthetic(0.5, 0.5).
"""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fedda.errors import InputError, check_whole_number

NUM_FEATURES = 60
NUM_CLASSES = 10

Floats = npt.NDArray[np.float64]
Examples = tuple[npt.NDArray[np.float32], npt.NDArray[np.int32]]  # [n, features], [n] labels


class Synthetic(NamedTuple):
    train: list[Examples]  # of each client
    test_x: npt.NDArray[np.float32]  # of all clients, in order
    test_y: npt.NDArray[np.int32]
    weights: Floats  # [clients, features, classes]: a client's label is argmax(x @ weights + bias)
    biases: Floats  # [clients, classes]


def generate(
    alpha: float, beta: float, clients: int = 30, seed: int = 0, iid: bool = False
) -> Synthetic:
    """Return the data set synthetic(alpha, beta).

    Args:
        alpha: How much the labelling rules of clients differ.
        beta: How much the inputs of clients differ.
        clients: The number of clients.
        seed: The seed of the random numbers.
        iid: Whether all clients have the same rule and the same distribution of inputs. Even with
            alpha = beta = 0, each client has another rule and another mean otherwise.
    """
    _check(alpha, beta, clients, seed, iid)
    # NumPy never changes the stream of RandomState. The draws are in the order of the published
    # programs, so with the same seed of NumPy's global state these return the same examples.
    rng = np.random.RandomState(seed)
    sizes = rng.lognormal(4, 2, clients).astype(int) + 50
    if iid:
        means = np.zeros((clients, NUM_FEATURES))
        common = _draw_rule(rng, 0.0)
    else:
        rule_means = rng.normal(0, alpha, clients)
        centres = rng.normal(0, beta, clients)
        means = rng.normal(centres[:, None], 1, (clients, NUM_FEATURES))
    deviations = np.arange(1, NUM_FEATURES + 1) ** (-1.2 / 2)

    train, test, rules = [], [], []
    for client, size in enumerate(sizes):
        weights, bias = common if iid else _draw_rule(rng, rule_means[client])
        noise = rng.standard_normal((size, NUM_FEATURES))
        x = (means[client] + deviations * noise).astype(np.float32)
        # Computed from the rounded inputs, so that the rule holds for the returned data. Softmax is
        # left out, because it does not change the largest value.
        y = np.argmax(x.astype(np.float64) @ weights + bias, axis=1).astype(np.int32)
        kept = int(0.9 * size)  # the rows are already in random order
        train.append((x[:kept], y[:kept]))
        test.append((x[kept:], y[kept:]))
        rules.append((weights, bias))
    return Synthetic(
        train,
        np.concatenate([x for x, _ in test]),
        np.concatenate([y for _, y in test]),
        np.stack([weights for weights, _ in rules]),
        np.stack([bias for _, bias in rules]),
    )


def _draw_rule(rng: np.random.RandomState, mean: float) -> tuple[Floats, Floats]:
    return rng.normal(mean, 1, (NUM_FEATURES, NUM_CLASSES)), rng.normal(mean, 1, NUM_CLASSES)


def _check(alpha: float, beta: float, clients: int, seed: int, iid: bool) -> None:
    for name, value in (("alpha", alpha), ("beta", beta)):
        if not 0 <= value < math.inf:
            raise InputError(f"{name} must be a finite number, 0 or more, got {value!r}.")
        if iid and value:
            raise InputError(f"{name} must be 0 if iid is true, got {value!r}.")
    check_whole_number("clients", clients, 1)
    if not 0 <= seed < 2**32:
        raise InputError(f"seed must be 0 or more and below 2**32, got {seed}.")
