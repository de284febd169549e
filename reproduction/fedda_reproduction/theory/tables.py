"""The tables of the page about the record, and the words that belong to them."""

from textwrap import fill
from typing import Any

from fedda_reproduction.theory import ratios as measured
from fedda_reproduction.theory.claims import average, interval, percent, select
from fedda_reproduction.theory.deviation import ROUNDS


def table(header: list[str], rows: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def nearer(found: dict[str, Any]) -> str:
    plan, grid = found["plan"], found["deviation"]["grid"]
    families = list(dict.fromkeys(row["family"] for row in grid))
    rows = []
    for family in families:
        for beta in plan["betas"]:
            for eta in plan["etas"]:
                chosen = select(grid, family=family, beta=beta, eta=eta)
                shares = [percent(average(chosen, f"local nearer, T={T}")[0]) for T in ROUNDS]
                ratios = [min(row["ratio, T=10"] for row in chosen)]
                ratios.append(max(row["ratio, T=10"] for row in chosen))
                rows.append(
                    [
                        family,
                        f"{beta:g}",
                        f"{eta:g}",
                        *shares,
                        f"{ratios[0]:.2g} to {ratios[1]:.2g}",
                    ]
                )
    clients = ", ".join(str(number) for number in plan["clients"])
    widest = max(
        high - low for row in grid for _, low, high in (row[f"local nearer, T={T}"] for T in ROUNDS)
    )
    words = (
        f"The share of problems in which local momentum is nearer, over {clients} clients and "
        "momentum that starts at zero or warm; and the median of the ratio of the two distances, "
        "local over decoupled, in the lowest and the highest of these settings. In no setting is "
        f"the 95 % interval of a share, by Wilson over problems, wider than {percent(widest)}."
    )
    header = ["family", "beta", "eta", *(f"T = {T}" for T in ROUNDS), "ratio, T = 10"]
    return f"{table(header, rows)}\n{fill(words, 100)}\n"


def growth(found: dict[str, Any]) -> str:
    deviation = found["deviation"]
    setting = {"eta": 0.1, "beta": 0.9, "clients": 4, "start": "warm"}
    rows = []
    for row in select(deviation["grid"], **setting):
        (late,) = select(deviation["late"], **setting, family=row["family"])
        numbers = [row["local exponent"], row["decoupled exponent"]]
        numbers += [late["local late rate"], late["decoupled late rate"]]
        rows.append([row["family"], *map(interval, numbers)])
    names = ["local: exponent", "FedDA: exponent", "local: late rate", "FedDA: late rate"]
    return table(["family", *names], rows)


def crossing(found: dict[str, Any]) -> str:
    plan, late = found["plan"], select(found["deviation"]["late"], start="warm")
    families = list(dict.fromkeys(row["family"] for row in late))
    rows = []
    for family in families:
        for beta in plan["betas"]:
            of_eta = select(late, family=family, beta=beta)
            cells = [
                " / ".join("-" if t is None else f"{t:g}" for t in row["crossing"])
                for row in of_eta
            ]
            rows.append([family, f"{beta:g}", *cells])
    return table(["family", "beta", *(f"eta {eta:g}" for eta in plan["etas"])], rows)


def orders(found: dict[str, Any]) -> str:
    federated = found["orders"]["federated"]
    names = list(next(iter(federated.values())))
    keys = list(next(iter(next(iter(federated.values())).values())))
    rows = [
        [
            key,
            *(interval(max(of[name][key]["order"] for of in federated.values())) for name in names),
        ]
        for key in keys
    ]
    return table(["error as a power", *names], rows)


def network(found: dict[str, Any]) -> str:
    of_network = found["network"]
    rows = [
        [
            f"{row['eta']:g}",
            row["start"],
            interval(row["local exponent"]),
            interval(row["decoupled exponent"]),
            *(percent(row[f"local nearer, T={T}"][0]) for T in ROUNDS),
            f"{row['ratio, T=10']:.2f}",
        ]
        for row in of_network["grid"]
    ]
    header = ["eta", "m(0)", "local: exponent", "FedDA: exponent"]
    header += [*(f"nearer, T = {T}" for T in ROUNDS), "ratio, T = 10"]
    bend = of_network["curvature"][1]
    words = (
        f"{of_network['parameters']:,} parameters, 4 clients with 20 digits each, full batches, no "
        f"dropout, beta 0.9, {found['plan']['partitions']} partitions by Dirichlet(0.3). The "
        "largest curvature of a client's loss at the start, in place of L_g, is "
        f"{bend:.3g} (median): eta 0.1 is {0.1 * bend:.2g} in the units of the random problems."
    )
    text = f"{fill(words, 100)}\n\n{table(header, rows)}"
    for method, each in of_network["equations"].items():
        words = (
            f"The exact solution of its {method.upper()} equation (eta {each['eta']:g}, tolerance "
            f"{each['rtol']:g}) moves by {each['moved']:.3g} in the time 1; the optimiser's 10 "
            f"steps end {each['optimiser']:.2g} from it, the local decomposition "
            f"{each['local'][-1]:.2g}, the decoupled one {each['decoupled'][-1]:.2g}."
        )
        text += f"\n{fill(words, 100)}\n"
    return text.rstrip("\n")


def rates(found: dict[str, Any]) -> str:
    rows = [
        [
            f"{row['eta']:g}",
            f"{row['printed']:.3f}",
            f"{row['corrected']:.3f}",
            *(interval(row[key], 3) for key in ("local, equation", "decoupled, equation")),
        ]
        for row in found["growth"]
    ]
    header = ["eta", "printed", "corrected", "local, measured", "FedDA, measured"]
    words = (
        "The paper prints lambda+ = (-(1 - beta) + sqrt((1 - beta)² + 4 (1 - beta) L_g)) / "
        "(2 eta). The eigenvalue of its matrix has 4 (1 - beta) L_g eta instead. It tends to L_g "
        "as eta does to 0, the printed one to infinity. On quadratics whose clients all have the "
        "eigenvalue -L_g = -1 the late rates of the exact solutions are (beta 0.9, "
        "mean over problems [95 % interval]):"
    )
    last = "Where no eigenvalue is negative, lambda+ is an upper bound that nothing comes near."
    return f"{fill(words, 100)}\n\n{table(header, rows)}\n{last}"


def ratios(found: dict[str, Any]) -> str:
    predicted = {row["T"]: row for row in found["ratios"]["predicted"]}
    rows = [
        [
            row["clients"],
            row["rates"],
            f"{row['T']}",
            *(f"{value:.2g}" for value in row["quantiles"]),
            percent(row["near"]),
            f"{row['scale']:.3f}",
            *(f"{predicted[row['T']][key]:.3f}" for key in ("constant", "noise")),
            percent(row["V = 0"]),
        ]
        for row in found["ratios"]["grid"]
    ]
    low, high = measured.NEAR
    header = ["clients", "rates", "T", *(f"{100 * share:g} %" for share in measured.QUANTILES)]
    header += [f"in [{low:g}, {high:g}]", "P : G", "constant g", "white noise", "V = 0"]
    return table(header, rows)
