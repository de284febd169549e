"""Algorithms in a file of the user: `fedda compare my_method.py fedavg`."""

import json
import shutil
import tomllib
from pathlib import Path

import pytest

from helpers.commands import QUICK
from helpers.pages import ROOT, blocks

EXAMPLE = blocks(ROOT / "docs" / "own_algorithm.md", "python")[0].text


@pytest.fixture
def method(tmp_path: Path) -> Path:
    path = tmp_path / "look_ahead.py"
    path.write_text(EXAMPLE)
    return path


def test_a_file_is_compared_by_its_name_and_settings(fedda, method: Path):
    words = ["look_ahead.py", "fedavg", "ahead=0.25", "--seeds", "2", "--out", "made", *QUICK]
    code, out, err = fedda("compare", *words, "--json", "-q")
    assert code == 0, err
    assert "ahead is given to look_ahead.py: the others have no such setting." in err
    table = json.loads(out)["table"]
    assert {row["label"] for row in table} == {"look_ahead", "fedavg"}
    written = tomllib.loads((Path("made") / "look_ahead-seed1" / "config.toml").read_text())
    assert written["algorithm"] == "look_ahead"
    assert written["algorithm_file"] == str(method)
    assert written["ahead"] == 0.25
    # The same comparison is read back.
    code, out, _ = fedda("compare", "--out", "made", "-q")
    assert code == 0
    assert "look_ahead" in out


def test_without_its_addition_the_file_is_fedavg(fedda, method: Path):
    """The example with ahead=0 sends the model itself: its numbers are those of FedAvg."""
    runs = []
    for words in (["algorithm=look_ahead.py", "ahead=0"], ["algorithm=fedavg"]):
        out = fedda("run", *words, *QUICK, "client_lr=0.1", "--json", "-q")[1]
        runs.append(json.loads(out)["final"])
    assert runs[0] == pytest.approx(runs[1], rel=1e-4)


def test_a_run_of_a_file_resumes_while_the_file_is_the_same(fedda, method: Path):
    words = ["algorithm=look_ahead.py", *QUICK]
    assert fedda("run", *words, "--out", "made", "-q")[0] == 0
    (Path("made") / "summary.json").unlink()
    assert fedda("run", "--resume", "made", "algorithm=look_ahead.py", "-q")[0] == 0
    method.write_text(method.read_text() + "\n# another\n")
    code, _, err = fedda("run", "--resume", "made", "-q")
    assert code == 2
    assert f"{method} has changed since the run began: its SHA-256 is" in err
    assert "Restore the file, or start a new run in another directory." in err
    method.unlink()
    assert "cannot read the algorithm in" in fedda("run", "--resume", "made", "-q")[2]


def test_a_sweep_tunes_a_file_and_its_preset_runs(fedda, method: Path):
    grid = ["--grid", "ahead=0,0.5", "--out", "swept", "-q"]
    assert fedda("sweep", "algorithm=look_ahead.py", *QUICK, *grid)[0] == 0
    assert fedda("run", "swept/preset.toml", "-q")[0] == 0
    assert fedda("run", "swept/preset.toml", "algorithm=fedavg", "ahead=0", "-q")[0] == 2


def test_a_file_is_described(fedda, method: Path):
    code, out, _ = fedda("algorithms", "look_ahead.py")
    assert code == 0
    assert "FedAvg whose clients start where the last round was heading" in out
    assert "ahead" in out
    assert "a number in [0, 1)" in out


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("import fedda\n", "import fedda fedda\n", "line 5: SyntaxError: invalid syntax"),
        ("import fedda\n", "import feda\n", "line 5: ModuleNotFoundError: No module named 'feda'"),
        ("algorithm = ", "_ = ", None),
        (
            "algorithm = ",
            "Other = fedda.algorithms.get('fedavg')\nalgorithm = ",
            "got Other, algorithm",
        ),
        ("algorithm = fedda.Algorithm", "algorithm = len", "TypeError"),
        ("ahead: Decay", "ahead: float", "ahead of Hyper must have a default"),
        ("    new = local.mean(total)", "    new = total.nothing", "AttributeError"),
        (
            "return local.weighted(shard, w), memory, seen",
            "return w, seen",
            "work of phase 0 returned 2 values",
        ),
    ],
)
def test_a_mistake_in_the_file_is_its_line(fedda, method: Path, old: str, new: str, message):
    text = method.read_text()
    assert old in text
    method.write_text(text.replace(old, new))
    code, out, err = fedda("run", "algorithm=look_ahead.py", *QUICK, "-q")
    assert "Traceback" not in err
    if message is None:
        assert code == 0, err
        return
    assert code == 2
    assert out == ""
    assert message in err
    if "Error" in message:
        assert "look_ahead.py, line " in err


def test_names_that_mean_two_things_are_refused(fedda, method: Path):
    Path("fedavg.py").write_text(method.read_text())
    code, _, err = fedda("run", "algorithm=fedavg.py")
    assert code == 2
    assert "has the name of a known algorithm, fedavg." in err
    Path("folder").mkdir()
    shutil.copy(method, "folder")
    code, _, err = fedda("compare", "look_ahead.py", "folder/look_ahead.py")
    assert code == 2
    assert "rename one of the files" in err
    assert "Did you mean algorithm=look_ahead.py?" in fedda("run", "look_ahead.py")[2]
    assert (
        "unknown setting 'aheed'. Did you mean ahead "
        in (fedda("run", "algorithm=look_ahead.py", "aheed=1")[2])
    )
