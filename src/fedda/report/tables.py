"""Tables as text and in Markdown."""

import math
from collections.abc import Sequence
from html import escape

from fedda.report.statistics import Interval, Row

_RULES = {"l": ":--", "r": "--:"}
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
    rule = [_RULES[side] for side in align or "l".ljust(len(header), "r")]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *body))


def text_table(rows: Sequence[Row]) -> list[list[str]]:
    """The table as text: the header, then a line of cells for each row.

    Failures have columns only where there were any.
    """
    metric, threshold, last = rows[0].metric, rows[0].threshold, rows[0].last
    header = [
        "algorithm",
        "seeds",
        metric,
        f"last {last}",
        "rounds to threshold" if threshold is None else f"rounds to {threshold:g}",
        "train loss",
        "MB up",
        "MB down",
        "seconds",
    ]
    lines = [
        [
            row.label,
            f"{row.seeds} ({row.unfinished} unfinished)" if row.unfinished else str(row.seeds),
            interval_text(row.final),
            interval_text(row.mean_of_last),
            _rounds_text(row),
            interval_text(row.train_loss),
            interval_text(row.megabytes_up),
            interval_text(row.megabytes_down),
            interval_text(row.seconds, style=",.1f"),
        ]
        for row in rows
    ]
    for name, counts in failures(rows).items():
        header.append(name)
        for line, count in zip(lines, counts, strict=True):
            line.append(str(count))
    return [header, *lines]


def failures(rows: Sequence[Row]) -> dict[str, list[int]]:
    """What went wrong anywhere, by the name of its column: how often in each row."""
    counted = {
        "non-finite": [row.nonfinite_clients for row in rows],
        "skipped": [row.skipped_rounds for row in rows],
    }
    return {name: counts for name, counts in counted.items() if any(counts)}


def meaning_of_interval(rows: Sequence[Row]) -> str:
    """What ± says in a table of these rows; empty where no row has several seeds."""
    counts = {row.seeds for row in rows}
    if counts == {1}:
        return ""
    seeds = f"{min(counts)} seeds" if len(counts) == 1 else "seeds"
    return f"± 95 % interval over {seeds} (Student's t)"


def interval_text(found: Interval | None, style: str | None = None) -> str:
    if found is None:
        return "-"
    if math.isnan(found.mean):
        return "nan"
    size = abs(found.mean)
    if style is None and size != 0 and not 1e-3 <= size < 1e9:
        style = ".2e"
    elif style is None:  # four significant digits, and an interval with as many decimals
        style = f",.{min(4, max(0, 3 - math.floor(math.log10(size or 1))))}f"
    # Seeds that agree exactly, as on bytes, have no interval worth a column.
    return f"{found.mean:{style}}" + (f" ± {found.half:{style}}" if found.half else "")


def _rounds_text(row: Row) -> str:
    if row.rounds_to_threshold is None:
        return "-" if row.threshold is None else "never"
    mean, half = row.rounds_to_threshold
    text = f"{mean:.1f}".removesuffix(".0") + (f" ± {half:.1f}" if half else "")
    return text if row.reached == row.seeds else f"{text} ({row.reached} of {row.seeds})"
