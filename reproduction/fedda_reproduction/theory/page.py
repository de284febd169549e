"""A page that says what the record means; every number is from the record."""

from statistics import fmean
from textwrap import fill
from typing import Any

from fedda_reproduction.theory import ratios, tables
from fedda_reproduction.theory.claims import (
    FAILS,
    HOLDS,
    IN_PART,
    LONG,
    growing_at_last,
    nearer_by_steps,
    percent,
    select,
    settings_lost,
)
from fedda_reproduction.theory.deviation import ROUNDS

QUICK = "A quick run shows that it works: its verdicts are of few problems, settings and rounds."


def markdown(found: dict[str, Any]) -> str:
    plan = found["plan"]
    verdicts = tables.table(
        ["claim of the paper", "measured", "verdict"],
        [[each["claim"], each["measured"], f"**{each['verdict']}**"] for each in found["claims"]],
    )
    return f"""# What the theory claims, measured

`fedda theory --problems {plan["problems"]} --seed {plan["seed"]}{_quick(plan)}` wrote this page,
its figures and [theory.json](theory.json) in {found["seconds"]} s on {found["device"]},
{found["processor_seconds"]} s of processor time.
Every number below comes from that file.
{_warning(plan)}
{verdicts}
## The claim that local momentum strays exponentially and FedDA's only as t²

{_answer(found)}

{fill(_why(found), 100)}

![Distances of momenta](deviation.png)

*Distance of the mean momentum to that of centralised SGDM: median and 5-95 % of
{plan["problems"]} problems, eta 0.1, beta 0.9, momentum warmed up by 20 centralised steps. Shaded:
the paper's range of T.*

{tables.nearer(found)}
![Where local momentum is nearer](nearer.png)

*The same for 4 clients and momentum that starts warm.*

### How it grows

{tables.growth(found)}
Exponents are of t^x fitted to 2 <= t <= 20, as mean over problems [95 % interval] at eta 0.1,
beta 0.9, 4 clients, warm. Late rates are of exp(rate * tau) over the second half of {plan["late"]}
steps.

{tables.crossing(found)}
The first t at which local momentum is the farther one: 5 / 50 / 95 % of problems, warm, 4 clients;
a dash: not within {plan["late"]} steps.

{_network(found)}## lambda+

{tables.rates(found)}

![Rates of growth](growth.png)

## Orders of approximation

{tables.orders(found)}
Mean over problems [95 % interval], for the family with the largest value of each. One round is of
T = 8 where eta varies; the fixed time is 1.28 / L_g, after many rounds. Local momentum is SGDM by
every client with momenta averaged in every round.

![Orders](orders.png)

*Medians at the fixed time. FedAvg's distance to centralised GD and FedDA's to centralised SGDM
nearly coincide.*

Solutions of the equations themselves, to a relative tolerance of 1e-10, medians of problems:

![Equations](equations.png)

Here decoupled Adam and AdaGrad have one v, of the mean gradient at every moment, which takes
communication at every moment. FedDA forms its v from one gradient a round instead; how near that
comes where T > 1 was not measured, but how long its steps are was:

## The entries of m̂ / √v̂ in FedDA+Adam

{fill(_ratios(found), 100)}

{fill(_scales(found), 100)}

{tables.ratios(found)}
{fill(_ratio_words(found), 100)}

![Entries of FedDA+Adam's step](ratios.png)

*With the paper's rates; bands: 5-95 %. In the first round M is 0, so that every entry is 1 or -1.*

## What was assumed

{_assumptions(found)}"""


def _network(found: dict[str, Any]) -> str:
    if not found["plan"]["learn"]:
        return ""
    return f"""### The small network

{tables.network(found)}

![The network](network.png)

*Distance of the mean momentum to that of centralised SGDM: median and 5-95 % of the partitions.*

"""


def _quick(plan: dict[str, Any]) -> str:
    return "" if plan["learn"] else " --quick"


def _warning(plan: dict[str, Any]) -> str:
    return "" if plan["learn"] else f"\n**{QUICK}**\n"


def _answer(found: dict[str, Any]) -> str:
    """Paragraphs: what follows from the bounds, how the distances grow, and which is smaller."""
    (claim,) = select(found["claims"], key="F3 local")
    first = {
        FAILS: "The data contradict it.",
        IN_PART: "The data support it in part.",
        HOLDS: "The data support it.",
    }[claim["verdict"]]
    parts = (f"{first} {_bounds(found)}", _early(found), _late(found), _nearness(found))
    return "\n\n".join(fill(part, 100) for part in parts)


