"""The command `fedda report`, and the table of `fedda run`."""

import re
from pathlib import Path

import pytest

from helpers.commands import QUICK


def test_rounds_to_a_threshold_are_shown_only_of_runs_that_have_one_to_reach(fedda):
    _, out, _ = fedda("run", *QUICK, "-q", "--out", "both/one")
    assert "fedda-sgdm" in out
    assert "rounds" not in out, "5 % short of itself says nothing"
    assert re.search(
        r"^ +rounds .*\n.* to\b", fedda("report", "both", "--threshold", "0.5")[1], re.M
    )
    fedda("run", *QUICK, "algorithm=fedavg", "-q", "--out", "both/other")
    assert re.search(r"^ .*\brounds\b", fedda("report", "both")[1], re.M)


def test_a_narrow_terminal_shortens_no_number(fedda, monkeypatch: pytest.MonkeyPatch):
    fedda("run", *QUICK, "-q", "--out", "one")
    monkeypatch.setenv("COLUMNS", "40")
    _, out, _ = fedda("report", "one")
    assert "fedda-sgdm" in out
    assert "…" not in out


def test_report_of_an_existing_run(fedda, tmp_path: Path):
    fedda("run", *QUICK, "-q", "--out", "one")
    code, out, _ = fedda("report", "one", "--out", "elsewhere")
    assert code == 0
    assert "fedda-sgdm" in out
    assert (tmp_path / "elsewhere" / "report.html").exists()
