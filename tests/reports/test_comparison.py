"""The report of a comparison: its page, its table and its figures."""

import errno
import re
import sys

import pytest

from fedda.errors import MissingExtraError
from fedda.reports import comparison, tables
from fedda.reports.runs import read_runs
from fedda.reports.statistics import table
from helpers.browser import outside_scripts
from helpers.runs import cells, write_run


def test_what_intervals_and_bands_are_is_told_where_there_are_several_seeds(tmp_path):
    for name, seeds in {"a": 3, "b": 3, "c": 1}.items():
        for seed in range(seeds):
            write_run(tmp_path / name / str(seed), name, seed)

    def told(*names):
        comparison.write([tmp_path / name for name in names], tmp_path / "out")
        page = outside_scripts((tmp_path / "out" / "report.html").read_text())
        below = (tmp_path / "out" / "table.md").read_text()
        return [*re.findall("; (seed.*?)[.]<", page), *re.findall("(?:± 95|Bands).*?[.]", below)]

    bands = "Bands in the figures span the seeds."
    three = "± 95 % interval over 3 seeds (Student's t)."
    assert told("a", "b") == ["seeds 0, 1, 2", three, bands]
    assert told("a", "c") == ["seeds 0, 1, 2", three.replace("3 ", ""), bands]
    assert told("c") == ["seed 0"]


def test_all_diverged_has_no_threshold(tmp_path):
    write_run(tmp_path / "a", accuracy=(float("nan"), float("nan")))
    rows = table(read_runs([tmp_path]))
    assert rows[0].threshold is None
    assert cells(rows)[0]["rounds to threshold"] == "-"
    assert comparison.page(read_runs([tmp_path]), "comparison.html")


def test_run_without_an_evaluation_keeps_its_row(tmp_path):
    write_run(tmp_path / "a", "a", accuracy=(), finished=False)
    write_run(tmp_path / "b", "b")
    assert comparison.write([tmp_path], tmp_path / "out")[1] == [
        f"{tmp_path / 'a'}: unfinished, evaluated up to round - of 20"
    ]
    assert "| a | 1 (1 unfinished) | - |" in (tmp_path / "out" / "table.md").read_text()


def test_markdown_shows_names_and_no_markup(tmp_path):
    name = "<script>alert(1)</script>\n| `x` \\| &amp;"
    write_run(tmp_path / "<img>", name, metric=name, finished=False)
    comparison.write([tmp_path], tmp_path / "out")
    text = (tmp_path / "out" / "table.md").read_text()
    shown = r"&lt;script&gt;alert(1)&lt;/script&gt; \| \`x\` \\\| &amp;amp;"
    assert text.count(shown) == 2 + 1, "the algorithm, the column, and the sentence under the table"
    assert re.search(r"- .*/&lt;img&gt;: unfinished", text)
    assert "<" not in text
    header, rule, line = text.splitlines()[:3]
    bars = [len(re.findall(r"(?<!\\)(?:\\\\)*\|", each)) for each in (header, rule, line)]
    assert len({*bars}) == 1, "every line has as many cells"


def test_page_is_self_contained_and_complete(tmp_path):
    for seed in (0, 1):
        write_run(
            tmp_path / f"a{seed}", "a", seed, partition="by-label", clients=100, cohort=10, lr=0.125
        )
    write_run(tmp_path / "b", "b", finished=False, ending="{")
    runs = read_runs([tmp_path])
    page = comparison.page(runs, "comparison.html")
    visible = outside_scripts(page)
    assert not re.search(r"https?://", visible)
    assert not re.search(r"<script[^>]*\ssrc", page)
    assert page.count("plotly.js v") == 1
    assert "showSendToCloud: false" in page.partition("function drawPanel(")[2]
    assert "Task digits, partition by-label, 10 of 100 clients a round, 20 rounds" in visible
    for line in tables.text_table(table(runs)):
        for cell in line:
            assert f">{cell}</t" in visible
    for text in ("0.125", "jax 9.9.9", "c0ffee", "cpu:0", "truncated last line", "b, seed 0, unf"):
        assert text in visible


def test_page_escapes_names(tmp_path):
    write_run(tmp_path / "a", "<script>alert(1)</script>", note="</style><b>&")
    page = comparison.page(read_runs([tmp_path]), "comparison.html")
    assert "<script>alert" not in page
    assert "</style><b>" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;" in outside_scripts(page)


def test_failed_write_leaves_the_old_page(tmp_path, monkeypatch):
    write_run(tmp_path / "a")
    page = tmp_path / "report.html"
    page.write_text("old")

    def fail(*_):
        raise OSError(errno.ENOSPC, "disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        comparison.write([tmp_path / "a"], tmp_path)
    assert page.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_write_makes_every_file(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path / "runs" / str(seed), seed=seed, accuracy=(0.1, 0.5, 0.7 + seed / 10))
    files, notes = comparison.write([tmp_path / "runs"], tmp_path / "out" / "deep", threshold=0.6)
    assert notes == []
    assert {path.name for path in files} == {
        "report.html",
        "table.md",
        *(f"{name}.{s}" for name in ("metric", "train_loss", "megabytes") for s in ("png", "pdf")),
    }
    magic = {".png": b"\x89PNG\r\n\x1a\n", ".pdf": b"%PDF-"}
    for path in files:
        assert path.stat().st_size > 100
        assert path.read_bytes().startswith(magic.get(path.suffix, b""))
    assert "rounds to 0.6" in (tmp_path / "out" / "deep" / "table.md").read_text()


@pytest.mark.parametrize("module", ["matplotlib.figure", "plotly.offline"])
def test_missing_extra_is_named(tmp_path, monkeypatch, module):
    write_run(tmp_path / "a")
    monkeypatch.setitem(sys.modules, module, None)
    package = module.partition(".")[0]
    with pytest.raises(MissingExtraError, match=rf"{package} .* pip install 'fedda\[report\]'"):
        comparison.write([tmp_path / "a"], tmp_path / "out")
