"""The page of a results folder: made-up cells, what is read off them, and the page in a browser."""

import json
import math
import re

import numpy as np
import pytest

from fedda.errors import InputError
from fedda.report.figures import Line, Panel
from fedda.report.statistics import Curve
from fedda_reproduction.paper import (
    cells,
    evidence,
    experiments,
    glance,
    panels,
    rates,
    tables,
    verdicts,
    web,
)
from helpers.browser import line_paths, outside_scripts, resize

WORDS = "396 writers <b>&</b> <script>document.title = 'run'</script>"
LOSSES = (20.0, 1.0, 0.5)


def entries(name, **wanted):
    """The entries of an experiment with this task or algorithm, or these values."""
    return [
        entry
        for entry in experiments.experiments()[name].entries
        if all(entry.values.get(key) == value for key, value in wanted.items())
    ]


def make(
    folder, entry, values, seed=0, losses=LOSSES, at=None, metric="accuracy", higher=True, **own
):
    """A finished run whose metric took these values, at equal distances from round 0 to the last.

    A round sends one megabyte up and two down.
    """
    chosen = tables.resolved(entry, None, seed=seed, **own)
    at = np.linspace(0, chosen.rounds, len(values)).astype(int) if at is None else at
    rows = [
        {"round": int(number), "train_loss": loss, "loss": 1.0, metric: value}
        for number, value, loss in zip(at, values, [None, *losses], strict=False)
    ]
    summary = {
        "metric": metric,
        "higher_is_better": higher,
        "parameters": 1000,
        "bytes_down": 2_000_000 * chosen.rounds,
        "bytes_up": 1_000_000 * chosen.rounds,
        "nonfinite_clients": 0,
        "skipped_rounds": 0,
        "seconds": {"total": 1800.0, "compile": 60.0},
        "device": "a made-up device",
        "devices": 2,
        "versions": {"jax": "9.9.9"},
        "commit": "c0ffee",
        "data": {"sha256": "ab" * 32, "words": WORDS},
    }
    return cells.write(folder, chosen, rows, summary, 0.0)


