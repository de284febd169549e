import errno
import json
import math
import re
import sys

import numpy as np
import pytest
from scipy import stats

from fedda.errors import MissingExtraError
from fedda.report import comparison, tables
from fedda.report.runs import read_runs
from fedda.report.statistics import interval, table
from helpers.browser import outside_scripts


def write_run(
    directory,
    algorithm="fedavg",
    seed=0,
    accuracy=(0.1, 0.5, 0.8),
    *,
    finished=True,
    metric="accuracy",
    higher_is_better=True,
    ending="",
    last_row=(),
    **config,
):
    """A run with an evaluation every ten rounds and one megabyte up, two down, between them."""
    directory.mkdir(parents=True)
    rows = [
        {
            "round": 10 * i,
            "train_loss": None if i == 0 else 2.0 / i,
            "loss": 2.5 - value,
            metric: value,
            "bytes_down": 2_000_000 * i,
            "bytes_up": 1_000_000 * i,
            "nonfinite_clients": 0,
            "skipped_rounds": 0,
        }
        for i, value in enumerate(accuracy)
    ]
    if rows:
        rows[-1] |= dict(last_row)
    config = {"algorithm": algorithm, "task": "digits", "seed": seed, "rounds": 20, **config}
    toml = "".join(f"{key} = {json.dumps(value)}\n" for key, value in config.items())
    (directory / "config.toml").write_text(toml)
    (directory / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows) + ending)
    if finished:
        summary = {
            "metric": metric,
            "higher_is_better": higher_is_better,
            "parameters": 650,
            "seconds": {"total": 3.0 + 2 * seed, "compile": 1.0 + seed},
            "device": "cpu:0",
            "versions": {"jax": "9.9.9"},
            "commit": "c0ffee",
        }
        (directory / "summary.json").write_text(json.dumps(summary))
    return directory


def cells(rows):
    header, *lines = tables.text_table(rows)
    return [dict(zip(header, line, strict=True)) for line in lines]


def test_read_runs_finds_runs_at_any_depth_once_and_in_order(tmp_path):
    write_run(tmp_path / "x" / "deep" / "a", "fedavg", seed=1)
    write_run(tmp_path / "x" / "b", "fedavg", seed=0)
    write_run(tmp_path / "c", "fedadam", seed=7)
    runs = read_runs([tmp_path, tmp_path / "c"])
    assert [(run.algorithm, run.seed) for run in runs] == [
        ("fedadam", 7),
        ("fedavg", 0),
        ("fedavg", 1),
    ]
    assert [run.path for run in read_runs([str(tmp_path / "c")])] == [tmp_path / "c"]


def test_one_run_is_its_own_numbers(tmp_path):
    write_run(tmp_path / "a", last_row={"nonfinite_clients": 4, "skipped_rounds": 1})
    (row,) = table(read_runs([tmp_path]))
    assert row.label == "fedavg"
    assert (row.seeds, row.unfinished) == (1, 0)
    assert row.final == (0.8, None)
    assert row.mean_of_last == (pytest.approx((0.5 + 0.8) / 2), None)  # round 0 is untrained
    assert row.last == 2
    assert row.threshold == round(0.95 * 0.65, 2) == 0.62
    assert row.rounds_to_threshold == (20, None)
    assert row.train_loss == (1.0, None)  # 2 / 2
    assert (row.megabytes_up.mean, row.megabytes_down.mean) == (2.0, 4.0)
    assert row.seconds == (2.0, None)  # 3, less 1 of compilation
    assert (row.nonfinite_clients, row.skipped_rounds) == (4, 1)


def half(values):
    """The half of the 95 % interval of a mean, by SciPy."""
    low, high = stats.t.interval(0.95, len(values) - 1, np.mean(values), stats.sem(values))
    return pytest.approx((high - low) / 2, rel=1e-9)


@pytest.mark.parametrize("count", [2, 3, 5, 27, 200])
def test_intervals_are_students(count):
    values = np.random.default_rng(count).normal(0.5, 0.1, count).tolist()
    assert interval(values) == (pytest.approx(np.mean(values)), half(values))


def test_intervals_of_little():
    assert interval([0.5]) == (0.5, None)
    assert interval([0.1, 0.1, 0.1]).half == 0.0  # though 0.1 + 0.1 + 0.1 is not 3 * 0.1
    assert all(map(math.isnan, interval([0.5, None])))


