"""The pages of a results folder. Text is written by hand, numbers and tables are filled in.

The pages are `README.md`, and `tables/*.md` with a page for each table. A place is a pair of
comments, `<!-- table: NAME -->...<!-- end -->` or `<!-- number: NAME -->...`. `fedda reproduce
--write` replaces the text between them. Names of tables are those of experiments (`table2`), of
claims (`F5`) and of `Filler.tables`. A number is one of

- `runs`: how many runs are finished, and `runs uncommitted`: how many of them are of such code;
- `F5 CIFAR-100`: a number of the check of a claim;
- `table2/FedAvg`: the mean over seeds of a run, by the name of its experiment and its label;
- `table2/FedOpt, SGDM - table2/FedDA, SGDM`: how many points higher the first ends than the second,
  with the interval of Welch's test.
"""

import math
import re
from functools import partial
from pathlib import Path

from fedda.errors import InputError
from fedda.storage.files import write_whole
from fedda_reproduction.paper import cells, comparison, tables, verdicts
from fedda_reproduction.paper.cells import Cell
from fedda_reproduction.paper.experiments import experiments

PLACE = re.compile(r"<!-- (table|number): (.*?) -->.*?<!-- end -->", re.DOTALL)


class Filler:
    """Fills the places of a page from a results folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.finished = cells.read_all(folder).finished
        beside = verdicts.read_beside(folder)
        if not self.finished and beside["theory"] is None:
            raise InputError(
                f"there is nothing to write about: {folder / 'cells'} holds no finished runs. Run "
                f"fedda reproduce digits --results {folder}, or give another --results."
            )
        self.checks = verdicts.checks(self.finished, **beside)
        self.tables: dict[str, tables.Rows] = {
            **{name: check.table for name, check in self.checks.items()},
            "claims": [
                {"claim": line.name, "the paper says": line.claim}
                | {"verdict": line.verdict, "what we found": line.found}
                for line in verdicts.lines(self.checks)
            ],
            "columns": tables.fedda_columns(self.finished),
            "server-rates": tables.server_rates(self.finished),
            "grids": tables.grids(folder, "cifar100"),
            "tuned": verdicts.tuned_margins(self.finished),
            "tuning": tables.tuning(folder),
            "sources": tables.sources(self.finished),
        }

    def pages(self) -> dict[Path, str]:
        """Return the pages of the folder, or a plain one if it has none, with places filled.

        Raises:
            InputError: No page has a place, or one has a place of an unknown name.
        """
        first = self.folder / "README.md"
        paths = [*first.parent.glob(first.name), *sorted(self.folder.glob("tables/*.md"))]
        texts = {path: path.read_text(encoding="utf-8") for path in paths} or {first: self._plain()}
        if not any(map(PLACE.search, texts.values())):
            raise InputError(
                f"{first} has no place to fill, such as <!-- table: table2 --><!-- end -->: it was "
                "not made for this command. Move it away, or give another --results."
            )
        return {path: PLACE.sub(partial(self._fill, path), text) for path, text in texts.items()}

    def _plain(self) -> str:
        parts = ["# Results", "<!-- table: sources --><!-- end -->"]
        for name, experiment in experiments().items():
            if tables.counted(experiment, self.finished)[0]:
                parts += [f"## {experiment.title}", f"<!-- figure: {name} -->"]
                parts += [f"<!-- table: {name} --><!-- end -->"]
        return "\n\n".join(parts) + "\n"

    def _fill(self, path: Path, place: re.Match[str]) -> str:
        kind, name = place.groups()
        try:
            content = self._table(name) if kind == "table" else self.number(name)
        except (KeyError, ValueError):
            raise InputError(f"{path} asks for the {kind} {name!r}, which is not known.") from None
        return f"<!-- {kind}: {name} -->{content}<!-- end -->"

    def _table(self, name: str) -> str:
        if name in experiments():
            return f"\n\n{tables.section(experiments()[name], self.finished)}\n\n"
        return f"\n\n{tables.markdown(self.tables[name])}\n\n"

    def number(self, name: str) -> str:
        if name == "runs":
            return str(len(self.finished))
        if name == "runs uncommitted":
            return str(sum(cell.uncommitted for cell in self.finished))
        if "/" not in name:
            claim, _, number = name.partition(" ")
            return self.checks[claim].numbers[number]
        runs = [self._runs(run) for run in name.split(" - ")]
        if len(runs) == 1:
            return f"{comparison.mean(runs[0]):.4f}"
        mean, low, high, _ = comparison.margin(*runs)
        points = round(100 * mean, 1) + 0.0  # -0.0 becomes 0.0
        return f"{points:.1f}" + ("" if math.isnan(low) else f" ± {50 * (high - low):.1f}")

    def _runs(self, name: str) -> list[Cell]:
        experiment, _, label = name.partition("/")
        return comparison.runs(experiment, self.finished, lambda entry: entry.label)[label]


def write(folder: Path) -> list[Path]:
    """Fill the pages of a results folder. Return their paths."""
    pages = Filler(folder).pages()
    for path, text in pages.items():
        write_whole(path, text)
    return list(pages)