def found(folder):
    return cells.read_all(folder).found


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A part of table 3, table 6 on EMNIST, figure 5 for one optimiser, one cell of digits."""
    folder = tmp_path_factory.mktemp("results")
    for entry in entries("figure5", task="emnist", algorithm="fedda-adam"):
        make(folder, entry, (0.1, 0.5 + entry.values["local_work"] / 100))
    for entry, values, seeds in (  # FedDA+Adam has ten local iterations: in both
        (entries("table3", algorithm="fedda-sgdm")[0], (0.1, 0.5, 0.7, 0.8), 2),
        (entries("table3", algorithm="fedda-adam")[0], (0.1, 0.4, 0.6, 0.7), 1),
        (entries("table3", algorithm="fedlin")[0], (0.1, 0.2, 0.3, 0.4), 1),
        (entries("table3", algorithm="climb")[0], (0.1, 0.2, None, None), 1),
    ):
        for seed in range(seeds):
            diverged = (2.0, 1e6, 1e9) if entry.algorithm == "climb" else LOSSES
            raised = [value and value + 0.1 * seed for value in values]
            make(folder, entry, raised, seed, losses=diverged)
    for entry in entries("table6", task="emnist"):
        make(folder, entry, (0.1, entry.paper / 2))
    make(folder, entries("digits", algorithm="fedavg")[0], (0.1, 0.9))
    (folder / "cells/emnist/broken.json").write_text("{")
    claims = [
        {"key": key, "claim": key, "verdict": verdict, "measured": "off by 1e-15"}
        for key, verdict in (("F1", "holds"), ("F2", "holds in part"), ("F3", "does not hold"))
    ]
    theory = {"date": "2026-01-02", "versions": {"jax": "8.8.8"}, "claims": claims}
    (folder / "NOTES.md").write_text("## Of mine\n\n- **One**, `a < b`\n  and more.\n- Two.\n")
    (folder / "theory").mkdir()
    (folder / "theory" / "theory.json").write_text(json.dumps(theory))
    return folder


@pytest.fixture(scope="module")
def written(results, tmp_path_factory):
    return web.write(results, tmp_path_factory.mktemp("page") / "deep")


@pytest.fixture(scope="module")
def html(written):
    return written[0].read_text()


def section(html, name):
    return re.search(rf"<section id='{name}'>.*?</section>", html, re.DOTALL)[0]


def body(html, name):
    """The cells of a table, as text."""
    table = re.search(rf"<table id='{name}'>.*?</table>", html, re.DOTALL)[0]
    return [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in re.findall(r"<tr>.*?</tr>", table)]


# --------------------------------------------------------------------------------------- the page


def test_tables_hold_what_the_cells_say(html):
    header, *rows = body(html, "table3")
    assert header[:4] == ["run", "paper", "ours", "seeds"], "what a phone shows first"
    assert header[-2:] == ["elsewhere", "settings"]
    by_run = {row[0]: dict(zip(header, row, strict=True)) for row in rows}
    assert len(by_run) == 20
    # The last evaluation alone is in the last 100 rounds: 0.8 and 0.9, and t = 12.706 x 0.05.
    assert by_run["FedDA, SGDM"]["ours"] == "0.8500 ± 0.6353"
    assert (by_run["FedDA, SGDM"]["paper"], by_run["FedDA, SGDM"]["seeds"]) == ("0.860", "2")
    assert by_run["FedDA, SGDM"]["settings"].startswith("client_lr 0.1, server_lr 1")
    assert by_run["FedDA, Adam"]["ours"] == "0.7000"
    assert by_run["CLIMB"]["ours"] == "not finite"
    assert by_run["STEM"]["ours"] == "not run"
    assert by_run["FedOpt, SGDM"]["elsewhere"] == "0.852"
    assert "4 of 20 runs." in section(html, "tables")
    assert [row[:2] for row in body(html, "digits")[1:]] == [["FedAvg", "0.9000"]]
    assert "1 of 25 runs." in section(html, "others")


def missing(html):
    return re.findall(r"<li>(.*?)</li>", section(html, "missing"))


def test_what_was_not_run_is_counted_and_not_shown(html):
    gone = missing(html)
    for words in (
        "Table 2: 0 of 20 runs",
        "Table 2 without augmentation: 0 of 7 runs",
        "Table 3: 4 of 20 runs",
        "Table 6: 4 of 12 runs",
        "Figure 5: 6 of 45 runs",
        "Figure 6: 2 of 9 runs",  # each is read at six rounds
        "Handwritten digits: 1 of 25 runs",
    ):
        assert words in gone
    assert len(gone) == len(experiments.experiments())
    assert "id='table2'" not in html
    assert "id='curves-cifar100'" not in html
    assert "<h3>Table 11" not in html


def test_what_a_person_noted_is_on_the_page(html):
    told = section(html, "notes")
    assert "<h2>Of mine</h2>" in told
    assert "<li><b>One</b>, <code>a &lt; b</code>\n  and more.</li>\n<li>Two.</li>" in told


def test_every_verdict_is_told_in_words_and_with_its_evidence(html, results):
    told = verdicts.verdicts(cells.read_all(results), verdicts.read_beside(results))
    shown = re.findall(r"<li id='(F\d+)'>(.*?)</li>", section(html, "verdicts"), re.DOTALL)
    assert [name for name, _ in shown] == [f"F{number}" for number in range(1, 15)]
    for each, (_, item) in zip(told, shown, strict=True):
        assert each.verdict in re.search(r"<span class='verdict \w+'>(.*?)</span>", item)[1]
        text = re.sub(r"<.*?>", "", item)
        for part in (each.claim, each.told, each.measured):
            assert web.escape(part) in text
    before, _ = html.split("<section", 1)
    summary = re.findall(r"<span class='verdict \w+'>. (.*?)</span>", before)
    kinds = [each.verdict for each in told]
    assert set(summary) == {f"{kind}: {kinds.count(kind)}" for kind in kinds}
    assert "✓ holds" in shown[0][1]
    assert "Off by 1e-15" in shown[0][1]


def test_the_page_begins_with_fedda_beside_the_paper_and_the_best_other(html):
    before, _ = html.split("<section", 1)
    header, group, sgdm, adam = body(before, "glance")
    assert (header, group) == (list(glance.HEADER), [])
    assert "<a href='#table3'>Table 3: EMNIST, accuracy</a>" in before
    others = ["FedLin 0.4000", "FedAvg 0.850"]
    assert sgdm == ["SGDM", "0.860", "0.8500 ± 0.6353", "▲ ahead", *others, "2"]
    assert adam == ["Adam", "0.853", "0.7000", "▲ ahead", "FedLin 0.4000", "MimeLite 0.851", "1"]


def test_the_first_table_and_the_verdict_tell_the_same(tmp_path):
    for name, algorithm, end in (
        ("table3", "fedavg", 0.6),
        ("table3", "fedda-sgdm", 0.5),
        ("table3", "fedda-adam", 0.601),  # within a hundredth
        ("table3", "fedda-adagrad", None),
        ("table4", "fedavg", 0.02),
        ("table4", "fedda-sgdm", 0.01),
        ("table4", "fedda-adam", 0.03),
        ("table4", "fedda-adagrad", None),
    ):
        higher = name == "table3"
        for entry in entries(name, algorithm=algorithm):
            make(tmp_path, entry, (0.1, end), higher=higher)
    told = [glance.rows(name, found(tmp_path)) for name in ("table3", "table4")]
    places = [[row[3] for row in rows] for rows in told]
    ahead, level, behind = glance.PLACES.values()
    assert places == [[behind, level, behind], [ahead, behind, behind]]
    assert "in 1 ahead of all that were run, in 1 level with the best and in 4 behind" in (
        verdicts.rivals.best(found(tmp_path)).told
    )
    assert glance.rows("table2", found(tmp_path)) == []
    assert glance.html([]) == glance.markdown([]) == ""


def test_backticks_are_code(tmp_path):
    for entry in entries("table4", algorithm="fedavg"):
        make(tmp_path, entry, (0.1, 0.5))
    path, *_ = web.write(tmp_path, tmp_path / "out")
    told = section(path.read_text(), "tables")
    assert "(<code>benchmarks/tune.py</code>)" in told
    assert "`" not in told
    assert web._prose("`a < b` or `c`") == "<code>a &lt; b</code> or <code>c</code>"


def test_data_as_the_cited_code_prepares_it_stand_beside_the_paper(tmp_path):
    for name in ("table2-tff21", "table4-tff21"):
        make(tmp_path, entries(name, algorithm="fedavg")[0], (0.1, 0.5))
    path, *files = web.write(tmp_path, tmp_path / "out")
    html = path.read_text()
    for name, paper in (("table2-tff21", "0.324"), ("table4-tff21", "0.0171")):
        header, row = body(html, name)
        assert header[:3] == ["run", "paper", "ours"]
        assert row[:3] == ["FedAvg", paper, "0.5000"]
    assert files == [], "a figure of the table would be of the other data"


@pytest.mark.parametrize(
    ("key", "words"), [("mse", "MSE"), ("recall_at_5", "Recall at 5"), ("accuracy", "Accuracy")]
)
def test_metrics_are_called_by_their_names(tmp_path, key, words):
    (entry,) = entries("table3", algorithm="fedavg")
    make(tmp_path, entry, (0.1, 0.5), metric=key)
    rows = panels.training("table3", found(tmp_path))
    headings = [f"{words} by round", "Training loss by round", f"{words} by gigabytes sent"]
    assert [row.title for row in rows] == headings
    labels = [panel.y_label for row in rows for panel in row.panels[:1]]
    name = words if key == "mse" else words.lower()
    assert labels == [name, "training loss", name]


def test_provenance(html):
    told = section(html, "provenance")
    for words in (
        "Digits: 1 run<",
        "a made-up device, 2 devices",
        "jax 9.9.9",
        "jax 8.8.8",
        "c0ffee",
        "1970-01-01T00:00:00Z to 1970-01-01T00:00:00Z",
        "ab" * 32,
        "tf32",
        "0.50 hours",
        "Left out: 1 file<",
        "broken.json",
    ):
        assert words in told, words


def test_page_is_self_contained_and_escapes(html):
    visible = outside_scripts(html)
    assert not re.search(r"https?://", visible)
    assert not re.search(r"<(script|link|img|iframe)[^>]*\s(src|href)=['\"](?!data:)", html)
    assert not re.search(r"@import|url\(", visible)
    assert html.count("plotly.js v") == 1
    assert "<script>document.title" not in html
    assert "&lt;b&gt;&amp;&lt;/b&gt;" in visible
    ids = re.findall(r"\sid='([^']+)'", visible)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r"href='#([^']+)'", visible)) <= set(ids)


def test_figures_are_files_too(written):
    page, *files = written
    assert page.name == "results.html"
    kinds = ("emnist-metric", "emnist-train_loss", "emnist-gigabytes", "figure5", "figure6")
    names = {
        f"{name}.{suffix}" for name in (*kinds, "table6", "table9") for suffix in ("png", "pdf")
    }
    assert names <= {path.name for path in files}
    assert {path.name for path in page.parent.iterdir()} == {path.name for path in written}
    magic = {".png": b"\x89PNG\r\n\x1a\n", ".pdf": b"%PDF-"}
    for path in files:
        assert path.read_bytes().startswith(magic[path.suffix])


def test_an_empty_folder_is_a_message_and_theory_alone_a_page(tmp_path):
    with pytest.raises(InputError, match="holds no finished run"):
        web.write(tmp_path / "nowhere", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    (tmp_path / "theory").mkdir()
    (tmp_path / "theory" / "theory.json").write_text('{"claims": []}')
    (page,) = web.write(tmp_path, tmp_path / "out")
    assert "plotly" not in page.read_text()
    names = [each.title.partition(":")[0] for each in experiments.experiments().values()]
    for name, told in zip(names, missing(page.read_text()), strict=True):
        assert re.fullmatch(rf"{name}: 0 of \d+ runs", told)


# --------------------------------------------------------------------------------------- the curves


def test_a_curve_leaves_out_the_many_evaluations_of_the_last_rounds(tmp_path):
    entry = entries("table3", algorithm="fedda-sgdm")[0]
    at = [0, 750, 1400, 1410, 1500]
    make(tmp_path, entry, (0.1, 0.2, 0.3, 0.4, 0.5), losses=(1.0,) * 4, at=at)
    metric, *_ = panels.training("table3", found(tmp_path))
    assert list(metric.panels[0].lines[0].curve.x) == [0, 750, 1400, 1500]


def test_curves_are_means_over_seeds(results):
    metric, loss, sent = panels.training("table3", found(results))
    assert [panel.title for panel in metric.panels] == ["SGDM", "Adam", "AdaGrad"]
    by_label = {line.curve.label: line for line in metric.panels[0].lines}
    assert list(by_label) == ["FedDA", "FedLin", "CLIMB"]
    fedda = by_label["FedDA"].curve
    assert fedda.x == [0, 500, 1000, 1500]
    np.testing.assert_allclose(fedda.mean, [0.15, 0.55, 0.75, 0.85])
    np.testing.assert_allclose(fedda.low, [0.1, 0.5, 0.7, 0.8])
    np.testing.assert_allclose(fedda.high, [0.2, 0.6, 0.8, 0.9])
    np.testing.assert_array_equal(by_label["CLIMB"].curve.mean, [0.1, 0.2, math.nan, math.nan])
    assert [line.curve.label for line in metric.panels[0].lines if line.thick] == ["FedDA"]
    np.testing.assert_allclose(loss.panels[0].lines[0].curve.mean[1:], LOSSES)
    assert sent.panels[0].lines[0].curve.x == [0, 1.5, 3, 4.5], "three megabytes a round"


def test_full_batch_rounds_stand_beside_the_same_runs_without_them(tmp_path):
    """Of FedDA's best and of the best other; a method that was run one way alone is not drawn."""
    runs = {
        ("tuned-emnist", "fedda-sgdm"): (0.1, 0.5, 0.6, 0.7, 0.7),
        ("tuned-emnist", "fedda-adam"): (0.1, 0.5, 0.6, 0.7, 0.8),
        ("tuned-emnist", "fedopt-sgdm"): (0.1, 0.4, 0.5, 0.6, 0.6),
        ("tuned-emnist", "fedavg"): (0.1, 0.3, 0.4, 0.5, 0.5),
        ("recommended-emnist", "fedda-sgdm"): (0.1, 0.5, 0.6, 0.7, 0.9),
        ("recommended-emnist", "fedda-adam"): (0.1, 0.5, 0.6, 0.7, 0.8),
        ("recommended-emnist", "fedopt-adam"): (0.1, 0.5, 0.6, 0.7, 0.95),  # not tuned
        ("recommended-emnist", "fedavg"): (0.1, 0.3, 0.4, 0.5, 0.6),
        ("recommended-emnist", "fedopt-sgdm"): (0.1, 0.4, 0.5, 0.6, 0.5),
        ("recommended-cifar100", "fedda-sgdm"): (0.1, 0.2, 0.3, 0.4, 0.5),  # no other
    }
    for (name, algorithm), values in runs.items():
        entry = entries(name, algorithm=algorithm)[0]
        at = [sixths * entry.values["rounds"] // 6 for sixths in (0, 2, 3, 4, 6)]
        make(tmp_path, entry, values, losses=(1.0,) * 4, at=at)
    row = panels.full_batches(found(tmp_path))
    (panel,) = row.panels
    assert (panel.title, panel.y_label) == ("EMNIST, SGDM", "accuracy")
    drawn = {line.curve.label: line for line in panel.lines}
    with_them, without = "FedDA, full-batch rounds at the end", "FedDA"
    assert list(drawn) == [with_them, without, "FedAvg, full-batch rounds at the end", "FedAvg"]
    assert drawn[with_them].curve[1:3] == ([750, 1000, 1500], [0.6, 0.7, 0.9]), "the last half"
    assert drawn[without].curve.mean == [0.6, 0.7, 0.7]
    assert [line.thick for line in panel.lines] == [True, False, True, False]
    assert drawn[with_them].style == drawn[without].style != drawn["FedAvg"].style
    web.write(tmp_path, tmp_path / "out")
    assert (tmp_path / "out" / "full-batches.png").exists()
    assert "full-batches-emnist" in (tmp_path / "out" / "results.html").read_text()


def test_a_method_has_one_style_whatever_else_was_run(results):
    first, second, third = panels.training("table3", found(results))[0].panels
    styles = [{line.curve.label: line.style for line in each.lines} for each in (first, second)]
    assert styles[0] == styles[1]
    assert len(set(styles[0].values())) == 3
    assert [line.curve.label for line in third.lines] == ["FedLin", "CLIMB"]
    assert {line.curve.label: line.style for line in third.lines}.items() < styles[0].items()


def test_what_diverges_leaves_the_plot(results):
    _, loss, _ = panels.training("table3", found(results))
    for panel in loss.panels:  # 0.5 to 20, and 5 % more at both ends of a logarithmic axis
        assert panel.log_y
        assert panel.y_range == pytest.approx((0.5 / 40**0.05, 20 * 40**0.05))
    calm = [one for one in found(results) if one.config.algorithm != "climb"]
    _, loss, _ = panels.training("table3", calm)
    assert [panel.y_range for panel in loss.panels] == [None, None, None]


def test_what_diverges_at_once_does_not_stretch_the_plot(tmp_path):
    for algorithm in ("fedavg", "fedlin", "climb"):
        make(tmp_path, entries("table3", algorithm=algorithm)[0], (0.1, 0.5))
    make(tmp_path, entries("table3", algorithm="stem")[0], (0.1, 0.1), losses=(1e34, None))
    _, loss, _ = panels.training("table3", found(tmp_path))
    assert all(panel.y_range is None or panel.y_range[1] < 30 for panel in loss.panels)


def drawn(*curves):
    """A panel of accuracies from round 0 to 100, with bands of 0.02."""
    lines = []
    for number, mean in enumerate(curves):
        ends = [[value + off for value in mean] for off in (-0.01, 0.01)]
        lines.append(Line(Curve(str(number), list(range(0, 101, 25)), list(mean), *ends), number))
    return panels._cropped(Panel("made-up", "round", "accuracy", lines), less=False)


GOOD, BETTER = (0.1, 0.7, 0.75, 0.79, 0.8), (0.1, 0.75, 0.8, 0.84, 0.85)
FAILED = (0.1, 0.5, 0.05, 0.05, 0.05)


def test_beginnings_and_failures_do_not_flatten_what_is_learnt():
    panel = drawn(GOOD, BETTER, FAILED)
    low, high = 0.7 - 0.01, 0.85 + 0.01
    room = 0.05 * (high - low)
    assert panel.y_range == pytest.approx((low - room, high + room))
    assert not panel.log_y
    bands = [line.curve.low != line.curve.high for line in panel.lines]
    assert bands == [True, True, False], "that of a failure would cover the others"


@pytest.mark.parametrize(
    "curves",
    [
        (GOOD, FAILED, FAILED),  # most fail: that is what there is to see
        (GOOD, (0.1, 0.2, 0.4, 0.6, 0.8)),  # all is learnt late
        ((math.nan,) * 5, (math.nan,) * 5),
    ],
)
def test_an_axis_has_everything_unless_most_is_learnt_early(curves):
    panel = drawn(*curves)
    assert panel.y_range is None
    assert all(line.curve.low is not line.curve.high for line in panel.lines)


def test_the_precision_of_most_seeds_is_drawn(tmp_path):
    (entry,) = entries("table3", algorithm="fedavg")
    make(tmp_path, entry, (0.1, 0.9), precision="bf16")
    for seed in (0, 1):
        make(tmp_path, entry, (0.1, 0.5), seed, precision="f32")
    make(tmp_path, entry, (0.1, 0.7), precision="tf32")
    ((_, own),) = evidence.runs_of([entry], found(tmp_path))
    assert [(one.config.precision, one.config.seed) for one in own] == [("f32", 0), ("f32", 1)]


def test_local_iterations_and_rounds(results):
    def setting(entry):
        return entry.values["local_work"]

    row = panels.varied("figure5", found(results), "local iterations", setting)
    (panel,) = row.panels
    (line,) = (line for line in panel.lines if line.curve.label == "FedDA, Adam")
    assert line.curve.x == [1, 2, 5, 10, 20]
    np.testing.assert_allclose(line.curve.mean, [0.51, 0.52, 0.55, 0.7, 0.7])
    row = panels.varied("figure6", found(results), "rounds", lambda entry: entry.at)
    sgdm, adam = row.panels[0].lines
    assert sgdm.curve.x == [50, 100, 200, 500, 1000, 1500]
    assert row.panels[0].x_ticks == [1500, 500, 200, 100, 50], "1,000 would touch 1,500"
    np.testing.assert_allclose(sgdm.curve.mean[3:], [0.55, 0.75, 0.85])
    np.testing.assert_allclose(adam.curve.mean[3:], [0.4, 0.6, 0.7])
    assert panels.varied("figure5-scaled", [], "local iterations", setting) is None


def test_a_single_point_is_not_drawn(results):
    """Runs of table 3 have ten local iterations: one point of figure 5 for each optimiser."""

    def drawn(cells):
        return panels.varied("figure5", cells, "T", lambda entry: entry.values["local_work"])

    of_table = [one for one in found(results) if one.config.local_work == 10]
    assert len({one.config.algorithm for one in of_table if "fedda" in one.config.algorithm}) == 2
    assert drawn(of_table) is None
    assert [len(line.curve.x) for line in drawn(found(results)).panels[0].lines] == [1, 5]


# ---------------------------------------------------------------------------------------- the rates


def strip(ours, paper=(0.1, 0.2, 0.3, 0.4)):
    made = [None if value is None else tables.Interval(value, None) for value in ours]
    return rates.Strip("emnist", "client_lr", "server_lr 1", [1.0, 2.0, 3.0, 4.0], [*paper], made)


@pytest.mark.parametrize(
    ("ours", "words"),
    [
        ((0.5, 0.6, 0.7, 0.8), "6 of 6 pairs in the paper's order"),
        ((0.8, 0.7, 0.6, 0.5), "0 of 6 pairs in the paper's order"),
        ((0.5, None, 0.7, None), "2 of 4 were run"),
        ((0.5, 0.5, 0.5, 0.5), "0 of 6 pairs in the paper's order"),
        ((math.nan, 0.6, 0.7, 0.8), "6 of 6 pairs in the paper's order"),
    ],
)
def test_agreement_with_the_paper(ours, words):
    assert rates.agreement(strip(ours)) == words


def test_strips_are_paper_beside_ours(results, html):
    (made,) = rates.strips("table6", found(results))
    assert (made.task, made.varied, made.fixed) == ("emnist", "client_lr", "server_lr 0.1")
    assert made.rates == [1, 3.3, 10, 33]
    assert made.paper == [0.778, 0.819, 0.783, 0.052]
    np.testing.assert_allclose([each.mean for each in made.ours], np.array(made.paper) / 2)
    told = section(html, "rates")
    assert "EMNIST, server_lr 0.1: 6 of 6 pairs in the paper&#x27;s order" in told
    for words in (">0.778<", ">0.389<", ">0.052<", ">0.026<"):
        assert words in told
    assert "1 of 4 were run" in told, "table 9 has a run of table 3"
    # 0.819 is the highest and has the full colour, its half has half of it.
    assert "rgba(0, 114, 178, 0.60)'>0.819<" in told
    assert re.search(r"rgba\(0, 114, 178, 0\.30\)'>0\.4(09|10)<", told)


def test_what_is_missing_or_not_finite_has_no_colour():
    shown = rates.html(strip((math.nan, None, 0.2, 0.4)))
    assert "rgba(0, 114, 178, 0.00)'>not finite<" in shown
    assert "rgba(0, 114, 178, 0.00)'>not run<" in shown


# ------------------------------------------------------------------------------------ in a browser


@pytest.fixture(scope="module")
def browser(chromium, written):
    chromium.get(written[0].as_uri())
    return chromium


@pytest.mark.parametrize("width", [1280, 360])
def test_plots_are_drawn_inside_their_boxes(browser, width):
    resize(browser, width)
    plots = browser.execute_script(
        """
        return [...document.querySelectorAll('.js-plotly-plot')].map(plot => {
          const [box, drawn] = [plot.closest('figure'), plot.querySelector('.main-svg')]
            .map(each => each.getBoundingClientRect());
          return [plot.id, drawn.left - box.left, box.right - drawn.right];
        });
        """
    )
    kinds = ("metric", "train_loss", "gigabytes")
    optimisers = ("sgdm", "adam", "adagrad")
    assert [name for name, *_ in plots] == [
        *(f"plot-emnist-{kind}-{each}" for kind in kinds for each in optimisers),
        "plot-figure5-emnist",
        "plot-figure6-emnist",
    ]
    for name, left, right in plots:
        assert min(left, right) > -1, name
        assert len(line_paths(browser, name)) >= 2
    *others, fedda = line_paths(browser, "plot-emnist-metric-sgdm")
    assert len(others) == 2
    assert fedda[1] > 0.4 * min(width, 380)
    widths = browser.execute_script(
        "return [...document.querySelectorAll('#plot-emnist-metric-sgdm .cartesianlayer .js-line')]"
        ".map(line => parseFloat(getComputedStyle(line).strokeWidth))"
    )
    assert [width for width in widths if width > 0] == [2, 2, 4], "FedDA is thick and above"


@pytest.mark.parametrize("width", [1280, 360])
def test_only_boxes_scroll_sideways(browser, width):
    resize(browser, width)
    browser.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
    page, table, box, overflow = browser.execute_script(
        """
        const table = document.querySelector('#table3');
        const box = table.parentElement;
        return [document.documentElement.scrollWidth - innerWidth, table.scrollWidth,
                box.clientWidth, getComputedStyle(box).overflowX];
        """
    )
    assert page <= 0
    assert (table > box) == (width == 360)
    assert overflow == "auto"


def luminance(colour):
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour]
    return np.dot(linear, (0.2126, 0.7152, 0.0722))


