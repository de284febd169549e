"""Write tables and names as Markdown, without the markup that a name might hold."""

from collections.abc import Sequence
from html import escape

_RULES = {"l": ":--", "r": "--:"}
_SPECIAL = str.maketrans({character: f"\\{character}" for character in "\\|`"})


def escaped(text: str) -> str:
    """Return a text that Markdown shows as it is, on one line.

    HTML, code and the bars of tables are escaped. Emphasis is not, as names have underscores.
    """
    return escape(" ".join(text.split("\n")), quote=False).translate(_SPECIAL)


def table(rows: Sequence[Sequence[str]], align: str) -> str:
    """Return a table of texts, the header first; `align` has an l or an r for each column."""
    header, *body = [[escaped(cell) for cell in row] for row in rows]
    rule = [_RULES[side] for side in align]
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, rule, *body))
