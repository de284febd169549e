"""`python -m fedda_reproduction.study FOLDER`: `fedda study` without its command line's packages.

It is for a machine with many cores on which nothing can be installed. Where git is, `fedda study`
then names the commit of the files that come back.
"""

import argparse
from pathlib import Path

from fedda.simulate import devices
from fedda_reproduction.study import study

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m fedda_reproduction.study", description=__doc__)
    parser.add_argument("folder", type=Path, help="where the files of the conditions are kept")
    parser.add_argument("--small", action="store_true", help="two conditions, four methods")
    parser.add_argument("--time", type=float, metavar="SECONDS", help="then begin nothing more")
    parser.add_argument("--workers", type=int, default=1, help="processes")
    given = parser.parse_args()
    devices.start_up()
    plan = study.SMALL if given.small else study.Plan()
    report = lambda line: print(line, flush=True)  # noqa: E731
    failed = study.run(plan, given.folder, given.time, report, given.workers)
    raise SystemExit("\n".join(failed) or 0)