def contrast(one, other):
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def rgb(text, below=None):
    """A colour as CSS computes it, between 0 and 1, laid over another."""
    *colour, alpha = [*map(float, re.findall(r"[\d.]+", text)), 1.0][:4]
    colour = np.array(colour) / 255
    return colour if below is None else alpha * colour + (1 - alpha) * below


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_colour_schemes_are_readable(browser, scheme):
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    try:
        resize(browser, 1280)
        page, colours = browser.execute_script(
            """
            const all = '.verdict, #table3 td, .small, .strip td, a, dt, dd, caption, figcaption';
            const shown = [...document.querySelectorAll(all)].map(each => {
              const style = getComputedStyle(each);
              return [each.textContent, style.color, style.backgroundColor];
            });
            const labels = [...document.querySelectorAll('.plot :is(.xtick, .legend) text')]
              .map(each => [each.textContent, getComputedStyle(each).fill, 'rgba(0, 0, 0, 0)']);
            return [getComputedStyle(document.body).backgroundColor, [...shown, ...labels]];
            """
        )
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
    page = rgb(page)
    assert (luminance(page) > 0.5) == (scheme == "light")
    assert len(colours) > 200
    for text, ink, background in colours:
        assert contrast(rgb(ink), rgb(background, page)) >= 4.5, (text, ink, background)


