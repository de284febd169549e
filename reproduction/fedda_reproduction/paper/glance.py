"""FedDA in a few lines: the paper's number, ours, and how ours stands to the best other method."""

from collections.abc import Sequence
from html import escape

from fedda.report.tables import markdown_table
from fedda_reproduction.paper import evidence, experiments, rivals, tables
from fedda_reproduction.paper.cells import Cell
from fedda_reproduction.paper.methods import OPTIMISER_NAMES
from fedda_reproduction.paper.tables import Line

# A phone shows the first four columns.
HEADER = ("FedDA", "paper", "ours", "it is", "best other, ours", "best other, paper", "seeds")
PLACES = {1: "▲ ahead", 0: "= level", -1: "▼ behind"}
MEANING = (
    "Each stands against the best other method that was run in its column of the table; ± is a "
    "95 % interval over seeds. Level: the 95 % interval of their difference over shared seeds "
    "includes 0, so that they are not told apart; of one seed, they differ by at most 1 %. Of "
    "squared errors, lower is better. In table 5 ours are of Stack Exchange, not of the paper's "
    "Stack Overflow."
)


def html(found: Sequence[Cell]) -> str:
    """A table with a group for each of the paper's tables of methods; empty without a FedDA."""
    body = ""
    for name in tables.ALWAYS_WHOLE:
        if lines := rows(name, found):
            heading = escape(experiments.experiments()[name].title)
            body += f"<tr><th colspan='{len(HEADER)}'><a href='#{name}'>{heading}</a></th></tr>\n"
            body += "".join(_line(line, "td") for line in lines)
    if not body:
        return ""
    return (
        f"<div class='scroll'><table id='glance'>\n<thead>{_line(HEADER, 'th')}</thead>\n"
        f"<tbody>{body}</tbody></table></div>\n<p class='small'>{escape(MEANING)}</p>\n"
    )


def markdown(found: Sequence[Cell]) -> str:
    """The same as a section of a text; empty without a FedDA."""
    body = [
        [experiments.experiments()[name].title.partition(",")[0], *line]
        for name in tables.ALWAYS_WHOLE
        for line in rows(name, found)
    ]
    if not body:
        return ""
    listed = markdown_table([["table", *HEADER], *body], "l" * (len(HEADER) + 1))
    return "\n\n".join(["## Does FedDA win?", listed, MEANING])


def _line(cells: Sequence[str], tag: str) -> str:
    return f"<tr>{''.join(f'<{tag}>{escape(cell)}</{tag}>' for cell in cells)}</tr>\n"


def rows(name: str, found: Sequence[Cell]) -> list[list[str]]:
    """Each column of a table in which FedDA was run, as text."""
    lines = evidence.lines_of(name, found)
    entries = experiments.experiments()[name].entries
    by_algorithm = {entry.algorithm: lines[entry.label] for entry in entries}
    made = []
    for column in rivals.columns(name, found):
        if not column.own:
            continue
        own = f"fedda-{column.optimiser}"
        sign = 1 if column.own[0].content["higher_is_better"] else -1
        others = [
            by_algorithm[each] for each in evidence.columns(name)[column.optimiser] if each != own
        ]
        printed = max(others, key=lambda line: sign * (line.paper or 0.0))
        fedda, best = by_algorithm[own], by_algorithm.get(column.rival or "")
        made.append(
            [
                OPTIMISER_NAMES[column.optimiser],
                tables.text(fedda.paper),
                f"{tables.text(fedda.ours)}{fedda.mark}",
                "-" if column.order is None else PLACES[column.order],
                "-" if best is None else f"{_method(best)} {tables.text(best.ours)}{best.mark}",
                f"{_method(printed)} {tables.text(printed.paper)}",
                str(fedda.seeds),
            ]
        )
    return made


def _method(line: Line) -> str:
    return line.label.partition(",")[0]