def test_seeds_are_averaged_with_their_interval(tmp_path):
    finals = (0.7, 0.8, 0.9)
    for seed, final in enumerate(finals):
        write_run(tmp_path / str(seed), seed=seed, accuracy=(0.1, 0.5, final))
    (row,) = table(read_runs([tmp_path]), threshold=0.76)
    assert row.seeds == 3
    assert row.final == (pytest.approx(0.8), half(finals))
    assert row.mean_of_last == (pytest.approx(0.65), half([(0.5 + final) / 2 for final in finals]))
    assert (row.reached, row.rounds_to_threshold) == (2, (20.0, 0.0))
    assert row.seconds == (3.0, half((2.0, 3.0, 4.0)))
    (text,) = cells([row])
    assert text["accuracy"] == "0.8000 ± 0.2484"  # 4.303 * 0.1 / sqrt(3)
    assert text["rounds to 0.76"] == "20 (2 of 3)"
    assert text["MB up"] == "2.000"


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


@pytest.mark.parametrize("count", ["nonfinite_clients", "skipped_rounds"])
def test_failures_have_a_column_where_there_are_any(tmp_path, count):
    column = {"nonfinite_clients": "non-finite", "skipped_rounds": "skipped"}
    write_run(tmp_path / "a", "a")
    write_run(tmp_path / "b", "b")
    comparison.write([tmp_path], tmp_path / "fine")
    shown, below = (tmp_path / "fine" / "table.md").read_text().split("\n\n")
    assert not any(name in shown for name in column.values())
    assert "No upload was non-finite, and no round was skipped." in below
    write_run(tmp_path / "c", "c", last_row={count: 2})
    comparison.write([tmp_path], tmp_path / "failed")
    assert "totals over the seeds" in (tmp_path / "failed" / "table.md").read_text()
    texts = cells(table(read_runs([tmp_path])))
    assert [text[column[count]] for text in texts] == ["0", "0", "2"]
    assert len(set(column.values()) & set(texts[0])) == 1


def test_rounds_to_threshold(tmp_path):
    write_run(tmp_path / "early", "a", 0, (0.1, 0.9, 0.2, 0.9))  # reached, whatever comes after
    write_run(tmp_path / "late", "a", 1, (0.1, 0.2, 0.3, 0.9))
    write_run(tmp_path / "never", "b", 0, (0.1, 0.2, 0.3, 0.4))
    a, b = table(read_runs([tmp_path]), threshold=0.9)
    assert a.rounds_to_threshold == (20.0, half((10, 30)))
    assert (b.reached, b.rounds_to_threshold) == (0, None)
    key = "rounds to 0.9"
    assert [text[key] for text in cells([a, b])] == ["20 ± 127.1", "never"]


def test_threshold_comes_from_the_best_row_in_the_direction_of_the_metric(tmp_path):
    write_run(tmp_path / "a", "a", accuracy=(1.0, 0.4), metric="error", higher_is_better=False)
    write_run(tmp_path / "b", "b", accuracy=(1.0, 0.2), metric="error", higher_is_better=False)
    a, b = table(read_runs([tmp_path]))
    assert a.threshold == b.threshold == 0.21  # 105 % of 0.2
    assert (a.rounds_to_threshold, b.rounds_to_threshold) == (None, (10, None))


def test_default_threshold_is_within_reach_of_a_negative_metric(tmp_path):
    write_run(tmp_path / "a", accuracy=(-9.0, -4.0), metric="log_likelihood")
    (row,) = table(read_runs([tmp_path]))
    assert row.threshold == -4.2
    assert row.reached == 1


def test_configurations_of_one_algorithm_are_told_apart(tmp_path):
    write_run(tmp_path / "a", client_lr=0.1, momentum=0.9)
    write_run(tmp_path / "b", client_lr=0.1)
    write_run(tmp_path / "c", client_lr=0.1, seed=1)
    write_run(tmp_path / "d", "fedadam", client_lr=0.5)
    rows = table(read_runs([tmp_path]))
    assert {row.label: row.seeds for row in rows} == {
        "fedadam": 1,
        "fedavg (momentum=0.9)": 1,
        "fedavg (momentum=unset)": 2,
    }


def test_a_diverged_seed_is_not_averaged_away(tmp_path):
    write_run(tmp_path / "a", seed=0)
    write_run(tmp_path / "b", seed=1, last_row={"train_loss": None, "loss": float("inf")})
    (row,) = table(read_runs([tmp_path]))
    assert np.isnan(row.train_loss.mean)
    assert cells([row])[0]["train loss"] == "nan"


def test_all_diverged_has_no_threshold(tmp_path):
    write_run(tmp_path / "a", accuracy=(float("nan"), float("nan")))
    rows = table(read_runs([tmp_path]))
    assert rows[0].threshold is None
    assert cells(rows)[0]["rounds to threshold"] == "-"
    assert comparison.page(read_runs([tmp_path]), "comparison.html")


