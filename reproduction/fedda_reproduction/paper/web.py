"""One web page of a results folder: verdicts, paper beside ours, curves, rates, provenance.

Everything on it is read off the cells and `theory.json`. What was not run yet is named, not drawn.
"""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from markupsafe import Markup

from fedda.errors import InputError
from fedda.report import figures
from fedda.report import html as page
from fedda.storage.files import write_whole
from fedda_reproduction.paper import (
    cells,
    corrections,
    experiments,
    glance,
    judging,
    panels,
    provenance,
    rates,
    tables,
    tuning,
    verdicts,
)
from fedda_reproduction.paper.cells import Cells
from fedda_reproduction.paper.experiments import Experiment
from fedda_reproduction.paper.judging import Verdict
from fedda_reproduction.paper.methods import title
from fedda_reproduction.paper.panels import Row
from fedda_reproduction.paper.tables import Line
from fedda_reproduction.paper.verdicts import Beside

TITLE = "The FedDA paper, run again"
PAPER = "*Accelerated Federated Learning with Decoupled Adaptive Optimization*, ICML 2022"
TRAINED = tables.ALWAYS_WHOLE  # the paper's figures 1 to 4, 7 and 8 are of these tables
COMPARED = ("table2", "table2-tff21", "table3", "table4", "table4-tff21", "table5")
LISTED = ("run", "paper", "ours", "seeds", "last", "not finite", "precision", "elsewhere")
VARIED = {  # what their horizontal axis is
    "figure5": ("local iterations", lambda entry: entry.values["local_work"]),
    "figure5-scaled": ("local iterations", lambda entry: entry.values["local_work"]),
    "figure6": ("rounds", lambda entry: entry.at),
}
MARKS = {
    judging.HOLDS: ("holds", "✓"),
    judging.SO_FAR: ("holds", "…"),
    judging.IN_PART: ("partly", "◐"),
    judging.FAILS: ("fails", "✗"),
    judging.OPEN: ("open", "?"),
}
CROPPED = (
    "The vertical axis has what methods come to after a twentieth of their training, if they end "
    "at least half as far from where they began as the best. The rest leaves the plot, and has no "
    "band."
)
BANDS = "Means over seeds; a band spans them, from the lowest to the highest."


def write(folder: Path, directory: Path) -> list[Path]:
    """Writes `results.html`, and its figures as PNG and PDF; gives their paths, the page first."""
    results, beside = cells.read_all(folder), verdicts.read_beside(folder)
    if not results.found and beside.theory is None:
        raise InputError(
            f"{folder} holds no finished run and no theory.json: run fedda reproduce digits "
            f"--results {folder}, or give another folder."
        )
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "results.html"
    made = _Page(results, directory)
    made.verdicts(beside)
    made.compared()
    made.notes(folder)
    made.curves()
    made.full_batches()
    made.varied()
    made.rates()
    made.others()
    made.tuning(folder)
    made.missing()
    made.provenance(beside.theory)
    write_whole(path, made.text())
    return [path, *made.files]


