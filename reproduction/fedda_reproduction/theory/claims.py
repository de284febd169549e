"""What the measurements say about the paper's claims: verdicts by fixed rules, from the record."""

from collections.abc import Iterable, Sequence
from statistics import fmean  # exact: a page must not depend on the order or version of a sum
from typing import Any, NamedTuple

from fedda_reproduction.theory import ratios
from fedda_reproduction.theory.deviation import ROUNDS

HOLDS, IN_PART, FAILS = "holds", "holds in part", "does not hold"
EXACT = 1e-12
LONG = 40.0  # time in units of 1 / L_g
ROUNDING = 1.05  # a rate is measured over a finite time, in which slower modes still show


class Claim(NamedTuple):
    key: str
    claim: str
    measured: str
    verdict: str


def _verdict(*conditions: bool) -> str:
    return HOLDS if all(conditions) else IN_PART if any(conditions) else FAILS


def _nearer_verdict(shares: list[float]) -> str:
    """That FedDA is nearer, given the share of problems with local nearer in every setting.

    A setting counts for what most of its problems show, and up to a fifth of them are exceptions.
    """
    for_it = sum(share < 0.5 for share in shares) / len(shares)
    return HOLDS if for_it > 0.8 else FAILS if for_it < 0.2 else IN_PART


def _shares(rows: list[dict[str, Any]]) -> list[float]:
    return [row[f"local nearer, T={T}"][0] for row in rows for T in ROUNDS]


def percent(share: float) -> str:
    return f"{100 * share:.3g} %"


def percents(share: Sequence[float]) -> str:
    """A share and its confidence interval."""
    value, low, high = share
    return f"{percent(value)} [{100 * low:.3g}, {100 * high:.3g}]"


def interval(values: Sequence[float], digits: int = 2) -> str:
    """A mean and its confidence interval."""
    value, low, high = (f"{each:.{digits}f}" for each in values)
    return f"{value} [{low}, {high}]"


def select(rows: Iterable[dict[str, Any]], **values: Any) -> list[dict[str, Any]]:
    return [row for row in rows if all(row[key] == value for key, value in values.items())]


def average(rows: list[dict[str, Any]], key: str) -> list[float]:
    """A share and its interval over settings, which all have as many problems.

    The problems are the same in many settings. So the mean of the bounds is taken: it is right if
    settings err together, and too wide if not.
    """
    return [fmean(bounds) for bounds in zip(*(row[key] for row in rows), strict=True)]


def nearer_by_steps(rows: list[dict[str, Any]]) -> str:
    """How often local momentum is nearer, on average over settings, for every T."""
    return ", ".join(f"{percents(average(rows, f'local nearer, T={T}'))} (T = {T})" for T in ROUNDS)


def claims(found: dict[str, Any]) -> list[Claim]:
    found_claims = [
        _precise(found),
        _euler(found["orders"]),
        _fedavg(found["orders"]),
        _f1(found),
        _f2(found["exact"]),
        _f3_decoupled(found["deviation"]),
        _f3_local(found["deviation"]),
        _f3_nearer(found["deviation"]),
        _over_rounds(found["orders"]),
        _f4(found["growth"]),
        _adam(found["ratios"]),
        _f13(found["ratios"]),
    ]
    if found["plan"]["learn"]:
        found_claims += [_f3_network(found["network"]), _adaptive(found["orders"])]
    return found_claims


def _precise(found: dict[str, Any]) -> Claim:
    steps = max(max(of.values()) for of in found["exact"]["precise"].values())
    solved = max(
        max(each["precise"]) for of in found["orders"]["equations"].values() for each in of.values()
    )
    return Claim(
        "precise",
        "A precise decomposition is the centralised optimiser",
        f"{', '.join(found['plan']['methods'])}: at most {steps:.1e} apart in 50 steps; "
        f"solutions of their equations at most {solved:.1e} (median of problems)",
        _verdict(steps <= EXACT, solved <= EXACT),
    )


def _euler(orders: dict[str, Any]) -> Claim:
    """First order is what Euler's scheme has, if its steps are small enough."""
    methods = next(iter(orders["euler"].values()))
    at_eta, finest = (
        {method: min(of[method][key][0] for of in orders["euler"].values()) for method in methods}
        for key in ("order at eta", "order")
    )
    fast = [of["sgdm"]["m after 5 steps"]["order"][0] for of in orders["optimiser"].values()]
    return Claim(
        "Euler",
        "The optimisers are Euler's scheme for their equations",
        f"order in the step h, lowest family: {_orders(finest)} as h gets small, "
        f"{_orders(at_eta)} between h = eta and eta / 4; and where h is always eta, the error of "
        f"SGDM's m after 5 steps has order {min(fast):.2f} in eta",
        _verdict(min(finest.values()) > 0.9, min(at_eta.values()) > 0.9, min(fast) > 0.9),
    )


