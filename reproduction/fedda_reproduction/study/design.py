"""The conditions, the methods and the draws of the study.

All methods are tuned in the same four coordinates, at the same points:

    client_lr   the learning rate of the clients
    step        how far the server moves along a direction of the size of a round's mean change
                (sgdm), or of size 1 in every coordinate (adam, adagrad)
    horizon     1 / (1 - b), where b is the decay of the momentum in a round
    eps         what is added to the root, where a gradient is measured as a change of the model

A method that lacks a coordinate ignores it. `Method.hyper` translates a point into the method's own
settings; the factors are derived in `docs/momentum.md`.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import qmc

from fedda.core.algorithm import Algorithm
from fedda_reproduction.study.fedmoments import FEDMOMENTS

Point = dict[str, float]

LANES = 16  # runs of one program: the draws of a wave, or the seeds and some copies
SEEDS = 10
ADAPTIVE_STEP = 0.01  # the step 1 of the adaptive methods, in units of the axis
BETA2 = 0.99
NU = 0.7  # as Ma and Yarats recommend


class Axis(NamedTuple):
    """The range of a coordinate. It is drawn evenly in its logarithm."""

    low: float
    high: float
    least: float = 0.0  # where the axis ends by its nature: it is not widened beyond
    most: float = np.inf


AXES: Mapping[str, Axis] = {
    "client_lr": Axis(0.01, 1.0),
    "step": Axis(0.3, 30.0),
    "horizon": Axis(1.0, 30.0, least=1.0),
    "eps": Axis(1e-4, 1e-1),
}
WIDENED = 10 ** (2 / 3)  # the factor by which an axis grows beyond a chosen end
NEAR_END = 1 / LANES  # the share of an axis, in logarithms, that counts as its end


class Method(NamedTuple):
    """A method with its options, in the common coordinates."""

    name: str
    label: str
    algorithm: str | Algorithm
    options: Mapping[str, str]
    family: str  # sgdm, adam or adagrad
    fedda: bool = False
    own: bool = False  # an extension of this project
    coordinates: tuple[str, ...] = ("client_lr", "step", "horizon")

    def hyper(self, point: Point, local_steps: int) -> dict[str, float]:
        """Return the method's own settings at a point, with T local steps in a round."""
        b = 1 - 1 / point["horizon"]
        values = {"client_lr": point["client_lr"], "server_lr": point["step"]}
        if "eps" not in self.coordinates:
            values |= {"beta1": b} if "horizon" in self.coordinates else {}
            return values | (
                {"nu": NU} if self.options.get("direction") == "quasi-hyperbolic" else {}
            )
        values["server_lr"] = step = ADAPTIVE_STEP * point["step"]
        if "horizon" in self.coordinates:
            values["beta1"] = b
        if self.family == "adam":
            values["beta2"] = BETA2
        if not self.fedda:
            return values | {"tau": point["eps"]}
        # FedDA's equivalent gradient G is (T - beta) / (1 - beta) mean gradients, and its P is T.
        beta = b ** (1 / local_steps)
        scale = (local_steps - beta) / ((1 - beta) * local_steps)
        values["server_lr"] = step * (scale if self.family == "adam" else 1.0)
        return values | {"eps": point["eps"] * scale}


_ADAPTIVE = ("client_lr", "step", "horizon", "eps")
_FEDDA = {"beta1_per": "round"}
METHODS: Mapping[str, Method] = {
    method.name: method
    for method in (
        Method("fedavg", "FedAvg", "fedavg", {}, "sgdm", coordinates=("client_lr", "step")),
        Method("fedavgm", "FedAvgM", "fedopt-sgdm", {"form": "paper"}, "sgdm"),
        Method(
            "nesterov", "FedAvgM, Nesterov", "fedopt-sgdm",
            {"form": "paper", "direction": "nesterov"}, "sgdm",
        ),
        Method(
            "quasi-hyperbolic", "FedAvgM, quasi-hyperbolic", "fedopt-sgdm",
            {"form": "paper", "direction": "quasi-hyperbolic"}, "sgdm",
        ),
        Method("fedda-sgdm", "FedDA+SGDM", "fedda-sgdm", _FEDDA, "sgdm", fedda=True),
        Method("fedmoments", "FedMoments", FEDMOMENTS, {}, "sgdm", own=True),
        Method(
            "fedadam", "FedAdam", "fedopt-adam", {"form": "keras"}, "adam", coordinates=_ADAPTIVE
        ),
        Method(
            "fedda-adam", "FedDA+Adam", "fedda-adam", {**_FEDDA, "units": "delta"}, "adam",
            fedda=True, coordinates=_ADAPTIVE,
        ),
        Method(
            "fedadagrad", "FedAdagrad", "fedopt-adagrad", {"form": "keras"}, "adagrad",
            coordinates=("client_lr", "step", "eps"),
        ),
        Method(
            "fedadagrad-step", "FedAdagrad, momentum in the step", "fedopt-adagrad",
            {"form": "keras", "server_momentum": "step"}, "adagrad", coordinates=_ADAPTIVE,
        ),
        Method(
            "fedadagrad-gradient", "FedAdagrad, momentum as gradient", "fedopt-adagrad",
            {"form": "keras", "server_momentum": "gradient"}, "adagrad", coordinates=_ADAPTIVE,
        ),
        Method(
            "fedda-adagrad", "FedDA+AdaGrad", "fedda-adagrad", {**_FEDDA, "units": "delta"},
            "adagrad", fedda=True, coordinates=_ADAPTIVE,
        ),
    )
}  # fmt: skip


