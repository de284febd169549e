"""Draw the figure of `docs/momentum.md`: `python -m fedda_reproduction.theory.lag_figures`."""

from pathlib import Path

from fedda.reports import figures
from fedda.reports.figures import Line, Panel
from fedda.reports.statistics import Curve
from fedda_reproduction.theory import equivalence

HERE = Path("docs/momentum")
STEPS = (2, 5, 10)
LENGTHS = (0.00125, 0.0025, 0.005, 0.01, 0.02, 0.04)
LOCAL = (1, 2, 3, 5, 7, 10, 14, 20)
B = 0.9


def panels() -> list[Panel]:
    """Return the distance to FedAvgM against the step, and the largest stable step against T."""
    problem, lines = equivalence.case(), []
    for style, T in enumerate(STEPS):
        found = [equivalence.distance(problem, b=B, T=T, eta=h / T) for h in LENGTHS]
        lines.append(_line(f"T = {T}", style, LENGTHS, [each.measured for each in found]))
        lines.append(
            _line(f"T = {T}, unexplained", style + 11, LENGTHS, [one.unexplained for one in found])
        )
    largest = [
        _line(name, style, LOCAL, [equivalence.largest_step(B, T, fedda) for T in LOCAL])
        for style, (name, fedda) in enumerate({"FedDA+SGDM": True, "FedAvgM": False}.items())
    ]
    labels = {
        "distance": ("step of a round", "distance to FedAvgM", lines),
        "stable": ("local steps T", "largest stable step x curvature", largest),
    }
    return [Panel(name, *label, figures.LOG, markers=True) for name, label in labels.items()]


def _line(label: str, style: int, x: tuple[float, ...], values: list[float]) -> Line:
    return Line(Curve(label=label, x=list(x), mean=values, low=values, high=values), style)


if __name__ == "__main__":
    HERE.mkdir(parents=True, exist_ok=True)
    figures.draw(panels(), HERE, "lag")