def _orders(found: dict[str, float]) -> str:
    return ", ".join(f"{method} {order:.2f}" for method, order in found.items())


def _fedavg(orders: dict[str, Any]) -> Claim:
    runs = [of["FedAvg"] for of in orders["federated"].values()]
    eta = [of["one round, eta"]["order"][0] for of in runs]
    local = [of["one round, T >= 64"]["order"][0] for of in runs]
    return Claim(
        "FedAvg",
        "Within a round FedAvg is O(eta T) from centralised GD",
        f"order {min(eta):.2f} in eta and {min(local):.2f} in T, so about (eta T)², which is less "
        "where eta T is small; at a fixed time, after many rounds, order "
        f"{min(of['fixed time, eta']['order'][0] for of in runs):.2f} in eta",
        _verdict(min(eta) > 0.95, min(local) > 0.95),
    )


def _f1(found: dict[str, Any]) -> Claim:
    exact = found["exact"]
    worst = {
        method: max(of[method]["apart"] for of in exact["f1"].values())
        for method in ("sgdm", "adam", "adagrad")
    }
    listed = ", ".join(f"{method} {apart:.1e}" for method, apart in worst.items())
    return Claim(
        "F1",
        "With T = 1, full batches and everybody, FedDA is the centralised optimiser",
        f"{' and '.join(exact['f1'])}, {found['plan']['rounds']} rounds against Optax: {listed}",
        _verdict(max(worst.values()) <= EXACT),
    )


def _f2(exact: dict[str, Any]) -> Claim:
    worst = max(exact["f2"].values())
    return Claim(
        "F2",
        "The mean of decoupled momenta is the momentum of the mean gradients",
        f"{' and '.join(exact['f2'])}, T = 10: at most {worst:.1e} apart",
        _verdict(worst <= EXACT),
    )


def _f3_decoupled(deviation: dict[str, Any]) -> Claim:
    ratio = max(row["decoupled"] for row in deviation["bound"])
    bounded = {row["family"] for row in deviation["bound"]}
    usual = [row for row in select(deviation["grid"], beta=0.9) if row["family"] in bounded]
    exponents = [row["decoupled exponent"][0] for row in usual]
    return Claim(
        "F3 decoupled",
        "FedDA's momentum strays as C eta t²/2 at most, if gradients are bounded",
        f"at most {ratio:.1e} of that; for t <= 20 as t^{min(exponents):.2f} to "
        f"t^{max(exponents):.2f}",
        _verdict(ratio <= 1),
    )


def _f3_local(deviation: dict[str, Any]) -> Claim:
    """It would hold if local momentum broke the bound of t², or grew where decoupled does not."""
    ratio = max(row["local"] for row in deviation["bound"])
    powers = [row["local is a power"] for row in select(deviation["grid"], beta=0.9)]
    growing, both = (growing_at_last(deviation["late"], name) for name in ("local", "decoupled"))
    return Claim(
        "F3 local",
        "Local momentum strays exponentially, unlike FedDA's",
        f"the same bound of t² holds for it, at most {ratio:.1e} of it; for t <= 20 a power of t "
        f"fits better than an exponential in {percent(fmean(powers))} of problems; "
        f"still growing after the time {LONG:g}: {_listed(growing)}; FedDA's: {_listed(both)}",
        _verdict(ratio > 1, bool(growing - both)),
    )


def growing_at_last(late: list[dict[str, Any]], name: str) -> set[str]:
    """The families in which, at some setting that was followed for long, it had not ended."""
    return {
        row["family"]
        for row in late
        if row["time"] >= LONG
        and row[f"{name} late rate"][1] > 0
        and row[f"{name} last over largest"][1] == 1
    }


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _f3_nearer(deviation: dict[str, Any]) -> Claim:
    usual = nearer_by_steps(select(deviation["grid"], beta=0.9))
    return Claim(
        "F3 nearer",
        "FedDA's momentum is nearer to the centralised one than local momentum",
        f"local is the nearer one in {usual} of problems at beta 0.9; FedDA's in most problems at "
        f"some T in {len(settings_lost(deviation))} of {len(deviation['grid'])} settings of all",
        _nearer_verdict(_shares(deviation["grid"])),
    )


