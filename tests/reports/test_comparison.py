"""The report of a comparison: its page, its table and its figures."""

import errno
import json
import re
import sys

import pytest

from fedda.errors import MissingExtraError
from fedda.reports import comparison, html, tables
from fedda.reports.runs import read_runs
from fedda.reports.statistics import table
from helpers.browser import outside_scripts
from helpers.runs import cells, write_run


def write(paths, directory, **options):
    return comparison.write(read_runs(paths), directory, **options)


def page_of(*paths):
    return html.render("comparison.html", **comparison.content(read_runs(paths)))


def write_seeds(folder, name, finals, **settings):
    for seed, final in enumerate(finals):
        write_run(folder / name / str(seed), name, seed, (0.1, 0.5, final), **settings)
    return folder / name


def test_what_intervals_and_bands_are_is_told_where_there_are_several_seeds(tmp_path):
    for name, seeds in {"a": 3, "b": 3, "c": 1}.items():
        for seed in range(seeds):
            write_run(tmp_path / name / str(seed), name, seed)

    def told(*names):
        write([tmp_path / name for name in names], tmp_path / "out")
        page = outside_scripts((tmp_path / "out" / "report.html").read_text())
        below = (tmp_path / "out" / "table.md").read_text()
        return [
            *re.findall("(seeds? [0-9, ]+)[.]<", page),
            *re.findall("(?:± is|Bands).*?[.]", below),
        ]

    several = ["± is the 95 % interval over the seeds (Student's t)."]
    several += ["Bands in the figures span the seeds."]
    assert told("a", "b") == ["seeds 0, 1, 2", *several]
    assert told("a", "c") == ["seeds 0, 1, 2", *several]
    assert told("c") == ["seed 0"]


def test_the_verdict_names_the_best_its_interval_and_its_ties(tmp_path):
    best = write_seeds(tmp_path, "best", (0.91, 0.92, 0.93))
    near = write_seeds(tmp_path, "near", (0.85, 0.90, 0.95))
    also = write_seeds(tmp_path, "also", (0.84, 0.90, 0.95))
    worse = write_seeds(tmp_path, "worse", (0.50, 0.51, 0.52))

    def verdict(*paths):
        return write(paths, tmp_path / "out").verdict

    # 4.303 * 0.01 / sqrt(3) = 0.0248
    start = "best ends highest: accuracy 0.92 ± 0.02 (95 % interval, 3 seeds)."
    assert verdict(worse, near, best) == f"{start} near is tied with it."
    assert verdict(worse, near, best, also) == f"{start} near and also are tied with it."
    assert verdict(near, best) == f"{start} All others are tied with it."
    assert verdict(worse, best) == f"{start} No other is tied with it."
    assert verdict(best) == "best ends at accuracy 0.92 ± 0.02 (95 % interval, 3 seeds)."
    page = outside_scripts((tmp_path / "out" / "report.html").read_text())
    assert page.index("best ends at accuracy") < page.index("<table")


def test_equal_ends_of_one_seed_have_no_winner(tmp_path):
    paths = [write_seeds(tmp_path, name, (0.9,)) for name in ("a", "b")]
    verdict = write([*paths, write_seeds(tmp_path, "c", (0.8,))], tmp_path / "out").verdict
    assert verdict.startswith("a and b end equally high, and no other ends higher: accuracy 0.900")


def test_one_seed_decides_nothing(tmp_path):
    paths = [write_seeds(tmp_path, name, (end,)) for name, end in (("a", 0.9), ("b", 0.8))]
    verdict = write(paths, tmp_path / "out").verdict
    assert verdict.startswith(
        "a ends highest: accuracy 0.900 (1 seed, no interval). One seed decid"
    )


def test_all_diverged_has_no_threshold(tmp_path):
    write_run(tmp_path / "a", accuracy=(float("nan"), float("nan")))
    rows = table(read_runs([tmp_path]))
    assert rows[0].threshold is None
    assert cells(rows)[0]["rounds to threshold"] == "-"
    assert "No algorithm ends with a finite accuracy." in page_of(tmp_path)


def test_run_without_an_evaluation_keeps_its_row(tmp_path):
    write_run(tmp_path / "a", "a", accuracy=(), finished=False)
    write_run(tmp_path / "b", "b")
    assert write([tmp_path], tmp_path / "out").notes == [
        f"{tmp_path / 'a'}: unfinished, evaluated up to round - of 20"
    ]
    assert "| a |  | 1 (1 unfinished) | - |" in (tmp_path / "out" / "table.md").read_text()