class _Page:
    """Collects the sections of the page, and its figures."""

    def __init__(self, results: Cells, directory: Path) -> None:
        self.results, self.directory = results, directory
        self.short = ""  # the answer, as HTML
        self.sections: list[tuple[str, str, str]] = []  # name, heading, HTML
        self.files: list[Path] = []
        self.plots = 0

    def text(self) -> str:
        links = "".join(
            f"<a href='#{name}'>{escape(heading)}</a>\n" for name, heading, _ in self.sections
        )
        body = "".join(
            f"<section id='{name}'><h2>{escape(heading)}</h2>\n{html}</section>\n"
            for name, heading, html in self.sections
        )
        return page.render(
            "page.html",
            title=TITLE,
            css=Markup(_CSS),
            body=Markup(f"{self.short}<nav>{links}</nav>\n{body}"),
            plotly=page.plotly_script() if self.plots else "",
        )

    # ------------------------------------------------------------------------------------ sections

    def verdicts(self, beside: Beside) -> None:
        found = verdicts.verdicts(self.results, beside)
        count = Counter(each.verdict for each in found)
        marks = " ".join(_mark(name, f": {count[name]}") for name in MARKS if count[name])
        runs = provenance.count(self.results.found, "finished run")
        self.short = f"<p>{_prose(PAPER)}: {len(found)} claims, {runs}.</p>\n<p>{marks}</p>\n"
        if again := corrections.paragraph(self.results.found):
            self.short += f"<p>{_prose(again)}</p>\n"
        self.short += glance.html(self.results.found)
        listed = "".join(map(_verdict, found))
        self._add(
            "verdicts",
            "What becomes of the paper's claims",
            f"<p class='small'>{_prose(verdicts.MEANING)}</p>\n"
            f"<ul class='verdicts'>{listed}</ul>\n",
        )

    def compared(self) -> None:
        how = (
            "Ours is the mean over the evaluations of the last 100 rounds, with a 95 % interval "
            "over seeds where there are two or more; last is the value after the last round. The "
            "paper prints one number without seeds; elsewhere is what the authors of FedOpt report."
        )
        made = self._tables(experiments.experiments()[name] for name in COMPARED)
        if made:
            self._add("tables", "Paper beside ours", f"<p class='small'>{how}</p>\n{made}")

    def notes(self, folder: Path) -> None:
        """What a person wrote into `NOTES.md`: a heading, and points."""
        path = folder / "NOTES.md"
        if path.exists():
            heading, *points = path.read_text(encoding="utf-8").strip().split("\n- ")
            listed = "".join(f"<li>{_prose(point)}</li>\n" for point in points)
            self._add("notes", heading.strip("# \n"), f"<ul>{listed}</ul>\n")

    def curves(self) -> None:
        for name in TRAINED:
            task = experiments.experiments()[name].tasks[0]
            drawn = "".join(
                self._row(row, CROPPED if any(one.y_range for one in row.panels) else "")
                for row in panels.training(name, self.results.found)
            )
            if drawn:
                note = f"<p class='small'>{BANDS}</p>\n"
                self._add(f"curves-{task}", f"{title(task)}: training", note + drawn)

    def full_batches(self) -> None:
        if row := panels.full_batches(self.results.found):
            note = f"FedDA's best with such rounds, and the best other. {BANDS}"
            self._add("full-batches", row.title, self._row(row, note))

    def varied(self) -> None:
        html = ""
        for name, (x_label, setting) in VARIED.items():
            row = panels.varied(name, self.results.found, x_label, setting)
            if row is not None:
                notes = experiments.experiments()[name].notes
                html += self._row(row, " ".join([*notes, BANDS]))
        if html:
            self._add("varied", "Local iterations and rounds", html)

    def rates(self) -> None:
        html = ""
        for name in rates.TABLES:
            experiment = experiments.experiments()[name]
            strips = rates.strips(name, self.results.found)
            if strips:
                self.files += rates.draw(name, strips, self.directory)
                drawn = "".join(map(rates.html, strips))
                html += f"<h3>{escape(experiment.title)}</h3>\n<div class='side'>{drawn}</div>\n"
        if html:
            how = (
                "A stronger colour is a higher value of its strip. Pairs of rates that the paper "
                "has equal numbers for are not counted; if all of ours failed, none agrees."
            )
            if title("stackexchange") in html:
                how += f" {experiments.NOT_STACK_OVERFLOW}"
            self._add(
                "rates", "Sensitivity to rates", f"<p class='small'>{escape(how)}</p>\n{html}"
            )

    def others(self) -> None:
        """Experiments that are shown nowhere else."""
        shown = {*COMPARED, *VARIED, *rates.TABLES}
        every = experiments.experiments().values()
        made = self._tables(each for each in every if each.name not in shown)
        if made:
            self._add("others", "Beyond the paper", made)

    def tuning(self, folder: Path) -> None:
        if rows := tuning.table(folder):
            told = f"<p class='small'>{_prose(tuning.MEANING)}</p>\n"
            self._add("tuning", tuning.HEADING, told + page.part("table", rows, "tuning-losses"))

    def missing(self) -> None:
        """How much there is of each experiment that is not complete."""
        listed = ""
        for each in experiments.experiments().values():
            ran, wanted = tables.counted(each, self.results.found)
            if ran < wanted:
                name = each.title.partition(":")[0]
                listed += f"<li>{escape(name)}: {ran} of {wanted} runs</li>\n"
        if listed:
            self._add("missing", "Not run yet", f"<p>Finished so far:</p>\n<ul>{listed}</ul>\n")

    def provenance(self, theory: Mapping[str, Any] | None) -> None:
        html = provenance.html(self.results, theory)
        self._add("provenance", "Where the numbers are from", html)

    # --------------------------------------------------------------------------------------- parts

    def _add(self, name: str, heading: str, html: str) -> None:
        self.sections.append((name, heading, html))

    def _tables(self, chosen: Iterable[Experiment]) -> str:
        """The experiments that were run at least in part; of the paper's, what is missing too."""
        html = ""
        for experiment in chosen:
            lines = tables.lines(experiment, self.results.found)
            ran, wanted = tables.counted(experiment, self.results.found)
            if not ran:
                continue
            if experiment.name not in tables.ALWAYS_WHOLE:
                lines = [line for line in lines if line.seeds]
            state = f"{ran} of {wanted} runs."
            note = _prose(" ".join([state, *experiment.notes]))
            html += f"<h3>{escape(experiment.title)}</h3>\n<p class='small'>{note}</p>\n"
            html += page.part("table", _listing(lines), experiment.name)
        return html

    def _row(self, row: Row, note: str = "") -> str:
        """Plots side by side, and their file."""
        self.files += figures.draw(row.panels, self.directory, row.name)
        plots = ""
        for panel in row.panels:
            self.plots += 1
            drawn = page.part("plot", panel)
            plots += f"<figure><figcaption>{escape(panel.title)}</figcaption>{drawn}</figure>\n"
        told = f"<p class='small'>{_prose(note)}</p>\n" if note else ""
        return f"<h3>{escape(row.title)}</h3>\n{told}<div class='side'>{plots}</div>\n"


