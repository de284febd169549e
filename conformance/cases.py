"""The problem of the vectors, and the settings of each vector."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

SIZES = (13, 1, 6, 9, 4, 2)  # examples of the clients: many, one, and last batches that are short
BATCH, EPOCHS, STEPS = 4, 2, 3
# Client 5 is never visited. Client 2 returns after two rounds without it, client 0 after one.
COHORTS = ((0, 2, 4), (4, 1, 0), (0, 3, 4), (2, 3, 1), (1, 3, 0))
FULL = 2  # rounds at the end of the schedule `full`

SCHEDULES = {
    "epochs": "Two shuffled epochs, cut into batches of 4; the last batch may be short.",
    "full": "Three batches of 4; in the last two rounds, one step with all examples.",
}


def problem() -> dict[str, Any]:
    """Return the content of `problem.json`."""
    rng = np.random.default_rng(2022)
    clients = [
        {
            "x": np.round(rng.normal(0.3 * client - 1, 1, (size, 3)), 3).tolist(),
            "y": rng.integers(0, 3, size).tolist(),
        }
        for client, size in enumerate(SIZES)
    ]
    return {
        "format": 1,
        "model": "softmax regression: scores = [x, 1] W; loss = -log softmax(scores)[y]",
        "batch": BATCH,
        "weights": np.round(rng.normal(0, 0.5, (4, 3)), 3).tolist(),
        "clients": clients,
        "schedules": {
            name: {"description": description, "rounds": rounds(name, rng)}
            for name, description in SCHEDULES.items()
        },
    }


def rounds(name: str, rng: np.random.Generator) -> list[list[dict[str, Any]]]:
    """Return the visits of every round: the clients, and the rows of each of their batches."""
    return [
        [
            {"client": client, "batches": batches(name, number, SIZES[client], rng)}
            for client in cohort
        ]
        for number, cohort in enumerate(COHORTS)
    ]


def batches(name: str, number: int, size: int, rng: np.random.Generator) -> list[list[int]]:
    if name == "full" and number >= len(COHORTS) - FULL:
        return [list(range(size))]
    epochs = EPOCHS if name == "epochs" else -(-STEPS * BATCH // size)
    stream = np.concatenate([rng.permutation(size) for _ in range(epochs)]).tolist()
    cut = [stream[start : start + BATCH] for start in range(0, len(stream), BATCH)]
    return cut if name == "epochs" else cut[:STEPS]


class Case(NamedTuple):
    """The settings of one vector."""

    name: str
    options: Mapping[str, str]
    hyper: Mapping[str, float]
    schedule: str = "epochs"
    reduction: str = "mean"


class Family(NamedTuple):
    """The hyper-parameters of an algorithm, and the values of its options, the default first."""

    hyper: Mapping[str, float]
    options: Mapping[str, Sequence[str]] = {}
    # Hyper-parameters that take the place of `hyper` under one value of an option.
    instead: Mapping[tuple[str, str], Mapping[str, float]] = {}


RATES = {"client_lr": 0.3, "server_lr": 0.7}
ADAPTIVE = {"client_lr": 0.3, "server_lr": 0.4, "beta1": 0.8, "eps": 0.05}
SENDS = {
    "sends": ["both", "model"],
    "beta1_per": ["step", "round"],
    "momentum": ["kept", "restarted"],
}
UNITS = {"units": ["grad", "delta"], "gradient": ["momentum", "sum"]}
SERVER = {"client_lr": 0.3, "server_lr": 0.2, "tau": 0.05}
FEDAVGM = {"client_lr": 0.3, "server_lr": 0.2, "beta1": 0.8}
MOMENTS = {"beta1": 0.8, "beta2": 0.95}
LOCAL = {"client_lr": 0.05, "server_lr": 0.7, "eps": 0.05}
CORRECTION = {"correction": ["joint", "local", "none"]}
DENOMINATOR = {"denominator": ["fresh", "frozen"]}
PAPER = {"form": ["paper", "keras"]}

FAMILIES = {
    "climb": Family(
        # The weights differ from the second round on. In the last, one is 7.7 and two are 0.
        {"client_lr": 0.2, "server_lr": 0.7, "dual_lr": 40.0, "eps": 0.05},
        {"weighting": ["examples", "uniform"]},
    ),
    "fedavg": Family(RATES),
    "fedprox": Family({**RATES, "mu": 0.5}),
    "fedda-sgdm": Family({**RATES, "beta1": 0.8, "mu": 0.1}, SENDS),
    "fedda-adam": Family(
        {**ADAPTIVE, "beta2": 0.9, "mu": 0.1}, {**UNITS, "bias": ["rounds", "steps"], **SENDS}
    ),
    "fedda-adagrad": Family({**ADAPTIVE, "mu": 0.1}, {**UNITS, **SENDS}),
    "fedlin": Family(
        {"client_lr": 0.2, "server_lr": 0.7},
        {"rate": ["step", "total"], "same_batch": ["no", "yes"]},
    ),
    "fedlocal-sgdm": Family({"client_lr": 0.1, "server_lr": 0.7, "beta": 0.8}, CORRECTION),
    "fedlocal-adam": Family({**LOCAL, "beta1": 0.8, "beta2": 0.9}, CORRECTION),
    "fedlocal-adagrad": Family(LOCAL, CORRECTION),
    "fedopt-sgdm": Family(
        FEDAVGM,
        {"form": ["keras", "paper"], "direction": ["momentum", "nesterov", "quasi-hyperbolic"]},
        {("direction", "quasi-hyperbolic"): {**FEDAVGM, "nu": 0.6}},
    ),
    "fedopt-adam": Family({**SERVER, **MOMENTS}, PAPER),
    "fedopt-adagrad": Family(
        SERVER,
        {**PAPER, "server_momentum": ["none", "step", "gradient"]},
        {("server_momentum", kind): {**SERVER, "beta1": 0.8} for kind in ("step", "gradient")},
    ),
    "fedopt-yogi": Family({**SERVER, **MOMENTS}, PAPER),
    "mfl-sgdm": Family({"client_lr": 0.1, "gamma": 0.8}, {"damping": ["off", "on"]}),
    "mfl-adam": Family({"client_lr": 0.1, "beta1": 0.8, "beta2": 0.95, "eps": 0.05}),
    "mfl-adagrad": Family({"client_lr": 0.1, "eps": 0.05}),
    "scaffold": Family(
        {"client_lr": 0.2, "server_lr": 0.7},
        {"control": ["II", "I"], "weighting": ["examples", "uniform"]},
    ),
    "stem": Family(
        {"client_lr": 0.3, "a": 0.2},
        {"schedule": ["constant", "theory"]},
        {("schedule", "theory"): {"kappa": 0.4, "w": 1.5, "sigma2": 0.7, "c": 3.0}},
    ),
}
for method in ("mime", "mimelite"):
    FAMILIES |= {
        f"{method}-sgdm": Family({**RATES, "beta": 0.8}),
        f"{method}-adam": Family({**LOCAL, "beta1": 0.8, "beta2": 0.9}, DENOMINATOR),
        f"{method}-adagrad": Family(LOCAL, DENOMINATOR),
    }


def cases(algorithm: str) -> Iterator[Case]:
    """Yield the cases of an algorithm: its defaults, each other value of an option, and sums.

    The last case changes all options together.
    """
    family = FAMILIES[algorithm]
    default = {option: values[0] for option, values in family.options.items()}
    yield Case("default", default, family.hyper)
    for option, (_, *others) in family.options.items():
        for value in others:
            hyper = family.instead.get((option, value), family.hyper)
            yield Case(f"{option}={value}", {**default, option: value}, hyper)
    # Sums of up to 4 losses, and steps that are shorter in return.
    shorter = {**family.hyper, "client_lr": family.hyper["client_lr"] / 5}
    yield Case("sums", default, shorter, "full", "sum")
    if len(family.options) > 1:
        changed = {option: values[-1] for option, values in family.options.items()}
        replaced = [hyper for key, hyper in family.instead.items() if key in changed.items()]
        yield Case("all options", changed, (replaced or [family.hyper])[0])