def settings_lost(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Where FedDA's momentum is the nearer one in most problems, at one T at least."""
    return [
        row for row in found["grid"] if any(row[f"local nearer, T={T}"][0] < 0.5 for T in ROUNDS)
    ]


def _f3_network(network: dict[str, Any]) -> Claim:
    return Claim(
        "F3 network",
        "FedDA's momentum is the nearer one on the small network with digits",
        f"local is the nearer one in {nearer_by_steps(network['grid'])} of partitions and "
        f"settings; FedDA's in most partitions at some T in {len(settings_lost(network))} of "
        f"{len(network['grid'])} settings",
        _nearer_verdict(_shares(network["grid"])),
    )


def _over_rounds(orders: dict[str, Any]) -> Claim:
    rows = orders["after rounds"]
    listed = ", ".join(
        f"{percents(average(select(rows, T=T), 'local nearer'))} (T = {T})" for T in ROUNDS
    )
    return Claim(
        "rounds",
        "Over rounds FedDA mimics centralised SGDM better than local momentum does",
        f"after 10 rounds the model of local momentum is the nearer one in {listed} of problems",
        _nearer_verdict([row["local nearer"][0] for row in rows]),
    )


def _f4(growth: list[dict[str, Any]]) -> Claim:
    def matches(row: dict[str, Any], key: str) -> bool:
        measured = row["local, equation"][0]
        return row[key] / ROUNDING < measured < row[key] * ROUNDING

    smallest = growth[0]
    return Claim(
        "F4",
        "Local momentum's deviation grows at the rate lambda+",
        f"it grows at {smallest['local, equation'][0]:.3f} (indefinite quadratics, eta "
        f"{smallest['eta']:g}), where lambda+ is {smallest['printed']:.3g} as printed and "
        f"{smallest['corrected']:.3f} corrected; FedDA's grows at "
        f"{smallest['decoupled, equation'][0]:.3f}",
        _verdict(
            all(matches(row, "corrected") for row in growth),
            all(matches(row, "printed") for row in growth),
        ),
    )


def _ratio_verdict(rows: list[dict[str, Any]]) -> str:
    """That entries are about 1, in every setting or in some: most of them, by `ratios.NEAR`."""
    return _verdict(*(row["near"] > 0.5 for row in rows))


def _adam(found: dict[str, Any]) -> Claim:
    """Of FedDA+Adam with T = 1, which F1 shows to be Adam."""
    rows = select(found["grid"], clients=ratios.EVERYBODY, T=1)
    listed = "; ".join(
        f"{percent(row['near'])} (median {row['quantiles'][2]:.2g}) at eps {row['eps']:g}"
        for row in rows
    )
    return Claim(
        "Adam",
        "In centralised Adam the entries of m̂ / √v̂ are about ±1",
        f"digits, full batches, share of entries with sizes within {_near()}: {listed}",
        _ratio_verdict(rows),
    )


def _f13(found: dict[str, Any]) -> Claim:
    own = select(found["grid"], clients=ratios.EVERYBODY, rates=ratios.PAPER)
    longer = [row for row in found["grid"] if row["T"] > 1]
    medians = ", ".join(f"{row['quantiles'][2]:.2g} (T = {row['T']})" for row in own)
    scales = ", ".join(f"{row['scale']:.3f}" for row in own if row["T"] > 1)
    expected = ", ".join(f"{row['constant']:.3f}" for row in found["predicted"] if row["T"] > 1)
    return Claim(
        "F13",
        "In FedDA+Adam with T > 1 the entries of m̂ / √v̂ are about ±1",
        f"at most {percent(max(row['near'] for row in longer))} of entries have sizes within "
        f"{_near()} in any setting with T > 1; digits, full batches, the paper's rates: median "
        f"size {medians}; the scale of P against that of G, where T > 1, is {scales}, and constant "
        f"gradients predict {expected}",
        _ratio_verdict(longer),
    )


def _near() -> str:
    low, high = ratios.NEAR
    return f"[{low:g}, {high:g}]"


def _adaptive(orders: dict[str, Any]) -> Claim:
    """Of the equations, at the last time."""
    solved = orders["equations"].values()
    ratios = {
        method: [of[method]["local"][-1] / of[method]["decoupled"][-1] for of in solved]
        for method in ("adam", "adagrad")
    }
    listed = ", ".join(
        f"{method} {min(each):.1f} to {max(each):.1f}" for method, each in ratios.items()
    )
    return Claim(
        "adaptive",
        "Adam and AdaGrad need one v of the mean gradient: local ones stray far",
        f"the equations' local solutions are {listed} times as far as the decoupled ones",
        _verdict(*(min(each) > 1 for each in ratios.values())),
    )
