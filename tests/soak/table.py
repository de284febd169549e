"""The table of what a soak tried and found."""

import datetime
import json
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

from soak.kinds import KINDS

HEAD = """# What the soak tried, and what failed

Written by `make soak`, which adds a run to `results.json`. A try makes one disturbance or many;
`counts` adds them up. It fails if a round is lost or doubled, a traceback is printed, a process
takes more than a minute to end after a signal, code of a file is run, or the end differs from that
of an undisturbed run. `longest` is the longest try, on a machine that may be busy. `memory` is the
largest resident memory of a process of this kind.

Files of data sets are read in a child process with limits. What crashes or hangs there is
*contained*: an import ends with a message.
"""


def run_of(lines: list[dict[str, Any]], begun: datetime.datetime, seconds: float) -> dict[str, Any]:
    """Return the record of one run of the soak."""
    rows: dict[str, Any] = {}
    for line in lines:
        row = rows.setdefault(
            line["kind"], {"tries": 0, "counts": {}, "longest": 0.0, "memory": 0, "failures": []}
        )
        row["tries"] += 1
        row["counts"] = dict(Counter(row["counts"]) + Counter(line["counts"]))
        row["longest"] = round(max(row["longest"], line["seconds"]), 1)
        row["memory"] = max(row["memory"], line["memory"])
        if line["failure"]:
            last = line["failure"].strip().splitlines()[-1][:300]
            row["failures"].append({"seed": line["seed"], "error": last})
    return {
        "date": begun.isoformat(timespec="minutes"),
        "commit": commit(),
        "minutes": round(seconds / 60, 1),
        "kinds": rows,
    }


def commit() -> str:
    words = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    done = subprocess.run(words, cwd=Path(__file__).parent, capture_output=True, text=True)
    return done.stdout.strip() or "unknown"


def write(folder: Path, run: dict[str, Any]) -> None:
    """Add a run to the results in a folder, and write the table of all of them."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "results.json"
    runs = [*(json.loads(path.read_text()) if path.exists() else []), run]
    path.write_text(json.dumps(runs, indent=1) + "\n")
    (folder / "RESULTS.md").write_text(markdown(runs))


def markdown(runs: list[dict[str, Any]]) -> str:
    """Return the table over all runs, the failures by name, and the runs."""
    lines = [HEAD, "| kind | what | tries | counts | failures | longest | memory |"]
    lines.append("|:--|:--|--:|--:|--:|--:|--:|")
    total, failed = Counter[str](), []
    for name, kind in KINDS.items():
        own = [run["kinds"][name] for run in runs if name in run["kinds"]]
        if not own:
            continue
        counts = sum((Counter(row["counts"]) for row in own), Counter[str]())
        total += counts
        failures = [failure for row in own for failure in row["failures"]]
        failed += [f"- {name}, seed {each['seed']}: `{each['error']}`" for each in failures]
        cells = [name, kind.about, f"{sum(row['tries'] for row in own):,}"]
        cells += [", ".join(f"{count:,} {what}" for what, count in counts.items())]
        cells += [str(len(failures)), f"{max(row['longest'] for row in own):.0f} s"]
        cells += [f"{max(row['memory'] for row in own) / 1e9:.1f} GB"]
        lines.append(f"| {' | '.join(cells)} |")
    tried = sum(row["tries"] for run in runs for row in run["kinds"].values())
    in_all = ", ".join(f"{count:,} {what}" for what, count in total.items())
    lines += [
        "",
        f"In all: {tried:,} tries ({in_all}), {len(failed)} failures.",
        *failed,
        "",
        "Runs:",
    ]
    for run in runs:
        about = f"- {run['date']}, commit {run['commit']}, {run['minutes']} minutes"
        lines.append(about + (f": {run['note']}" if "note" in run else ""))
    return "\n".join(lines) + "\n"
