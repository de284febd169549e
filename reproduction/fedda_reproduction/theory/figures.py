"""The figures of `fedda theory`, drawn from its record alone."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fedda.storage.files import naming
from fedda_reproduction.theory import ratios
from fedda_reproduction.theory.claims import select
from fedda_reproduction.theory.flows import extra

# The colours of the reports; one meaning each in all figures.
LOCAL, DECOUPLED, OTHER, QUIET = "#D55E00", "#0072B2", "#009E73", "#7F7F7F"
FAMILIES = ("#CC79A7", "#000000", "#E69F00", "#56B4E9")
COLOURS = {"local": LOCAL, "decoupled": DECOUPLED}
NAMES = {"local": "local momentum", "decoupled": "decoupled (FedDA)"}


def draw(found: dict[str, Any], directory: Path) -> list[Path]:
    """Writes every figure as PNG."""
    figure_module = extra("matplotlib.figure")
    files = []
    for name, (columns, fill) in FIGURES.items():
        if name == "network" and "network" not in found:  # a quick run has none
            continue
        height = 4.2 if columns == 1 else 3.4  # there the legend has one column
        figure = figure_module.Figure(figsize=(3.4 * columns, height), layout="constrained")
        axes = list(figure.subplots(1, columns, squeeze=False)[0])
        fill(found, axes)
        for each in axes:
            each.grid(alpha=0.3)
            each.spines[["top", "right"]].set_visible(False)
        lines: dict[str, Any] = {}
        for each in axes:
            for handle, label in zip(*each.get_legend_handles_labels(), strict=True):
                lines.setdefault(label, handle)
        figure.legend(
            lines.values(),
            lines,
            loc="outside lower center",
            ncols=max(1, min(4, 2 * columns - 2)),
            frameon=False,
        )
        files.append(directory / f"{name}.png")
        with naming(files[-1]):
            figure.savefig(files[-1], dpi=110)
    return files


def _bands(axis: Any, curves: dict[str, Any]) -> None:
    for name, colour in COLOURS.items():
        low, middle, high = zip(*curves[name], strict=True)
        axis.plot(curves["t"], middle, color=colour, label=NAMES[name])
        axis.fill_between(curves["t"], low, high, color=colour, alpha=0.15, lw=0)
    axis.set(xscale="log", yscale="log", xlabel="local steps t")
    axis.set_xticks([t for t in (2, 5, 10, 20, 100, 400) if t <= curves["t"][-1]])
    axis.xaxis.set_major_formatter("{x:g}")
    axis.tick_params(which="minor", labelbottom=False, labelleft=False)
    axis.axvspan(curves["t"][0], 20, color=QUIET, alpha=0.1, lw=0)


def _deviation(found: dict[str, Any], axes: list[Any]) -> None:
    for axis, (name, curves) in zip(axes, found["deviation"]["curves"].items(), strict=True):
        _bands(axis, curves)
        axis.set_title(name)
    axes[0].set_ylabel("distance to centralised momentum")


def _network(found: dict[str, Any], axes: list[Any]) -> None:
    curves = found["network"]["curves"]
    chosen = [name for name in curves if name.endswith("warm")]
    for axis, name in zip(axes, chosen, strict=True):
        _bands(axis, curves[name])
        axis.sharey(axes[0])
        axis.set_title(name)
    axes[0].set_ylabel("distance to centralised momentum")


def _nearer(found: dict[str, Any], axes: list[Any]) -> None:
    plan, grid = found["plan"], found["deviation"]["grid"]
    families = list(dict.fromkeys(row["family"] for row in grid))
    for axis, T in zip(axes, (5, 10, 20), strict=True):
        for family, colour in zip(families, FAMILIES, strict=True):
            for beta, style in zip((0.5, 0.9), (":", "-"), strict=True):
                rows = select(grid, family=family, beta=beta, clients=4, start="warm")
                if rows:
                    shares = [row[f"local nearer, T={T}"][0] for row in rows]
                    label = f"{family}, beta {beta:g}"
                    axis.plot(plan["etas"], shares, style, marker="o", color=colour, label=label)
        axis.set(xscale="log", xlabel="eta L_g", title=f"T = {T}", ylim=(-0.03, 1.03))
    axes[0].set_ylabel("share where local is nearer")


def _orders(found: dict[str, Any], axes: list[Any]) -> None:
    family, methods = list(found["orders"]["federated"].items())[-1]
    colours = {"FedDA": DECOUPLED, "local momentum": LOCAL, "FedAvg": OTHER}
    on_top = {"ls": ":", "marker": "s", "ms": 10, "mfc": "none"}  # it coincides with FedDA
    for axis, key in zip(axes, ("fixed time, eta", "fixed time, T - 1"), strict=True):
        for name, colour in colours.items():
            each = methods[name][key]
            style = on_top if name == "FedAvg" else {"marker": "o"}
            axis.plot(each["x"], each["error"], color=colour, label=name, **style)
        axis.set(xscale="log", yscale="log", xlabel=key.partition(", ")[2], title=family)
        axis.set_xticks(each["x"], [f"{x:g}" for x in each["x"]])
        axis.tick_params(which="minor", labelbottom=False)
    axes[0].set_ylabel("distance to centralised model")


def _equations(found: dict[str, Any], axes: list[Any]) -> None:
    family, methods = list(found["orders"]["equations"].items())[-1]
    for axis, (method, each) in zip(axes, methods.items(), strict=False):
        # Dashed, as decoupled GD is local GD.
        for (name, colour), style in zip(COLOURS.items(), ("-", "--"), strict=True):
            axis.plot(each["tau"], each[name], style, color=colour, label=f"{name} decomposition")
        axis.set(xlabel="time", title=f"{method}, {family}")
    for axis in axes[len(methods) :]:  # a quick run has fewer
        axis.set_visible(False)
    axes[0].set_ylabel("distance to the centralised solution")


def _growth(found: dict[str, Any], axes: list[Any]) -> None:
    rows = found["growth"]
    etas = [row["eta"] for row in rows]
    for key, colour, style in (("printed", QUIET, "--"), ("corrected", OTHER, "-")):
        values = [row[key] for row in rows]
        axes[0].plot(etas, values, style, color=colour, label=f"lambda+ {key}")
    for name, colour in COLOURS.items():
        values = [row[f"{name}, equation"][0] for row in rows]
        axes[0].plot(etas, values, "o", color=colour, label=f"{NAMES[name]}, measured")
    axes[0].set(xscale="log", yscale="log", xlabel="eta", ylabel="rate of growth")


def _ratios(found: dict[str, Any], axes: list[Any]) -> None:
    of_ratios = found["ratios"]
    curves = of_ratios["curves"]
    own = select(curves["rows"], clients=ratios.EVERYBODY, rates=ratios.PAPER)
    for index, row in enumerate(own):
        adam = row["T"] == 1
        label = "T = 1: Adam" if adam else f"T = {row['T']}"
        style = {"color": OTHER} if adam else {"color": DECOUPLED, "alpha": 1 - 0.18 * (index - 1)}
        axes[0].plot(curves["round"], row["medians"], label=label, **style)
    axes[0].set(xscale="log", yscale="log", xlabel="round", ylabel="|m̂| / √v̂")
    axes[0].set_title("median, full batches")
    for axis, clients in zip(axes[1:], (ratios.EVERYBODY, ratios.COHORTS), strict=True):
        rows = select(of_ratios["grid"], clients=clients, rates=ratios.PAPER)
        axis.set_visible(bool(rows))  # a quick run has fewer
        if rows:
            _against_steps(axis, rows, of_ratios["predicted"])
            axis.set_title(clients)


def _against_steps(axis: Any, rows: list[dict[str, Any]], predicted: list[dict[str, Any]]) -> None:
    steps = [row["T"] for row in rows]
    low, _, middle, _, high = zip(*(row["quantiles"] for row in rows), strict=True)
    axis.plot(steps, middle, color=DECOUPLED, marker="o", label="|m̂| / √v̂")
    axis.fill_between(steps, low, high, color=DECOUPLED, alpha=0.15, lw=0)
    axis.plot(steps, [row["scale"] for row in rows], "s", color=LOCAL, label="P : G")
    for key, style, label in (
        ("constant", "--", "constant gradients"),
        ("noise", ":", "white noise"),
    ):
        axis.plot(steps, [row[key] for row in predicted], style, color=QUIET, label=label)
    axis.set(xscale="log", yscale="log", xlabel="local steps T", ylim=(0.003, 3))
    axis.set_xticks(steps, [f"{T}" for T in steps])
    axis.tick_params(which="minor", labelbottom=False)


Fill = Callable[[dict[str, Any], list[Any]], None]
FIGURES: Mapping[str, tuple[int, Fill]] = {  # columns, and what fills them
    "deviation": (4, _deviation),
    "nearer": (3, _nearer),
    "network": (3, _network),
    "orders": (2, _orders),
    "equations": (4, _equations),
    "growth": (1, _growth),
    "ratios": (3, _ratios),
}
