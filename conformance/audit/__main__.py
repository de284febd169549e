"""Run the audit: `python -m conformance.audit [--work DIR] [LIBRARY ...]`. `make audit` does it.

Each library is installed from the package index into an environment of its own, in DIR. Its adapter
runs there. Results of libraries that are not named stay.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.peers import environments
from conformance.audit import report
from conformance.audit.compare import hyper_of
from conformance.audit.trials import LIBRARIES, TRIALS
from conformance.generate import formatted

ROOT = Path(__file__).parents[2]
MOST_SECONDS = 600


def run_adapter(name: str, work: Path) -> None:
    """Write the results of a library to its file in `work`."""
    library, wanted, out = LIBRARIES[name], work / f"{name}-trials.json", result_of(name, work)
    trials = {trial.name: hyper_of(trial) for trial in TRIALS if trial.library == name}
    wanted.write_text(json.dumps(trials))
    python = environments.interpreter(library.environment, work)
    command = [python, "-m", f"conformance.audit.{library.adapter}", str(wanted), str(out)]
    log = work / f"{name}.log"
    with log.open("w") as output:
        done = subprocess.run(
            command,
            cwd=work,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=output,
            stderr=subprocess.STDOUT,
            timeout=MOST_SECONDS,
        )
    if done.returncode:
        sys.exit(f"{library.title}: the adapter failed. Its output is in {log}")


def result_of(name: str, work: Path) -> Path:
    return work / f"{name}-results.json"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, default=ROOT / ".venv-audit")
    parser.add_argument("libraries", nargs="*", metavar="LIBRARY", default=list(LIBRARIES))
    arguments = parser.parse_args()
    work = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    if unknown := set(arguments.libraries) - set(LIBRARIES):
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(LIBRARIES)}")
    results = report.read_results() if report.RESULTS.exists() else {"libraries": {}}
    results["date"] = datetime.date.today().isoformat()
    for name in arguments.libraries:
        print(f"running {LIBRARIES[name].title}", file=sys.stderr, flush=True)
        run_adapter(name, work)
        results["libraries"][name] = json.loads(result_of(name, work).read_text())
    report.RESULTS.write_text(formatted(results) + "\n")
    unexplained = report.write_pages(results)
    print(report.short_table(results))
    for trial, found in unexplained:
        print(f"{trial.library}, {trial.name}: unexplained. Its {found.first}", file=sys.stderr)
    sys.exit(len(unexplained) > 0)


if __name__ == "__main__":
    main()