def _bounds(found: dict[str, Any]) -> str:
    deviation = found["deviation"]
    local, decoupled = (
        max(row[name] for row in deviation["bound"]) for name in ("local", "decoupled")
    )
    single = [row["client ratio, T=10"] for row in select(deviation["grid"], beta=0.9)]
    return (
        "Under the paper's own assumptions (Lipschitz and bounded gradients) the steps of its "
        "proof for FedDA bound local momentum by the same C eta t²/2, where C = L_g (2 G + |m(0)|) "
        "and G bounds gradients: the largest deviation "
        f"measured was {local:.1e} of that bound for local and {decoupled:.1e} for decoupled "
        "momentum. With the factor 1 - beta that the proof loses on the way, the bound of both is "
        "C eta t at most. The exponential is an upper bound, which does not say that what it "
        "bounds grows so; bounded gradients are not used for it; and it is of one client's "
        "momentum, where the bound for FedDA is of the mean of all. Compared alike, one client's "
        f"momentum is {min(single):.2g} to {max(single):.2g} times as far with local as with "
        "decoupled momentum (medians of settings, T = 10, beta 0.9)."
    )


def _early(found: dict[str, Any]) -> str:
    least = min(found["plan"]["etas"])
    usual = select(found["deviation"]["grid"], beta=0.9)
    slow = select(usual, eta=least)
    local, decoupled = (
        percent(fmean(row[f"{name} is a power"] for row in usual))
        for name in ("local", "decoupled")
    )
    return (
        "For t <= 20, the paper's range, and beta 0.9 a power of t fits better than an exponential "
        f"in {local} of problems for local and {decoupled} for decoupled momentum (least squares "
        "of the logarithms; both have two parameters, so that AIC and BIC choose alike). What "
        "remains true is that FedDA's exponent in t is the smaller one at first: "
        f"{_exponents(slow, 'decoupled')} against {_exponents(slow, 'local')} (eta {least:g}, "
        "beta 0.9). But it starts from a larger value."
    )


def _late(found: dict[str, Any]) -> str:
    """A fit to few steps says nothing about many."""
    late = found["deviation"]["late"]
    row = next(iter(select(found["growth"], eta=0.1)), found["growth"][0])
    grown = growing_at_last(late, "local") | growing_at_last(late, "decoupled")
    ended = sorted({each["family"] for each in late} - grown)
    return (
        f"That says nothing about many steps. After the time {LONG:g} neither was still growing in "
        f"these families: {', '.join(ended) or 'none'}. With negative curvature and unbounded "
        "gradients both do, exponentially, and FedDA's faster, since its clients descend by plain "
        f"gradients: at the rate {row['decoupled, equation'][0]:.3f} against "
        f"{row['local, equation'][0]:.3f} (eta {row['eta']:g}, L_g = 1)."
    )


def _nearness(found: dict[str, Any]) -> str:
    deviation = found["deviation"]
    crossings = [
        each["crossing"][1] / max(1 / each["eta"], 1 / (1 - each["beta"]))
        for family in ("convex quadratic", "logistic")
        for each in select(deviation["late"], family=family)
        if each["crossing"][1] is not None
    ]
    lost = settings_lost(deviation)
    ratios = [each[f"ratio, T={T}"] for each in deviation["grid"] for T in ROUNDS]
    crossed = (
        f"On convex losses they cross when t is {min(crossings):.1g} to {max(crossings):.1g} times "
        "the larger one of 1 / (eta L_g) and 1 / (1 - beta) (medians of settings), and for a while "
        "from there on FedDA's is the nearer one. "
        if crossings
        else ""
    )
    return (
        "Within rounds with beta 0.9 local momentum is the nearer one in "
        f"{nearer_by_steps(select(deviation['grid'], beta=0.9))} of the random problems [95 % "
        f"interval over problems, for these settings]. {crossed}Within T = 20 that takes a large "
        "eta or a small beta: at some T of the three it is the nearer one in most problems in "
        f"{len(lost)} of {len(deviation['grid'])} settings, {len(select(lost, beta=0.9))} of them "
        f"with beta 0.9. The median ratio of the distances, local over FedDA's, is "
        f"{min(ratios):.2g} to {max(ratios):.2g} over all settings."
    )


def _exponents(rows: list[dict[str, Any]], name: str) -> str:
    values = [row[f"{name} exponent"][0] for row in rows]
    low, high = f"t^{min(values):.1f}", f"t^{max(values):.1f}"
    return low if low == high else f"{low} to {high}"


def _why(found: dict[str, Any]) -> str:
    alike = found["deviation"]["alike at T=10"]
    local = max(each["local"] for each in alike.values())
    decoupled = min(each["decoupled"] for each in alike.values())
    return (
        "Why: to first order in eta, with u = sum p_i H_i (g_i - g) and v = H (g - m(0)) at the "
        "start of the round, the deviations are eta |A(t) - B(t)| |u| of local and eta |A(t) u + "
        "B(t) v| of decoupled momentum, where 0 < B(t) < A(t) for t > 1 depend on beta alone (the "
        "module `theory.deviation` has them, a test checks them). So where the momentum is "
        "in balance, v = 0, local momentum is nearer for every t. And where clients are alike, "
        f"u = 0: after 10 steps local momentum is then {local:.1e} from the centralised one at "
        f"most, and decoupled momentum {decoupled:.1e} at least."
    )


