"""What the measurements say about the paper's claims: verdicts by fixed rules, from the record."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from fedda.theory import ratios
from fedda.theory.deviation import ROUNDS

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


def interval(values: Any) -> str:
    """A mean and its confidence interval."""
    return f"{values[0]:.2f} [{values[1]:.2f}, {values[2]:.2f}]"


def select(rows: Iterable[dict[str, Any]], **values: Any) -> list[dict[str, Any]]:
    return [row for row in rows if all(row[key] == value for key, value in values.items())]


def average(rows: Iterable[dict[str, Any]], key: str) -> float:
    """Over settings, which all have as many problems."""
    numbers = [row[key][0] for row in rows]
    return sum(numbers) / len(numbers)


def claims(found: dict[str, Any]) -> list[Claim]:
    found_claims = [
        _precise(found["exact"]),
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


def _precise(exact: dict[str, Any]) -> Claim:
    worst = max(max(of.values()) for of in exact["precise"].values())
    methods = ", ".join(next(iter(exact["precise"].values())))
    return Claim(
        "precise",
        "A precise decomposition is the centralised optimiser",
        f"{methods}: at most {worst:.1e} apart in 50 steps",
        _verdict(worst <= EXACT),
    )


def _euler(orders: dict[str, Any]) -> Claim:
    """First order is what Euler's scheme has where the equation is smooth."""
    found = {
        method: [of[method]["order"][0] for of in orders["euler"].values()]
        for method in next(iter(orders["euler"].values()))
    }
    first = [min(each) > 0.9 for each in found.values()]
    fast = [of["sgdm"]["m after 5 steps"]["order"][0] for of in orders["optimiser"].values()]
    listed = ", ".join(f"{method} {min(each):.2f}" for method, each in found.items())
    return Claim(
        "Euler",
        "The optimisers are Euler's scheme for their equations",
        f"order in the step, lowest family: {listed}; but at the step eta the error of SGDM's m "
        f"after 5 steps has order {min(fast):.2f} in eta",
        _verdict(*first, min(fast) > 0.9),
    )


def _fedavg(orders: dict[str, Any]) -> Claim:
    runs = [of["FedAvg"] for of in orders["federated"].values()]
    eta = [of["one round, eta"]["order"][0] for of in runs]
    local = [of["one round, T >= 64"]["order"][0] for of in runs]
    return Claim(
        "FedAvg",
        "Within a round FedAvg is O(eta T) from centralised GD",
        f"better: order {min(eta):.2f} in eta and {max(local):.2f} in T; at a fixed time order "
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
        f"fits better than an exponential in {percent(sum(powers) / len(powers))} of problems; "
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
    usual = select(deviation["grid"], beta=0.9)
    shares = {T: average(usual, f"local nearer, T={T}") for T in ROUNDS}
    listed = ", ".join(f"{percent(share)} (T = {T})" for T, share in shares.items())
    return Claim(
        "F3 nearer",
        "FedDA's momentum is nearer to the centralised one than local momentum",
        f"local is the nearer one in {listed} of problems at beta 0.9; FedDA's in most problems at "
        f"some T in {len(settings_lost(deviation))} of {len(deviation['grid'])} settings of all",
        _nearer_verdict(_shares(deviation["grid"])),
    )


def settings_lost(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Where FedDA's momentum is the nearer one in most problems, at one T at least."""
    return [
        row for row in found["grid"] if any(row[f"local nearer, T={T}"][0] < 0.5 for T in ROUNDS)
    ]


def _f3_network(network: dict[str, Any]) -> Claim:
    shares = {T: average(network["grid"], f"local nearer, T={T}") for T in ROUNDS}
    listed = ", ".join(f"{percent(share)} (T = {T})" for T, share in shares.items())
    return Claim(
        "F3 network",
        "FedDA's momentum is the nearer one on the small network with digits",
        f"local is the nearer one in {listed} of partitions and settings; FedDA's in most "
        f"partitions at some T in {len(settings_lost(network))} of {len(network['grid'])} settings",
        _nearer_verdict(_shares(network["grid"])),
    )


def _over_rounds(orders: dict[str, Any]) -> Claim:
    rows = orders["after rounds"]
    shares = {T: average(select(rows, T=T), "local nearer") for T in ROUNDS}
    listed = ", ".join(f"{percent(share)} (T = {T})" for T, share in shares.items())
    return Claim(
        "rounds",
        "Over rounds FedDA mimics centralised SGDM better than local momentum does",
        f"after 10 rounds the model of local momentum is the nearer one in {listed}",
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
        f"indefinite quadratics, eta {smallest['eta']:g}: {smallest['local, equation'][0]:.3f}; "
        f"lambda+ as printed {smallest['printed']:.3g}, corrected {smallest['corrected']:.3f}; "
        f"FedDA's grows at {smallest['decoupled, equation'][0]:.3f}",
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
        f"digits, full batches, the paper's rates: median size {medians}; the scale of P against "
        f"that of G, where T > 1, is {scales}, and constant gradients predict {expected}; at most "
        f"{percent(max(row['near'] for row in longer))} of entries have sizes within {_near()} in "
        "any setting with T > 1",
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