def _listing(lines: Sequence[Line]) -> list[list[str]]:
    """The lines as text, with the settings; what a phone shows first is the paper and ours."""
    header, *body = tables.rows(lines)
    ours = header.index("ours")
    for row, line in zip(body, lines, strict=True):
        row[ours] = row[ours] if line.seeds else "not run"
    order = [header.index(name) for name in LISTED if name in header]
    settings = ("settings", *(line.settings for line in lines))
    return [
        [*(row[at] for at in order), own]
        for row, own in zip((header, *body), settings, strict=True)
    ]


def _verdict(each: Verdict) -> str:
    numbers = f"<p class='small'>{_prose(each.measured)}</p>"
    folded = f"<details><summary>The numbers</summary>{numbers}</details>" if each.measured else ""
    return (
        f"<li id='{each.name}'><h3>{each.name} {_mark(each.verdict)}<br>{_prose(each.claim)}</h3>"
        f"<p>{_prose(each.told)}</p>{folded}</li>\n"
    )


def _mark(verdict: str, more: str = "") -> str:
    """A verdict in its colour, with a sign for who sees none."""
    kind, sign = MARKS[verdict]
    return f"<span class='verdict {kind}'>{sign} {escape(verdict)}{more}</span>"


def _prose(text: str) -> str:
    """A text as HTML; what stands between backticks is code, and between stars, bold or slanted."""
    text = escape(text)
    for mark, tag in (("`", "code"), (r"\*\*", "b"), (r"\*", "i")):
        text = re.sub(f"{mark}(.+?){mark}", rf"<{tag}>\1</{tag}>", text)
    return text


# A plot takes the width that is there when it is read, hence columns that do not depend on what is
# still to come (auto-fill), and room for the scroll bar.
_CSS = """
html { overflow-y: scroll; }
:root { --good: #116329; --fair: #7d4e00; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --good: #4ac26b; --fair: #e3b341; --bad: #ff8a80; } }
h2 { margin-top: 3rem; padding-top: 1rem; border-top: 1px solid var(--line); font-size: 1.3rem; }
h3 { margin: 2rem 0 .25rem; font-size: 1.05rem; }
a { color: inherit; }
nav { display: flex; flex-wrap: wrap; gap: .25rem 1rem; font-size: .9rem; }
@media (max-width: 40rem) { nav { flex-wrap: nowrap; overflow-x: auto; white-space: nowrap; } }
.verdicts { list-style: none; margin: 0; padding: 0; max-width: 50rem; }
.verdicts li { padding: .75rem 0; border-bottom: 1px solid var(--line); }
.verdicts :is(h3, p) { margin: 0 0 .25rem; }
.verdicts details { border: 0; }
.verdicts summary { padding: 0; color: var(--quiet); font-size: .9rem; }
#glance :is(th, td) { padding: .15rem .4rem; }
#glance :is(th, td):first-child { min-width: 0; padding-left: 0; white-space: nowrap; }
#glance :is(th, td):nth-child(4) { text-align: left; }
.verdict {
  white-space: nowrap; font-size: .8rem; padding: .1rem .5rem; border-radius: .25rem;
  color: var(--page);
}
.holds { background: var(--good); } .partly { background: var(--fair); }
.fails { background: var(--bad); } .open { background: var(--quiet); }
#missing ul { columns: 20rem; padding-left: 1.2rem; }
.scroll { margin-top: .75rem; }
.side {
  display: grid; gap: 1rem 2rem;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 22rem), 1fr));
}
.side > * { min-width: 0; }
figure { margin: .5rem 0 0; }
figcaption { font-weight: 600; font-size: .9rem; }
.strip { width: 100%; }
.strip caption { text-align: left; font-size: .85rem; padding-bottom: .25rem; }
.strip :is(td, th) { text-align: center; }
.strip :is(th, td):first-child { min-width: 4.5rem; text-align: left; }
:is(#tables, #others) :is(th, td):last-child { text-align: left; }
#others :is(th, td):first-child { min-width: 9.5rem; }
"""
