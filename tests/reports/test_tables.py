"""Tables as text and in Markdown."""

import pytest

from fedda.reports import comparison, html, tables
from fedda.reports.runs import read_runs
from fedda.reports.statistics import Interval, table
from helpers.runs import cells, write_run


@pytest.mark.parametrize("count", ["nonfinite_clients", "skipped_rounds"])
def test_failures_have_a_column_where_there_are_any(tmp_path, count):
    column = {"nonfinite_clients": "non-finite", "skipped_rounds": "skipped"}
    write_run(tmp_path / "a", "a")
    write_run(tmp_path / "b", "b")
    comparison.write(read_runs([tmp_path]), tmp_path / "fine")
    _, shown, below = (tmp_path / "fine" / "table.md").read_text().split("\n\n")
    assert not any(name in shown for name in column.values())
    assert "No upload was non-finite, and no round was skipped." in below
    write_run(tmp_path / "c", "c", last_row={count: 2})
    comparison.write(read_runs([tmp_path]), tmp_path / "failed")
    assert "totals over the seeds" in (tmp_path / "failed" / "table.md").read_text()
    texts = cells(table(read_runs([tmp_path])))
    assert [text[column[count]] for text in texts] == ["0", "0", "2"]
    assert len(set(column.values()) & set(texts[0])) == 1


def test_markdown_has_a_line_per_row_and_escapes_bars(tmp_path):
    write_run(tmp_path / "a", "a|b")
    text = html.render("comparison.md", **comparison.content(read_runs([tmp_path])))
    header, rule, line = text.splitlines()[2:5]
    assert line.startswith("| a\\|b | 1 | 0.800 |")
    assert header.count("|") == rule.count("|") == line.replace("\\|", "").count("|")


@pytest.mark.parametrize(
    ("mean", "half", "text"),
    [
        (0.87654, 0.02345, "0.88 ± 0.02"),
        (0.87654, 0.01234, "0.877 ± 0.012"),
        (0.87654, 0.0098, "0.877 ± 0.010"),
        (0.87654, 0.0, "0.877"),
        (0.87654, None, "0.877"),
        (12.3456, None, "12.3"),
        (30.0, None, "30"),
        (1234.5, 20.6, "1,234 ± 21"),
        (0.0, None, "0"),
        (1.5e-6, None, "1.5e-06"),
        (2.5e12, None, "2.5e+12"),
    ],
)
def test_a_number_has_the_digits_that_its_interval_supports(mean, half, text):
    assert tables.interval_text(Interval(mean, half)) == text
