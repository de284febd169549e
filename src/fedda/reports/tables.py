"""Tables of results as text and in Markdown."""

import math
from collections.abc import Callable, Sequence
from html import escape

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

    Failures have columns only if there are any.
    """
    metric, threshold, last = rows[0].metric, rows[0].threshold, rows[0].last
    columns: dict[str, Callable[[Row], str]] = {
        "algorithm": lambda row: row.label,
        "seeds": lambda row: (
            f"{row.seeds} ({row.unfinished} unfinished)" if row.unfinished else str(row.seeds)
        ),
        metric: lambda row: interval_text(row.final),
        f"last {last}": lambda row: interval_text(row.mean_of_last),
        "rounds to threshold" if threshold is None else f"rounds to {threshold:g}": _rounds_text,
        "train loss": lambda row: interval_text(row.train_loss),
        "MB up": lambda row: interval_text(row.megabytes_up),
        "MB down": lambda row: interval_text(row.megabytes_down),
        "seconds": lambda row: interval_text(row.seconds, style=",.1f"),
    }
    if any(row.nonfinite_clients for row in rows):
        columns["non-finite"] = lambda row: str(row.nonfinite_clients)
    if any(row.skipped_rounds for row in rows):
        columns["skipped"] = lambda row: str(row.skipped_rounds)
    return [list(columns), *([cell(row) for cell in columns.values()] for row in rows)]


def meaning_of_interval(rows: Sequence[Row]) -> str:
    """Say what ± means in a table of these rows; empty if every row has one seed."""
    counts = {row.seeds for row in rows}
    if counts == {1}:
        return ""
    seeds = f"{min(counts)} seeds" if len(counts) == 1 else "seeds"
    return f"± 95 % interval over {seeds} (Student's t)"


def interval_text(interval: Interval | None, style: str | None = None) -> str:
    """Return a mean and its interval as text.

    Args:
        interval: A mean over seeds; None is shown as a dash.
        style: A format for both numbers. Default: four significant digits of the mean, and as many
            decimals of the interval.
    """
    if interval is None:
        return "-"
    mean, half = interval
    if math.isnan(mean):
        return "nan"
    if style is None and mean != 0 and not 1e-3 <= abs(mean) < 1e9:
        style = ".2e"
    elif style is None:
        style = f",.{min(4, max(0, 3 - math.floor(math.log10(abs(mean) or 1))))}f"
    # Seeds that agree exactly, as on bytes, have no interval worth a column.
    return f"{mean:{style}}" + (f" ± {half:{style}}" if half else "")


def _rounds_text(row: Row) -> str:
    if row.rounds_to_threshold is None:
        return "-" if row.threshold is None else "never"
    mean, half = row.rounds_to_threshold
    text = f"{mean:.1f}".removesuffix(".0") + (f" ± {half:.1f}" if half else "")
    return text if row.reached == row.seeds else f"{text} ({row.reached} of {row.seeds})"