def test_markdown_shows_names_and_no_markup(tmp_path):
    name = "<script>alert(1)</script>\n| `x` \\| &amp;"
    write_run(tmp_path / "<img>", name, metric=name, finished=False)
    write([tmp_path], tmp_path / "out")
    text = (tmp_path / "out" / "table.md").read_text()
    shown = r"&lt;script&gt;alert(1)&lt;/script&gt; \| \`x\` \\\| &amp;amp;"
    assert text.count(shown) == 2 + 2 + 1, "twice in the verdict and the table, once below"
    assert re.search(r"- .*/&lt;img&gt;: unfinished", text)
    assert "<" not in text
    header, rule, line = text.splitlines()[2:5]
    bars = [len(re.findall(r"(?<!\\)(?:\\\\)*\|", each)) for each in (header, rule, line)]
    assert len({*bars}) == 1, "every line has as many cells"


def test_page_is_self_contained_and_complete(tmp_path):
    for seed in (0, 1):
        write_run(
            tmp_path / f"a{seed}", "a", seed, partition="by-label", clients=100, cohort=10, lr=0.125
        )
    write_run(tmp_path / "b", "b", finished=False, ending="{", lr=0.5)
    page = page_of(tmp_path)
    visible = outside_scripts(page)
    assert not re.search(r"https?://", visible)
    assert not re.search(r"<script[^>]*\ssrc", page)
    assert "Task digits, partition by-label, 10 of 100 clients a round, 20 rounds" in visible
    for line in tables.text_table(table(read_runs([tmp_path]))):
        for cell in line:
            assert f">{cell}</t" in visible
    for text in ("0.125", "jax 9.9.9", "c0ffee", "cpu:0", "truncated last line", "b, seed 0, unf"):
        assert text in visible


def test_configuration_says_what_runs_share_and_what_differs(tmp_path):
    write_run(tmp_path / "a", "a", client_lr=0.1, batch=20)
    write_run(tmp_path / "b", "b", client_lr=10**-0.5, batch=20, mu=0.01)  # 0.31622776601683794
    content = comparison.content(read_runs([tmp_path]))
    assert content["shared"] == {"task": "digits", "rounds": "20", "batch": "20"}
    assert content["differing"] == [
        ["algorithm", "settings"],
        ["a", "client_lr 0.1"],
        ["b", "client_lr 0.316228, mu 0.01"],
    ]
    assert content["notes"] == []
    write_run(tmp_path / "c", "c", client_lr=0.3, batch=10)
    (note,) = comparison.content(read_runs([tmp_path]))["notes"]
    assert note == "Runs differ in batch (10, 20): they are not of one problem."


def test_a_warning_of_several_seeds_is_shown_once(tmp_path):
    for seed in (0, 1):
        run = write_run(tmp_path / str(seed), "a", seed)
        summary = json.loads((run / "summary.json").read_text())
        warned = summary | {"warnings": ["<b>the loss grew</b>"]}
        (run / "summary.json").write_text(json.dumps(warned))
    assert write([tmp_path], tmp_path / "out").notes == ["a: <b>the loss grew</b>"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert page.count("<li>a: &lt;b&gt;the loss grew&lt;/b&gt;</li>") == 1


def test_page_escapes_names(tmp_path):
    write_run(tmp_path / "a", "<script>alert(1)</script>", note="</style><b>&")
    page = page_of(tmp_path)
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
        write([tmp_path / "a"], tmp_path)
    assert page.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_write_makes_every_file(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path / "runs" / str(seed), seed=seed, accuracy=(0.1, 0.5, 0.7 + seed / 10))
    out = tmp_path / "out" / "deep"
    files, _, notes = write([tmp_path / "runs"], out, threshold=0.6)
    assert notes == []
    pages = {"report.html", "table.md"}
    figures = ("metric", "megabytes", "seconds", "train_loss")
    assert {path.name for path in files} == pages | {f"{name}.png" for name in figures}
    with_pdf = write([tmp_path / "runs"], out, threshold=0.6, pdf=True).files
    assert {*with_pdf} - {*files} == {out / f"{name}.pdf" for name in figures}
    magic = {".png": b"\x89PNG\r\n\x1a\n", ".pdf": b"%PDF-"}
    for path in with_pdf:
        assert path.stat().st_size > 100
        assert path.read_bytes().startswith(magic.get(path.suffix, b""))
    assert "rounds to 0.6" in (out / "table.md").read_text()


@pytest.mark.parametrize("module", ["matplotlib.figure", "jinja2"])
def test_missing_extra_is_named(tmp_path, monkeypatch, module):
    write_run(tmp_path / "a")
    monkeypatch.setitem(sys.modules, module, None)
    html._environment.cache_clear()
    package = module.partition(".")[0]
    with pytest.raises(MissingExtraError, match=rf"{package} .* pip install 'fedda\[report\]'"):
        write([tmp_path / "a"], tmp_path / "out")