def test_nothing_is_loaded_run_or_wrong(browser):
    browser.get_log("browser")
    browser.refresh()
    assert browser.title == web.TITLE
    loaded = browser.execute_script(
        "return performance.getEntriesByType('resource').map(entry => entry.name)"
    )
    assert [name for name in loaded if not name.startswith("data:")] == []
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_the_axis_ends_where_something_leaves_it(browser):
    low, high = browser.execute_script(
        "return document.getElementById('plot-emnist-train_loss-sgdm').layout.yaxis.range"
    )
    assert 10**high == pytest.approx(20 * 40**0.05)
    assert 10**low == pytest.approx(0.5 / 40**0.05)
    labels = browser.execute_script(
        "return [...document.querySelectorAll('#plot-emnist-train_loss-sgdm .ytick text')]"
        ".map(label => label.textContent)"
    )
    assert labels == ["0.5", "1", "2", "5", "10", "20"]


def test_a_phone_shows_the_answer_first(browser):
    resize(browser, 390)
    marks, places, ours, seeds = browser.execute_script(
        """
        const end = (all, side) => Math.max(
          ...[...document.querySelectorAll(all)].map(e => e.getBoundingClientRect()[side]));
        return [end('p > .verdict', 'bottom'), end('#glance td:nth-child(4)', 'right'),
                end('#glance', 'bottom'), end('#table3 td:nth-child(4)', 'right')];
        """
    )
    assert marks < 844
    assert ours < 844
    assert places <= 390
    assert seeds <= 390, "paper, ours and seeds need no scrolling"


def test_numbers_of_a_verdict_unfold(browser):
    resize(browser, 1280)
    shown = "return document.querySelector('#F6 details p').checkVisibility()"
    assert not browser.execute_script(shown)
    browser.find_element("css selector", "#F6 summary").click()
    assert browser.execute_script(shown)


def test_tables_fit_on_paper(browser):
    """A sheet of A4 with Chromium's margins is 718 pixels wide."""
    resize(browser, 718)
    wide = (
        "return [...document.querySelectorAll('table')].map(t => t.offsetWidth).some(w => w > 686)"
    )
    assert browser.execute_script(wide)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        assert not browser.execute_script(wide)
    finally:
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
