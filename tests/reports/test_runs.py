"""Run directories, as a report reads them."""

import pytest

from fedda.reports.runs import read_runs
from fedda.reports.statistics import table
from helpers.runs import write_run


def test_read_runs_finds_runs_at_any_depth_once_and_in_order(tmp_path):
    write_run(tmp_path / "x" / "deep" / "a", "fedavg", seed=1)
    write_run(tmp_path / "x" / "b", "fedavg", seed=0)
    write_run(tmp_path / "c", "fedadam", seed=7)
    runs = read_runs([tmp_path, tmp_path / "c"])
    assert [(run.algorithm, run.config["seed"]) for run in runs] == [
        ("fedadam", 7),
        ("fedavg", 0),
        ("fedavg", 1),
    ]
    assert [run.path for run in read_runs([str(tmp_path / "c")])] == [tmp_path / "c"]


@pytest.mark.parametrize("ending", ['{"round": 30, "accu', '{"round": 30}', '{"round": 3\n'])
def test_truncated_last_line_is_ignored_with_a_note(tmp_path, ending):
    write_run(tmp_path / "a", ending=ending)
    (run,) = read_runs([tmp_path])
    assert [row["round"] for row in run.evaluations] == [0, 10, 20]
    assert run.notes == [f"{tmp_path / 'a'}: ignored the truncated last line of metrics.jsonl"]


@pytest.mark.parametrize("line", ["{broken", "[]", '{"accuracy": 0.5}', ""])
def test_invalid_line_in_the_middle_is_an_error(tmp_path, line):
    directory = write_run(tmp_path / "a")
    log = directory / "metrics.jsonl"
    first, *others = log.read_text().splitlines(keepends=True)
    log.write_text("".join([first, line + "\n", *others]))
    with pytest.raises(ValueError, match=r"metrics\.jsonl:2; expected one JSON object"):
        read_runs([tmp_path])


def test_a_copy_is_left_out_with_a_note(tmp_path):
    write_run(tmp_path / "a")
    write_run(tmp_path / "b")
    (first,) = read_runs([tmp_path])
    assert first.notes == [f"{tmp_path / 'b'}: left out, a copy of {tmp_path / 'a'}"]


def test_errors_name_what_was_got_and_how_to_fix_it(tmp_path):
    with pytest.raises(ValueError, match=r"contains no metrics\.jsonl; expected a run directory"):
        read_runs([tmp_path])
    with pytest.raises(ValueError, match="nowhere"):
        read_runs([tmp_path / "nowhere"])
    directory = write_run(tmp_path / "a")
    write_run(tmp_path / "b", task="other")
    with pytest.raises(ValueError, match=r"2 tasks \(digits, other\), expected one"):
        table(read_runs([tmp_path]))
    (directory / "config.toml").write_text("seed = 0\n")
    with pytest.raises(ValueError, match=r"config\.toml.* lacks algorithm\)"):
        read_runs([tmp_path])
    (directory / "config.toml").unlink()
    with pytest.raises(ValueError, match=r"config\.toml, which cannot be read"):
        read_runs([tmp_path])