def _ratios(found: dict[str, Any]) -> str:
    grid = found["ratios"]["grid"]
    own = select(grid, clients=ratios.EVERYBODY, rates=ratios.PAPER)
    (adam,) = select(own, T=1)
    (normalised,) = select(grid, clients=ratios.EVERYBODY, rates=ratios.SMALL, T=1)
    longer = [row for row in grid if row["T"] > 1]
    least, most = (pick(row["quantiles"][2] for row in longer) for pick in (min, max))
    shrunk = ", ".join(
        f"{row['quantiles'][2] / adam['quantiles'][2]:.3f} (T = {row['T']})"
        for row in own
        if row["T"] > 1
    )
    return (
        "The paper calls it crucial that in centralised Adam each component of m̂ / √v̂ is ±1 in "
        "expectation, and means FedDA+Adam to keep m and v as they are there. The size of an "
        "expectation is at most the mean of |m̂| / √v̂, which is looked at here. In Adam itself "
        f"(T = 1, full batches, everybody) this mean is {adam['mean']:.2f} with the paper's rates, "
        f"under which gradients change slowly, and {percent(adam['near'])} of entries are within a "
        f"factor of two of 1; with eps {normalised['eps']:g}, small enough for Adam to normalise, "
        f"the mean is {normalised['mean']:.2f} and the share {percent(normalised['near'])}. With "
        f"T > 1 no setting comes near: medians are {least:.2g} to {most:.2g}, and at most "
        f"{percent(max(row['near'] for row in longer))} are within that factor. With full batches "
        f"and the paper's rates the median is multiplied by {shrunk}."
    )


def _scales(found: dict[str, Any]) -> str:
    predicted = {row["T"]: row for row in found["ratios"]["predicted"]}
    everybody, cohorts = (
        [
            abs(row["scale"] / predicted[row["T"]][key] - 1)
            for row in select(found["ratios"]["grid"], clients=clients)
            if row["T"] > 1
        ]
        for clients, key in ((ratios.EVERYBODY, "constant"), (ratios.COHORTS, "noise"))
    )
    sampled = f", and white noise within {percent(max(cohorts))} with cohorts" if cohorts else ""
    return (
        "Why: m̂ is a sum P of T momenta, but the momentum M that the next round starts with is one "
        "of them, and v̂ is of G = (P - beta1 M) / (1 - beta1), which is nearly P / (1 - beta1) "
        "where T is large. Whatever the gradients are, if only they do not cancel within rounds, "
        "the scale of P against that of G then tends to 1 - beta1 = 0.1 (`theory.ratios` "
        "derives it). For gradients that do not change it is T (1 - beta1) / (T - beta1). That "
        "predicts the measured scales at T > 1 within "
        f"{percent(max(everybody))} with full batches{sampled}. Entries of m̂ / √v̂ are smaller "
        "still, as gradients shrink while the model learns and v̂ remembers the larger ones for "
        "about 100 rounds."
    )


def _ratio_words(found: dict[str, Any]) -> str:
    plan, measured = found["plan"], found["ratios"]
    rates = "; ".join(
        f"{name}: client {each.client_lr:g}, server {each.server_lr:g}, eps {each.eps:g}"
        for name, each in ratios.RATES.items()
    )
    return (
        f"A perceptron of {measured['parameters']:,} parameters that learns the digits, seed "
        f"{plan['seed']}, {plan['ratio_rounds']} rounds, beta1 {ratios.BETA1:g}, beta2 "
        f"{ratios.BETA2:g}. Quantiles are of |m̂| / √v̂ over all entries and the second half of the "
        "rounds. Everybody: 10 clients with 40 digits each, full batches; T = 1 is centralised "
        "Adam. Cohorts: 10 of 100 clients a round, batches of 10. P : G is the root of the sums of "
        "P² and of G² over those rounds, in the median entry; constant gradients and white noise "
        "would have it as shown beside it. V = 0: the share of entries that never had a gradient, "
        "as their pixel is blank wherever their unit is active; they take no step and are left "
        "out. An entry that only lost its gradients counts with what m̂ has left. Rates: "
        f"{rates}."
    )


def _assumptions(found: dict[str, Any]) -> str:
    plan = found["plan"]
    return f"""- Full batches, everybody takes part, the server rate alpha is 1, float64; one round
  unless said otherwise.
- Random problems in 10 dimensions with weights p_i of 1 to 10 parts. Convex quadratics have
  eigenvalues from 0.01 to 1, indefinite ones from -1 to 1. The logistic and the sigmoid loss (no
  convex function) have 20 examples a client and bounded gradients. The Lipschitz constant L_g of
  every client's gradient is 1, so that eta is in units of 1 / L_g.
- Clients differ: in Hessians, minima, inputs and labelling rules. The more they are alike, the
  more local momentum is favoured.
- A warm start is the state of centralised SGDM after 20 steps.
- Distances are of the mean momentum of all clients, as the server would see it. The paper bounds
  one client's local momentum, and compares it with the mean of FedDA's.
- At most {plan["solved"]} problems of each family were solved to high order.
- Nearness to centralised SGDM is what the paper's theory is about. It is not accuracy: whether
  FedDA trains better than other methods is a question for experiments, not for this page.
"""