def test_unfinished_run_is_shown_and_said_to_be(tmp_path):
    write_run(tmp_path / "a", seed=0)
    write_run(tmp_path / "b", seed=1, accuracy=(0.1, 0.4), finished=False)
    runs = read_runs([tmp_path])
    (row,) = table(runs)
    assert row.unfinished == 1
    assert row.final.mean == pytest.approx(0.6)
    assert row.seconds == (2.0, None)
    assert cells([row])[0]["seeds"] == "2 (1 unfinished)"
    assert runs[1].notes == [f"{tmp_path / 'b'}: unfinished, evaluated up to round 10 of 20"]


def test_metric_of_unfinished_runs_is_the_first_other_key(tmp_path):
    write_run(tmp_path / "a", metric="top_5", finished=False)
    (row,) = table(read_runs([tmp_path]))
    assert (row.metric, row.higher_is_better) == ("top_5", True)
    assert row.seconds is None


def test_run_without_an_evaluation_keeps_its_row(tmp_path):
    write_run(tmp_path / "a", "a", accuracy=(), finished=False)
    write_run(tmp_path / "b", "b")
    assert comparison.write([tmp_path], tmp_path / "out")[1] == [
        f"{tmp_path / 'a'}: unfinished, evaluated up to round - of 20"
    ]
    assert "| a | 1 (1 unfinished) | - |" in (tmp_path / "out" / "table.md").read_text()


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


def test_counts_are_noted_and_a_copy_is_left_out(tmp_path):
    write_run(tmp_path / "a", last_row={"nonfinite_clients": 3, "skipped_rounds": 2})
    write_run(tmp_path / "b")
    (first,) = read_runs([tmp_path])
    assert [note.split(": ")[1] for note in first.notes] == [
        "3 client updates were not finite",
        "2 rounds were skipped",
        f"left out, a copy of {tmp_path / 'a'}",
    ]


def test_errors_name_what_was_got_and_how_to_fix_it(tmp_path):
    with pytest.raises(ValueError, match=r"holds no metrics\.jsonl .* expected a run directory"):
        read_runs([tmp_path])
    with pytest.raises(ValueError, match="nowhere"):
        read_runs([tmp_path / "nowhere"])
    directory = write_run(tmp_path / "a")
    write_run(tmp_path / "b", task="other")
    with pytest.raises(ValueError, match=r"2 tasks \(digits, other\), expected one"):
        table(read_runs([tmp_path]))
    (directory / "config.toml").write_text("seed = 0\n")
    with pytest.raises(ValueError, match=r"config\.toml.* lacks algorithm, task\)"):
        read_runs([tmp_path])
    (directory / "config.toml").unlink()
    with pytest.raises(ValueError, match=r"config\.toml, which cannot be read"):
        read_runs([tmp_path])


def test_markdown_has_a_line_per_row_and_escapes_bars(tmp_path):
    write_run(tmp_path / "a", "a|b")
    header, rule, line = comparison.page(read_runs([tmp_path]), "comparison.md").splitlines()[:3]
    assert line.startswith("| a\\|b | 1 | 0.8000 |")
    assert header.count("|") == rule.count("|") == line.replace("\\|", "").count("|")


def test_markdown_shows_names_and_no_markup(tmp_path):
    name = "<script>alert(1)</script>\n| `x` \\| &amp;"
    write_run(tmp_path / "<img>", name, metric=name, last_row={"skipped_rounds": 3})
    comparison.write([tmp_path], tmp_path / "out")
    text = (tmp_path / "out" / "table.md").read_text()
    shown = r"&lt;script&gt;alert(1)&lt;/script&gt; \| \`x\` \\\| &amp;amp;"
    assert text.count(shown) == 2 + 1, "the algorithm, the column, and the sentence under the table"
    assert re.search(r"- .*/&lt;img&gt;: 3 rounds were skipped", text)
    assert "<" not in text
    header, rule, line = text.splitlines()[:3]
    bars = [len(re.findall(r"(?<!\\)(?:\\\\)*\|", each)) for each in (header, rule, line)]
    assert len({*bars}) == 1, "every line has as many cells"


@pytest.mark.parametrize(
    ("mean", "half", "text"),
    [
        (0.87654, 0.01234, "0.8765 ± 0.0123"),
        (12.3456, None, "12.35"),
        (1234.5, 20.6, "1,234 ± 21"),
        (0.0, None, "0.000"),
        (1.5e-6, None, "1.50e-06"),
        (2.5e12, None, "2.50e+12"),
    ],
)
def test_numbers_have_four_digits(tmp_path, mean, half, text):
    write_run(tmp_path / "a")
    (row,) = table(read_runs([tmp_path]))
    row = row._replace(final=row.final._replace(mean=mean, half=half))
    assert cells([row])[0]["accuracy"] == text


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
