"""`README.md` of a results folder: FedDA's place, verdicts, paper beside ours, from its files."""

from pathlib import Path

from fedda.errors import InputError
from fedda.report.tables import markdown_text
from fedda.storage.files import write_whole
from fedda_reproduction.paper import corrections, experiments, glance, tuning, verdicts
from fedda_reproduction.paper.cells import Cells
from fedda_reproduction.paper.tables import section

SIGNED = "Written by `fedda reproduce --write`"  # only a file that says so is replaced
INTRO = f"""# Results

{SIGNED} from the files in `cells/`, one for each finished run. Do not
edit it. `fedda reproduce --list` names the experiments; `fedda reproduce table3` adds what is
missing of one, and `fedda reproduce --add DIRECTORY` takes over a run of `fedda run`.

*Ours* is the mean over the evaluations of the last 100 rounds, with a 95 % interval (Student's t)
over seeds where there are two or more, and *last* the value after the last round. The paper prints
one number without seeds. *Elsewhere* is what the authors of FedOpt report for their methods. *Not
finite* counts uploads of clients that were left out for that, and rounds skipped. `-`: not run yet.
Where some seeds did well and some failed, an interval can be larger than its mean.
The seconds in a cell are those of a device that other runs may have shared. Small models of one
program are trained together, which rounds otherwise than alone: `fedda run` with the same seed can
end a little elsewhere.
"""


def readme(folder: Path, results: Cells) -> str:
    """The whole text; before the tables, what a person wrote into the folder's `NOTES.md`."""
    made = [section(each, results.found) for each in experiments.experiments().values()]
    notes = folder / "NOTES.md"
    own = [notes.read_text(encoding="utf-8").strip()] if notes.exists() else []
    told = verdicts.section(results, verdicts.read_beside(folder))
    first = [text] if (text := glance.markdown(results.found)) else []
    again = [text] if (text := corrections.paragraph(results.found)) else []
    parts = [INTRO.strip(), *again, *first, told, *own, *made, *tuning.section(folder)]
    return "\n\n".join([*parts, _sources(results)]) + "\n"


def _sources(results: Cells) -> str:
    """Where the numbers are from."""
    data = sorted(
        {
            (one.config.task, one.content.get("clients", 0), one.content["data"].get("words", ""))
            for one in results.found
        }
    )
    devices = sorted({one.content["device"] for one in results.found})
    lines = ["## Where the numbers are from", ""]
    lines += [
        f"- {task}" + (f", {clients} clients" if clients else "") + f": {markdown_text(words)}"
        for task, clients, words in data
        if words
    ]
    lines += [f"- Trained on {markdown_text(device)}." for device in devices]
    return "\n".join([*lines, f"- {len(results.found)} runs in all."])


def write(folder: Path, results: Cells) -> Path:
    path = folder / "README.md"
    beside = verdicts.read_beside(folder)
    if not results.found and beside.theory is None:
        raise InputError(
            f"there is nothing to write about: {folder / 'cells'} holds no finished runs. Run "
            f"fedda reproduce digits --results {folder}, or give another --results."
        )
    if path.exists() and SIGNED not in path.read_text(encoding="utf-8"):
        raise InputError(
            f"{path} was not written by this command, which would replace it. Move it away, or "
            "give another --results."
        )
    write_whole(path, readme(folder, results))
    return path
