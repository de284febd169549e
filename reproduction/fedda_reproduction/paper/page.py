"""The page of a results folder, `README.md`. The text is written by hand, numbers are filled in.

A place is a pair of comments, `<!-- table: NAME -->...<!-- end -->` or `<!-- number: NAME -->...`.
`fedda reproduce --write` replaces the text between them. Names of tables are those of
experiments (`table2`), of claims (`F5`) and of `Filler.tables`. A number is one of

- `runs`: how many runs are finished;
- `F5 CIFAR-100`: a number of the check of a claim;
- `table2/FedAvg`: the mean over seeds of a run, by the name of its experiment and its label;
- `table2/FedOpt, SGDM - table2/FedDA, SGDM`: how many points higher the first ends than the second,
  over shared seeds.

Verdicts are written by hand, in a table whose lines begin with `| F5 |` and have the verdict in the
third column. They are compared with the computed ones but not replaced, because the text about them
must change too.
"""

import re
from pathlib import Path

from fedda.errors import InputError
from fedda.storage.files import write_whole
from fedda_reproduction.paper import cells, comparison, tables, verdicts
from fedda_reproduction.paper.cells import Cell
from fedda_reproduction.paper.experiments import experiments

PLACE = re.compile(r"<!-- (table|number): (.*?) -->.*?<!-- end -->", re.DOTALL)
VERDICT = re.compile(r"^\| (F\d+) \|[^|]*\| ([a-z ]+) \|", re.MULTILINE)


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
            "columns": tables.fedda_columns(self.finished),
            "tuned": verdicts.tuned_margins(self.finished),
            "tuning": tables.tuning(folder),
            "sources": tables.sources(self.finished),
            "corrections": tables.corrections_of(self.finished),
        }

    def page(self) -> str:
        """Return the page of the folder, or a plain one if it has none, with its places filled.

        Raises:
            InputError: There is a README.md without places, or with one of an unknown name.
        """
        path = self.folder / "README.md"
        text = path.read_text(encoding="utf-8") if path.exists() else self._plain()
        if not PLACE.search(text):
            raise InputError(
                f"{path} has no place to fill, such as <!-- table: table2 --><!-- end -->: it was "
                "not made for this command. Move it away, or give another --results."
            )
        return PLACE.sub(self._fill, text)

    def _plain(self) -> str:
        parts = ["# Results", "<!-- table: sources --><!-- end -->"]
        for name, experiment in experiments().items():
            if tables.counted(experiment, self.finished)[0]:
                parts += [f"## {experiment.title}", f"<!-- figure: {name} -->"]
                parts += [f"<!-- table: {name} --><!-- end -->"]
        return "\n\n".join(parts) + "\n"

    def _fill(self, place: re.Match[str]) -> str:
        kind, name = place.groups()
        try:
            content = self._table(name) if kind == "table" else self.number(name)
        except (KeyError, ValueError):
            raise InputError(
                f"{self.folder / 'README.md'} asks for the {kind} {name!r}, which is not known."
            ) from None
        return f"<!-- {kind}: {name} -->{content}<!-- end -->"

    def _table(self, name: str) -> str:
        if name in experiments():
            return f"\n\n{tables.section(experiments()[name], self.finished)}\n\n"
        return f"\n\n{tables.markdown(self.tables[name])}\n\n"

    def number(self, name: str) -> str:
        if name == "runs":
            return str(len(self.finished))
        if "/" not in name:
            claim, _, number = name.partition(" ")
            return self.checks[claim].numbers[number]
        runs = [self._runs(run) for run in name.split(" - ")]
        if len(runs) == 1:
            return f"{comparison.mean(runs[0]):.4f}"
        ours, theirs = runs
        mean, half = comparison.margin(ours, theirs)
        return f"{100 * mean:.1f}" + ("" if half is None else f" ± {100 * half:.1f}")

    def _runs(self, name: str) -> list[Cell]:
        experiment, _, label = name.partition("/")
        return comparison.runs(experiment, self.finished, lambda entry: entry.label)[label]

    def outdated(self, text: str) -> list[str]:
        """Return a message for each verdict on the page that differs from the computed one."""
        return [
            f"README.md says that {name} is {word}, and the numbers say {self.checks[name].verdict}"
            ": write its verdict and what was found again."
            for name, word in VERDICT.findall(text)
            if name in self.checks and word != self.checks[name].verdict
        ]


def write(folder: Path) -> list[str]:
    """Fill the page of a results folder. Return a message for each outdated verdict."""
    filler = Filler(folder)
    text = filler.page()
    write_whole(folder / "README.md", text)
    return filler.outdated(text)
