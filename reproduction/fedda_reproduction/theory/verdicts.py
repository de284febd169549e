"""Verdicts on the paper's claims, by fixed rules from the numbers of the record."""

from collections.abc import Iterable, Sequence
from statistics import fmean  # exact: a page must not depend on the order or version of a sum
from typing import Any

from fedda_reproduction.theory.adam_ratios import COHORTS, EVERYBODY, PAPER
from fedda_reproduction.theory.deviation import LATE, MOMENTA
from fedda_reproduction.theory.equations import LOCAL_STEPS

CONFIRMED, PARTLY, NOT = "confirmed", "partly confirmed", "not confirmed"
EXACT = 1e-12
ROUNDING = 1.05  # a rate is measured over a finite time, in which slower modes still show
NEARER = {T: f"local nearer, T={T}" for T in LOCAL_STEPS}  # keys of rows: a share and its interval

Row = dict[str, Any]


def verdicts(record: Row) -> dict[str, str]:
    """Return the verdict on every claim, by its key in `claims.toml`."""
    n = numbers(record)
    unlike = set(n["growing"]["local"]) - set(n["growing"]["decoupled"])
    result = {
        "precise": _verdict(n["precise_steps"] <= EXACT, n["precise_solutions"] <= EXACT),
        "Euler": _verdict(
            min(n["euler_orders"].values()) > 0.9,
            min(n["euler_orders_at_eta"].values()) > 0.9,
            n["momentum_order"] > 0.9,
        ),
        "FedAvg": _verdict(*(n["fedavg"][f"one round, {x}"] > 0.95 for x in ("eta", "T >= 64"))),
        "F1": _verdict(max(n["f1"].values()) <= EXACT),
        "F2": _verdict(n["f2"] <= EXACT),
        "bound": _verdict(n["over_bound"]["decoupled"] <= 1),
        # It would hold if local momentum broke the bound of t², or grew where FedDA's does not.
        "F3": _verdict(n["over_bound"]["local"] > 1, bool(unlike)),
        "nearer": _nearer_verdict(record["deviation"]["grid"]),
        "rounds": _nearer_verdict(n["after_rounds"]),
        "F4": _verdict(_matches(record["growth"], "printed")),
        "Adam": _verdict(*(row["near"] > 0.5 for row in n["adam"])),
        "F13": _verdict(*(row["near"] > 0.5 for row in n["longer"])),
    }
    if "network" in record:
        result["network"] = _nearer_verdict(record["network"]["grid"])
        result["adaptive"] = _verdict(*(min(ratios) > 1 for ratios in n["adaptive"].values()))
    return result


def _verdict(*conditions: bool) -> str:
    return CONFIRMED if all(conditions) else PARTLY if any(conditions) else NOT


def _nearer_verdict(rows: Sequence[Row]) -> str:
    """Return the verdict on whether FedDA is closer than local momentum.

    The majority of its problems decides a setting, and up to a fifth of settings may differ.
    """
    for_fedda = fmean(row[key][0] < 0.5 for row in rows for key in NEARER.values())
    return CONFIRMED if for_fedda > 0.8 else NOT if for_fedda < 0.2 else PARTLY


def _matches(growth: Sequence[Row], key: str) -> bool:
    """Return whether local momentum grows at the predicted rates."""
    ratios = [row["local, equation"][0] / row[key] for row in growth]
    return all(1 / ROUNDING < ratio < ROUNDING for ratio in ratios)


def select(rows: Iterable[Row], **values: Any) -> list[Row]:
    """Return the rows with these values."""
    return [row for row in rows if all(row[key] == value for key, value in values.items())]


def average(rows: Iterable[Row], key: str) -> list[float]:
    """Return a share and its interval, averaged over settings with equally many problems.

    The problems are the same in many settings. The mean of the bounds is right if the settings err
    together, and too wide if not.
    """
    return [fmean(bounds) for bounds in zip(*(row[key] for row in rows), strict=True)]


def fedda_nearer(rows: Iterable[Row]) -> list[Row]:
    """Return the settings in which FedDA's momentum is closer in most problems, for some T."""
    return [row for row in rows if any(row[key][0] < 0.5 for key in NEARER.values())]


def still_growing(late: Iterable[Row], name: str) -> list[str]:
    """Return the families in which a deviation was still growing at the end of a long run."""
    rows = select(late, **{f"{name} grows": True})
    return sorted({row["family"] for row in rows if row["time"] >= LATE})


def _lowest(families: Sequence[Row], key: str) -> dict[str, float]:
    """Return for each method the lowest order of any family."""
    return {name: min(family[name][key][0] for family in families) for name in families[0]}


def numbers(record: Row) -> Row:
    """Return the numbers of verdicts, by the names that `claims.toml` and `page.md` use too."""
    exact, deviation, orders = record["exact"], record["deviation"], [*record["orders"].values()]
    tasks, solved = [*exact["f1"].values()], [family["equations"] for family in orders]
    euler = [family["euler"] for family in orders]
    grid, late, entries = deviation["grid"], deviation["late"], record["ratios"]["grid"]
    usual, longer = select(grid, beta=0.9), [row for row in entries if row["T"] > 1]
    shares = [row[key] for row in grid for key in NEARER.values()]
    bounded = {row["family"] for row in deviation["bound"]}
    return {
        "precise_steps": max(max(family.values()) for family in exact["precise"].values()),
        "precise_solutions": max(
            max(one["precise"]) for family in solved for one in family.values()
        ),
        "euler_orders": _lowest(euler, "order"),
        "euler_orders_at_eta": _lowest(euler, "order at eta"),
        "momentum_order": min(family["momentum after 5 steps"]["order"][0] for family in orders),
        "fedavg": _lowest([family["federated"]["FedAvg"] for family in orders], "order"),
        "f1": {name: max(task[name]["apart"] for task in tasks) for name in tasks[0]},
        "f2": max(exact["f2"].values()),
        "over_bound": {name: max(row[name] for row in deviation["bound"]) for name in MOMENTA},
        "usual": usual,
        "bounded": [row for row in usual if row["family"] in bounded],
        "powers": {name: fmean(row[f"{name} is a power"] for row in usual) for name in MOMENTA},
        "growing": {name: still_growing(late, name) for name in MOMENTA},
        "after_rounds": [row for family in orders for row in family["after rounds"]],
        "adam": select(entries, clients=EVERYBODY, T=1),
        "everybody": select(entries, clients=EVERYBODY, rates=PAPER),
        "longer": longer,
        "widest": max(high - low for _, low, high in shares),
        "distance_ratios": [row[f"ratio, T={T}"] for row in grid for T in LOCAL_STEPS],
        "crossings": [
            row["crossing"][1] / max(1 / row["eta"], 1 / (1 - row["beta"]))
            for row in late
            if row["family"] in ("convex quadratic", "logistic") and row["crossing"][1] is not None
        ],
        "scale_errors": {
            clients: [abs(row["scale"] / row[key] - 1) for row in select(longer, clients=clients)]
            for clients, key in ((EVERYBODY, "constant"), (COHORTS, "noise"))
        },
        "adaptive": {
            name: [family[name]["local"][-1] / family[name]["decoupled"][-1] for family in solved]
            for name in ("adam", "adagrad")
            if name in record["plan"]["methods"]
        },
    }
