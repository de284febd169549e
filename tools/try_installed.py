"""Try an installed fedda as a new user does: a training in Python, a run and a comparison.

`try_installed.py` expects a bare installation, where a comparison says in one line which extra its
report needs; `try_installed.py report` expects that extra.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

import fedda

EXTRA = "report" in sys.argv[1:]


def command(*words: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "fedda", *words], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


if "site-packages" not in fedda.__file__:
    sys.exit(f"fedda is not the installed one: {fedda.__file__}")
x = np.linspace(-1, 1, 40, dtype=np.float32).reshape(4, 10, 1)
result = fedda.run(
    "fedda-sgdm",
    fedda.models.linear(1, 1),
    [(part, 2 * part) for part in x],
    fedda.losses.squared_error,
    rounds=50,
    cohort=4,
)
first, last = result.history[1]["train_loss"], result.history[-1]["train_loss"]
assert last < first / 2, (first, last)
with tempfile.TemporaryDirectory() as folder:
    command("run", "rounds=2", "--quiet", "--out", f"{folder}/run")
    compared = command(
        "compare", "fedavg", "fedda-adam", "rounds=2", "--quiet", "--out", f"{folder}/compare"
    )
    page = Path(folder, "compare", "report.html")
    assert page.exists() == EXTRA, compared.stderr
    missing = [line for line in compared.stderr.splitlines() if "fedda[report]" in line]
    assert len(missing) == (0 if EXTRA else 1), compared.stderr
print(f"fedda {fedda.__version__}: training, run and comparison work", *missing)
