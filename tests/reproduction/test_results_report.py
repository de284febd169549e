"""The web page of a results folder: made-up runs, what is drawn of them, and a browser."""

import math
import re

import numpy as np
import pytest

from fedda.errors import InputError
from fedda.reports.statistics import Curve
from fedda_reproduction.paper import cells, report
from helpers.browser import chromium, line_paths, resize  # noqa: F401 - a fixture
from helpers.finished_runs import RESULTS, entries, entry_of, write_cell

WORDS = "396 writers <b>&</b> <script>document.title = 'run'</script>"


def found(folder):
    return cells.read_all(folder).finished


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A part of table 3, and figure 5 for one optimiser."""
    folder = tmp_path_factory.mktemp("results")
    for entry in entries("figure5", task="emnist", algorithm="fedda-adam"):
        write_cell(folder, entry, (0.1, 0.5 + entry.values["local_work"] / 100))
    for algorithm, values, seeds in (  # FedDA+Adam has ten local iterations: in both
        ("fedda-sgdm", (0.1, 0.5, 0.7, 0.8), 2),
        ("fedda-adam", (0.1, 0.4, 0.6, 0.7), 1),
        ("fedlin", (0.1, 0.2, 0.3, 0.4), 1),
        ("climb", (0.1, 0.2, None, None), 1),
    ):
        for seed in range(seeds):
            raised = [value and value + 0.1 * seed for value in values]
            write_cell(folder, entry_of("table3", algorithm), raised, seed, data={"words": WORDS})
    return folder


@pytest.fixture(scope="module")
def written(results, tmp_path_factory):
    return report.write(results, tmp_path_factory.mktemp("page") / "deep")


@pytest.fixture(scope="module")
def html(written):
    return written[0].read_text()


def test_the_page_is_the_readme_with_figures(html, written):
    page, *files = written
    assert page.name == "results.html"
    assert "<h2 id='table-3-emnist-accuracy'>Table 3: EMNIST, accuracy</h2>" in html
    assert re.search(r"<td[^>]*>FedDA, SGDM</td>\s*<td[^>]*>0.860</td>", html)
    assert '<td style="text-align:right">0.8500 ± 0.6353</td>' in html
    assert html.count("<div class='scroll'><table>") == html.count("<table>") > 3
    names = ("table3-metric", "table3-train_loss", "figure5", "figure6")
    assert {path.name for path in files} == {f"{name}.png" for name in names}
    assert html.index("plot-table3-metric-sgdm") < html.index('<td style="text-align:left">FedDA')
    for path in files:
        assert path.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")


def test_the_page_loads_nothing_and_runs_nothing_of_the_data(html):
    visible = re.sub(r"<script>.*?</script>", "", html, flags=re.DOTALL)
    assert not re.search(r"https?://", visible)
    assert not re.search(r"<(script|link|img|iframe)[^>]*\s(src|href)=['\"](?!data:)", html)
    assert not re.search(r"@import|url\(", visible)
    assert "<script>document.title" not in html
    assert "<!-- " not in visible
    ids = re.findall(r"\sid='([^']+)'", visible)
    assert len(ids) == len(set(ids))


def test_every_link_and_image_of_the_committed_pages_leads_somewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "draw", lambda name, found: {})  # pictures are slow
    pages = report.write(RESULTS, tmp_path)
    assert {page.name for page in pages} >= {"results.html", "table2.html", "claims.html"}
    for page in pages:
        text = page.read_text()
        targets = re.findall(r'(?:href|src)="([^":]*)"', text)
        assert targets, page
        for target in targets:
            path, _, heading = target.partition("#")
            assert (page.parent / path).exists(), (page.name, target)
            assert not heading or f"<h2 id='{heading}'>" in (page.parent / path).read_text()


def test_an_empty_folder_is_a_message(tmp_path):
    with pytest.raises(InputError, match="holds no finished runs"):
        report.write(tmp_path / "nowhere", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------------------------- curves


def test_curves_are_means_over_seeds(results):
    made = report.draw("table3", found(results))
    panels = made["table3-metric"]
    assert [panel.title for panel in panels] == ["SGDM", "Adam", "AdaGrad"]
    by_label = {line.curve.label: line for line in panels[0].lines}
    assert list(by_label) == ["FedDA", "FedLin", "CLIMB"]
    fedda = by_label["FedDA"].curve
    assert fedda.x == [0, 500, 1000, 1500]
    np.testing.assert_allclose(fedda.mean, [0.15, 0.55, 0.75, 0.85])
    np.testing.assert_allclose(fedda.low, [0.1, 0.5, 0.7, 0.8])
    np.testing.assert_allclose(fedda.high, [0.2, 0.6, 0.8, 0.9])
    np.testing.assert_array_equal(by_label["CLIMB"].curve.mean, [0.1, 0.2, math.nan, math.nan])
    assert [line.curve.label for line in panels[0].lines if line.thick] == ["FedDA"]
    loss = made["table3-train_loss"][0]
    assert loss.y_label == "training loss"
    np.testing.assert_allclose(loss.lines[0].curve.mean[1:], (20.0, 1.0, 0.5))
    styles = [{line.curve.label: line.style for line in panel.lines} for panel in panels[:2]]
    assert styles[0] == styles[1], "a method has one style"


def test_a_curve_leaves_out_the_many_evaluations_of_the_last_rounds(tmp_path):
    at = [0, 750, 1400, 1410, 1500]
    values = (0.1, 0.2, 0.3, 0.4, 0.5)
    write_cell(tmp_path, entry_of("table3", "fedda-sgdm"), values, losses=(1.0,) * 4, at=at)
    panel, *_ = report.draw("table3", found(tmp_path))["table3-metric"]
    assert list(panel.lines[0].curve.x) == [0, 750, 1400, 1500]


@pytest.mark.parametrize(
    ("means", "higher", "expected"),
    [
        # The two better of three, after a twentieth of the rounds; 5 % more at both ends.
        ([(0.1, 0.7, 0.8), (0.1, 0.75, 0.85), (0.1, 0.05, 0.05)], True, (0.7, 0.85)),
        ([(9.0, 2.0, 1.0), (9.0, 3.0, 1.5), (9.0, 1e30, math.nan)], False, (1.0, 3.0)),
        ([(0.5, 0.5, 0.5)], True, None),
        ([(math.nan,) * 3], True, None),
    ],
)
def test_failures_and_beginnings_do_not_flatten_what_is_learnt(means, higher, expected):
    curves = [Curve("a", [0, 50, 100], list(mean), list(mean), list(mean)) for mean in means]
    shown = report._y_range(curves, higher)
    if expected is None:
        assert shown is None
    else:
        room = 0.05 * (expected[1] - expected[0])
        assert shown == pytest.approx((expected[0] - room, expected[1] + room))


def test_full_batch_rounds_stand_beside_the_same_runs_without_them(tmp_path):
    """Of FedDA's best and of the best other; a method that was run one way alone is not drawn."""
    runs = {
        ("tuned-emnist", "fedda-sgdm"): (0.1, 0.5, 0.6, 0.7, 0.7),
        ("tuned-emnist", "fedda-adam"): (0.1, 0.5, 0.6, 0.7, 0.8),
        ("tuned-emnist", "fedavg"): (0.1, 0.3, 0.4, 0.5, 0.5),
        ("recommended-emnist", "fedda-sgdm"): (0.1, 0.5, 0.6, 0.7, 0.9),
        ("recommended-emnist", "fedda-adam"): (0.1, 0.5, 0.6, 0.7, 0.8),
        ("recommended-emnist", "fedopt-adam"): (0.1, 0.5, 0.6, 0.7, 0.95),  # not tuned
        ("recommended-emnist", "fedavg"): (0.1, 0.3, 0.4, 0.5, 0.6),
        ("recommended-cifar100", "fedda-sgdm"): (0.1, 0.2, 0.3, 0.4, 0.5),  # no other
    }
    for (name, algorithm), values in runs.items():
        entry = entry_of(name, algorithm)
        at = [sixths * entry.values["rounds"] // 6 for sixths in (0, 2, 3, 4, 6)]
        write_cell(tmp_path, entry, values, losses=(1.0,) * 4, at=at)
    (panel,) = report.draw("full-batches", found(tmp_path))["full-batches"]
    assert (panel.title, panel.y_label) == ("EMNIST", "accuracy")
    drawn = {line.curve.label: line for line in panel.lines}
    with_them, without = "FedDA, full-batch rounds at the end", "FedDA"
    assert list(drawn) == [with_them, without, "FedAvg, full-batch rounds at the end", "FedAvg"]
    assert drawn[with_them].curve[1:3] == ([750, 1000, 1500], [0.6, 0.7, 0.9]), "the last half"
    assert drawn[without].curve.mean == [0.6, 0.7, 0.7]
    assert [line.thick for line in panel.lines] == [True, False, True, False]
    assert drawn[with_them].style == drawn[without].style != drawn["FedAvg"].style


def test_local_iterations_and_rounds(results):
    (panel,) = report.draw("figure5", found(results))["figure5"]
    assert (panel.x_label, panel.markers) == ("local iterations", True)
    (line,) = (line for line in panel.lines if line.curve.label == "FedDA, Adam")
    assert line.curve.x == [1, 2, 5, 10, 20]
    np.testing.assert_allclose(line.curve.mean, [0.51, 0.52, 0.55, 0.7, 0.7])
    (panel,) = report.draw("figure6", found(results))["figure6"]
    sgdm, adam, _ = panel.lines
    assert sgdm.curve.x == [50, 100, 200, 500, 1000, 1500]
    np.testing.assert_allclose(sgdm.curve.mean[3:], [0.55, 0.75, 0.85])
    np.testing.assert_allclose(adam.curve.mean[3:], [0.4, 0.6, 0.7])
    of_table = [one for one in found(results) if one.config.local_work == 10]
    assert report.draw("figure5", of_table) == {}, "a single point is not drawn"


# ------------------------------------------------------------------------------------ in a browser


@pytest.fixture(scope="module")
def browser(chromium, written):  # noqa: F811 - the fixture
    chromium.get(written[0].as_uri())
    return chromium


@pytest.mark.parametrize("width", [1280, 360])
def test_plots_are_drawn_inside_their_boxes_and_only_tables_scroll_sideways(browser, width):
    resize(browser, width)
    plots = browser.execute_script(
        """
        return [...document.querySelectorAll('.plot')].map(plot => {
          const [box, drawn] = [plot.closest('figure'), plot.querySelector('.canvas svg')]
            .map(each => each.getBoundingClientRect());
          return [plot.id, drawn.left - box.left, box.right - drawn.right];
        });
        """
    )
    assert len(plots) == 8
    for name, left, right in plots:
        assert min(left, right) > -1, name
        assert len(line_paths(browser, name)) >= 1
    page, overflow = browser.execute_script(
        "return [document.documentElement.scrollWidth - innerWidth,"
        " getComputedStyle(document.querySelector('table').parentElement).overflowX]"
    )
    assert page <= 0
    assert overflow == "auto"


def test_nothing_is_loaded_run_or_wrong(browser):
    browser.get_log("browser")
    browser.refresh()
    assert browser.title == "Results"
    loaded = browser.execute_script(
        "return performance.getEntriesByType('resource').map(entry => entry.name)"
    )
    assert [name for name in loaded if not name.startswith("data:")] == []
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
