"""Draw the curves of some algorithms as a small SVG that follows the colours of the page."""

from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 460, 240, 32, 112, 10, 34
LOWEST, HIGHEST = 0.6, 1.0
SPACE = 15  # between names at the ends of lines


def curves(rounds: Sequence[int], values: Mapping[str, Sequence[float]], muted: str) -> str:
    """Return the SVG of accuracies by round, one line each; the line `muted` is grey."""
    across, up = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def place(number: float, value: float) -> tuple[float, float]:
        share = (min(max(value, LOWEST), HIGHEST) - LOWEST) / (HIGHEST - LOWEST)
        return LEFT + across * number / rounds[-1], TOP + up * (1 - share)

    parts = []
    for value in (0.6, 0.7, 0.8, 0.9, 1.0):
        _, y = place(0, value)
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}h{across}"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.1f}</text>')
    for number in (0, rounds[-1] // 2, rounds[-1]):
        x, _ = place(number, LOWEST)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 14}" text-anchor="middle">{number}</text>')
    middle = LEFT + across / 2
    parts.append(f'<text x="{middle:.1f}" y="{HEIGHT - 1}" text-anchor="middle">round</text>')
    ends = sorted(values, key=lambda name: -values[name][-1])
    y_name = TOP - SPACE
    for name in ends:
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in map(place, rounds, values[name]))
        order = "muted" if name == muted else f"line{[*values].index(name)}"
        parts.append(f'<polyline class="{order}" points="{line}"/>')
        y_name = max(y_name + SPACE, place(0, values[name][-1])[1])
        at = f'x="{LEFT + across + 8}" y="{y_name + 4:.1f}"'
        parts.append(f'<text class="{order}" {at}>{escape(name)}</text>')
    label = f"Test accuracy by round of {', '.join(values)}"
    return (
        f'<svg class="curves" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )
