"""The tables of README.md and of the page about trust, from the results."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from conformance.audit.compare import UNEXPLAINED, Judgement, judge
from conformance.audit.trials import LIBRARIES, TRIALS, Trial

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "results.json"
README, TRUST = FOLDER / "README.md", FOLDER.parents[1] / "docs" / "trust.md"
BEGIN, END = "<!-- written by make audit -->\n", "<!-- end -->"
# The columns of the short table. A trial belongs to the first word of its name.
COLUMNS = ("FedAvg", "FedProx", "FedAvgM", "FedAdagrad", "FedAdam", "FedYogi", "SCAFFOLD", "Mime",
           "MimeLite")  # fmt: skip
SYMBOLS = {"control": "c", "second": "v", "momentum": "m", "params": "model"}
Results = Mapping[str, Any]


class Row(NamedTuple):
    """A trial with its result."""

    trial: Trial
    found: Judgement


def read_results(path: Path = RESULTS) -> dict[str, Any]:
    """Return the results: by library its version, and by trial the models after each round."""
    content: dict[str, Any] = json.loads(path.read_text())
    return content


def judged(results: Results) -> list[Row]:
    """Return the trials with their results."""
    found = []
    for trial in TRIALS:
        result = results["libraries"][trial.library]["trials"][trial.name]
        found.append(Row(trial, judge(trial, result["models"], result["dtype"])))
    return found


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> list[str]:
    return [line(*head), line(*["---"] * len(head)), *(line(*cells) for cells in rows)]


def cells(row: Row) -> tuple[str, ...]:
    """Return a row of the long table."""
    trial, found = row
    changed = "".join(f", `{name}={value:g}`" for name, value in trial.hyper.items())
    equals, where, distance = "the vector", "", ""
    if found.first is not None:
        equals = "" if trial.reading is None else trial.reading.name
        where = f"{SYMBOLS[found.first.quantity]}, round {found.first.round}"
        distance = f"{found.distance:.2g}"
    return (
        trial.name,
        f"`{trial.implementation}`",
        f"`{trial.algorithm}`, `{trial.case}`{changed}",
        "**different**" if found.verdict == "different" else found.verdict,
        f"{equals} ({found.error:.0e})",
        where,
        distance,
    )


HEAD = ("trial", "implementation", "vector", "verdict", "equals (error)", "differs from the vector "
        "first in", "after round 5 by")  # fmt: skip


def long_table(results: Results) -> str:
    """Return a section for each library: its table, and the notes on it."""
    rows, lines = judged(results), []
    for key, library in LIBRARIES.items():
        of_library = [row for row in rows if row.trial.library == key]
        notes: dict[str, list[str]] = {}
        for trial, _ in of_library:
            if trial.note:
                notes.setdefault(trial.note, []).append(trial.name)
        version = results["libraries"][key]["version"]
        lines += ["", f"### {library.title} {version}", ""]
        lines += [*table(HEAD, [cells(row) for row in of_library]), ""]
        lines += [f"- *{'*, *'.join(names)}*: {note}" for note, names in notes.items()]
    return "\n".join(lines).strip() + "\n"


def short_table(results: Results) -> str:
    """Return the verdicts of each library and algorithm. An implementation may have several."""
    short = {"another reading": "reading", "different": "**different**"}
    rows = []
    for key, library in LIBRARIES.items():
        verdicts: dict[str, dict[str, None]] = {column: {} for column in COLUMNS}
        for trial, found in judged(results):
            if trial.library == key:
                column = trial.name.replace(",", "").split()[0]
                verdicts[column][short.get(found.verdict, found.verdict)] = None
        name = f"{library.title} {results['libraries'][key]['version']}"
        rows.append((name, *(", ".join(verdicts[column]) for column in COLUMNS)))
    return "\n".join(table(("", *COLUMNS), rows)) + "\n"


def with_table(text: str, table: str) -> str:
    """Return the text of a page with its table replaced."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


def write_pages(results: Results) -> list[Row]:
    """Write the tables into the two pages. Return the trials that nothing explains."""
    for page, content in ((README, long_table(results)), (TRUST, short_table(results))):
        page.write_text(with_table(page.read_text(), content))
    return [row for row in judged(results) if row.found.verdict == UNEXPLAINED]
