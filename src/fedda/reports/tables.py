"""Tables of results as text and in Markdown."""

import math
from collections.abc import Callable, Sequence
from html import escape

from fedda.reports.clients import ClientRow
from fedda.reports.statistics import Interval, Row

_SPECIAL = str.maketrans({character: f"\\{character}" for character in "\\|`"})


def markdown_text(text: str) -> str:
    """Escape a text for Markdown and put it on one line.

    HTML, code and the bars of tables are escaped. Emphasis is not, as names have underscores.
    """
    return escape(" ".join(text.split("\n")), quote=False).translate(_SPECIAL)


def markdown_table(rows: Sequence[Sequence[str]], align: str = "") -> str:
    """Return a Markdown table.

    Args:
        rows: The cells of each row; the first row is the header.
        align: An `l` or `r` for each column. Default: the first to the left, the others to the
            right.
    """
    header, *body = [[markdown_text(cell) for cell in row] for row in rows]
    rule = [":--" if side == "l" else "--:" for side in align or "l".ljust(len(header), "r")]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *body))


def text_table(rows: Sequence[Row]) -> list[list[str]]:
    """Return the cells of a comparison as text; the first row is the header.

    Standings have a column if there are rows to compare, and failures if there are any.
    """
    metric, threshold, last = rows[0].metric, rows[0].threshold, rows[0].last
    goal = "threshold" if threshold is None else f"{threshold:g}"
    columns: dict[str, Callable[[Row], str]] = {"algorithm": lambda row: row.label}
    if len(rows) > 1:
        columns["standing"] = lambda row: row.standing
    columns |= {
        "seeds": lambda row: (
            f"{row.seeds} ({row.unfinished} unfinished)" if row.unfinished else str(row.seeds)
        ),
        metric: lambda row: interval_text(row.final),
        f"last {last}": lambda row: interval_text(row.mean_of_last),
        f"rounds to {goal}": lambda row: _to_threshold(row, row.rounds_to_threshold),
        f"MB to {goal}": lambda row: _to_threshold(row, row.megabytes_to_threshold),
        "train loss": lambda row: interval_text(row.train_loss),
        "MB up": lambda row: interval_text(row.megabytes_up),
        "MB down": lambda row: interval_text(row.megabytes_down),
        "seconds": lambda row: interval_text(row.seconds),
    }
    if any(row.nonfinite_clients for row in rows):
        columns["non-finite"] = lambda row: str(row.nonfinite_clients)
    if any(row.skipped_rounds for row in rows):
        columns["skipped"] = lambda row: str(row.skipped_rounds)
    return [list(columns), *([cell(row) for cell in columns.values()] for row in rows)]


def client_table(rows: Sequence[ClientRow]) -> list[list[str]]:
    """Return the cells of a table about clients as text; the first row is the header."""
    header = ["algorithm", "clients", "mean", "spread", "worst tenth"]
    lines = [
        [row.label, str(row.clients), *map(interval_text, (row.mean, row.spread, row.worst))]
        for row in rows
    ]
    return [header, *lines]


def interval_text(interval: Interval | None) -> str:
    """Return a mean and its interval as text. None is shown as a dash.

    The interval has one digit, or two if the first is a 1, and the mean as many decimals. Without
    an interval the mean has three digits.
    """
    if interval is None:
        return "-"
    mean, half = interval
    if math.isnan(mean):
        return "nan"
    if mean and not 1e-3 <= abs(mean) < 1e9:
        return f"{mean:.1e}" + (f" ± {half:.1e}" if half else "")
    # Seeds that agree exactly, as on bytes, have no interval worth a column.
    if not half:
        return f"{mean:,.{0 if mean == round(mean) else max(0, _decimals(mean, 3))}f}"
    decimals = _decimals(half, 1)
    if round(half * 10**decimals) == 1:
        decimals += 1
    decimals = max(0, decimals)
    return f"{mean:,.{decimals}f} ± {half:,.{decimals}f}"


def _decimals(number: float, digits: int) -> int:
    """Return how many decimals show this many digits of a number."""
    return digits - 1 - math.floor(math.log10(abs(number) or 1))


def _to_threshold(row: Row, interval: Interval | None) -> str:
    if interval is None:
        return "-" if row.threshold is None else "never"
    text = interval_text(interval)
    return text if row.reached == row.seeds else f"{text} ({row.reached} of {row.seeds})"