class Condition(NamedTuple):
    """A task with its factors."""

    task: str  # synthetic, digits, emnist or stackexchange
    variety: str  # of the clients: alpha,beta of synthetic; Dirichlet's alpha of digits
    local_steps: int
    cohort: int
    batch: int
    rounds: int
    confirms: bool = False  # outside of the family of tests

    @property
    def name(self) -> str:
        numbers = f"T{self.local_steps}-C{self.cohort}-B{self.batch}"
        return "-".join(filter(None, [self.task, self.variety.replace(",", "_"), numbers]))


# In the order in which they are run: the most important first. Conditions whose arrays have the
# same shapes follow each other, because they share compiled programs.
CONDITIONS: Sequence[Condition] = (
    *(Condition("digits", alpha, 5, 10, 20, 120) for alpha in ("0.1", "0.3", "inf")),
    *(Condition("synthetic", pair, 5, 10, 10, 120) for pair in ("0,0", "0.5,0.5", "1,1")),
    *(Condition("digits", alpha, 20, 10, 20, 80) for alpha in ("0.1", "inf", "0.3")),
    Condition("emnist", "", 5, 10, 10, 120),
    Condition("digits", "0.1", 5, 10, 5, 120),
    Condition("digits", "0.1", 5, 40, 20, 120),
    Condition("synthetic", "1,1", 20, 10, 10, 80),
    Condition("stackexchange", "", 5, 10, 10, 120, confirms=True),
)
SMALL_CONDITIONS: Sequence[Condition] = (
    Condition("digits", "0.1", 5, 10, 20, 40),
    Condition("digits", "inf", 5, 10, 20, 40),
)
SMALL_METHODS = ("fedavgm", "fedda-sgdm", "fedadagrad-gradient", "fedda-adagrad")


def wave(
    axes: Mapping[str, Axis], number: int, before: Mapping[str, Axis] | None = None
) -> list[Point]:
    """Draw the points of a wave from a scrambled Sobol sequence, the same for all methods.

    Args:
        axes: The ranges.
        number: The number of the wave, which seeds the scrambling.
        before: The ranges of the wave before. Points inside of them are left out.
    """
    sequence = qmc.Sobol(len(axes), scramble=True, seed=number)
    names, ends = list(axes), np.log([[axis.low, axis.high] for axis in axes.values()])
    found: list[Point] = []
    while len(found) < LANES:
        for row in sequence.random(LANES):
            values = np.exp(ends[:, 0] + row * (ends[:, 1] - ends[:, 0]))
            point = {name: float(f"{value:.4g}") for name, value in zip(names, values, strict=True)}
            inside = before is not None and all(
                axis.low <= point[name] <= axis.high for name, axis in before.items()
            )
            if not inside:
                found.append(point)
    return found[:LANES]


def ends(
    point: Point, axes: Mapping[str, Axis], coordinates: Sequence[str]
) -> list[tuple[str, str]]:
    """Return at which ends of which axes a chosen point is: pairs such as ("step", "high")."""
    found = []
    for name in coordinates:
        axis = axes[name]
        place = np.log(point[name] / axis.low) / np.log(axis.high / axis.low)
        if place < NEAR_END and axis.low > axis.least:
            found.append((name, "low"))
        if place > 1 - NEAR_END and axis.high < axis.most:
            found.append((name, "high"))
    return found


def widened(axes: Mapping[str, Axis], at: Sequence[tuple[str, str]]) -> dict[str, Axis]:
    """Return the ranges, longer at these ends."""
    longer = dict(axes)
    for name, end in set(at):
        axis = longer[name]
        if end == "low":
            longer[name] = axis._replace(low=max(axis.low / WIDENED, axis.least))
        else:
            longer[name] = axis._replace(high=min(axis.high * WIDENED, axis.most))
    return longer
