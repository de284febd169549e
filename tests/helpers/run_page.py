"""Run the blocks of one page in this process, as a reader would: `run_page.py < STEPS`.

The steps are a list in JSON: `["python", code]`, `["file", name, text]` or `["fedda", words]`. What
Python blocks define stays defined for those that follow.
"""

import json
import sys
from pathlib import Path
from typing import Any

from fedda.cli import main


def run() -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    sys.path.insert(0, "")  # for the files of the page
    for kind, *parts in json.load(sys.stdin):
        print(f"--- {kind} {parts[0] if kind == 'file' else parts[-1]}", flush=True)
        if kind == "file":
            Path(parts[0]).write_text(parts[1])
        elif kind == "python":
            exec(compile(parts[0], "<block>", "exec"), names)
        else:
            sys.argv = ["fedda", *parts[0]]
            try:
                main.main()
            except SystemExit as stop:
                if stop.code:
                    raise


if __name__ == "__main__":
    run()
