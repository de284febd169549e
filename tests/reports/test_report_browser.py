"""Opens the page as a reader would: in Chromium, from a file, without a network."""

import json
from io import BytesIO

import numpy as np
import pytest
from matplotlib.image import imread

from fedda.reports import comparison, tables
from fedda.reports.runs import read_runs
from fedda.reports.statistics import table
from helpers.browser import line_paths, resize

ALGORITHMS = ("<b><script>document.title = 'run'</script></b>", "fedadam", "fedavg", "fedda-adam")


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    directory = tmp_path_factory.mktemp("report")
    for number, algorithm in enumerate(ALGORITHMS):
        for seed in (0, 1):
            run = directory / f"{number}-{seed}"
            run.mkdir()
            (run / "config.toml").write_text(
                f'algorithm = "{algorithm}"\ntask = "digits"\nseed = {seed}\n'
                f'commit = "{"0123456789abcdef" * 8}"\n'
            )
            rows = [
                {
                    "round": 40 * i,
                    "train_loss": None if i == 0 else (2.0 + seed) / (i + number),
                    "loss": 1.0,
                    "accuracy": 0.9 - (0.8 + 0.02 * seed) / (1 + i * (1 + number)),
                    "bytes_down": 1_000_000 * i,
                    "bytes_up": 500_000 * i,
                    "nonfinite_clients": 0,
                    "skipped_rounds": 0,
                }
                for i in range(6)
            ]
            (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = directory / "report.html"
    path.write_text(comparison.page(read_runs([directory]), "comparison.html"))
    return path


@pytest.fixture(scope="module")
def browser(chromium, page):
    chromium.get(page.as_uri())
    return chromium


@pytest.mark.parametrize("width", [1280, 390])
def test_every_plot_draws_a_line_per_algorithm(browser, width):
    resize(browser, width)
    plots = browser.execute_script(
        "return [...document.querySelectorAll('.js-plotly-plot')].map(plot => plot.id)"
    )
    assert plots == ["plot-metric", "plot-train_loss", "plot-megabytes"]
    for plot in plots:
        lines = line_paths(browser, plot)
        assert len(lines) == len(ALGORITHMS)
        assert len({d for d, _ in lines}) == len(ALGORITHMS)
        for d, drawn in lines:
            assert d.count(",") >= 5  # as many points as trained evaluations
            assert drawn > 0.4 * width
        legend = browser.execute_script(
            "return [...document.querySelectorAll(`#${arguments[0]} .legendtext`)]"
            ".map(text => text.textContent)",
            plot,
        )
        assert legend == list(ALGORITHMS)


@pytest.mark.parametrize("width", [1280, 390])
def test_page_does_not_scroll_sideways(browser, width):
    resize(browser, width)
    browser.execute_script("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert browser.execute_script(
        "return document.documentElement.scrollWidth <= innerWidth"
        " && document.body.scrollWidth <= innerWidth"
    )


@pytest.mark.parametrize("width", [1280, 390])
def test_the_last_round_has_its_label(browser, width):
    resize(browser, width)
    labels = browser.execute_script(
        "return [...document.querySelectorAll('#plot-metric .xtick text')]"
        ".filter(text => getComputedStyle(text).display != 'none' && text.style.opacity != '0')"
        ".map(text => [text.textContent, text.getBoundingClientRect().right])"
    )
    assert labels[-1][0] == "200"
    assert labels[-1][1] <= width


def test_a_shadow_tells_that_the_table_goes_on(browser):
    resize(browser, 390)

    def light_at_the_edge():
        """In the last column of pixels; half of them, at least, are no letters or lines."""
        box = browser.find_element("css selector", ".scroll")
        drawn = imread(BytesIO(box.screenshot_as_png))
        return np.median(drawn[:, -2, :3])

    before = light_at_the_edge()
    browser.execute_script("document.querySelector('.scroll').scrollLeft = 10000")
    assert before < 0.95
    assert light_at_the_edge() == 1, "here it ends"


def test_table_holds_the_formatted_rows(browser, page):
    shown = browser.execute_script(
        "return [...document.querySelectorAll('#results tr')]"
        ".map(row => [...row.cells].map(cell => cell.textContent))"
    )
    assert shown == tables.text_table(table(read_runs([page.parent])))
    assert [line[0] for line in shown[1:]] == list(ALGORITHMS)


def test_names_do_not_run_and_nothing_leaves_the_page(browser):
    browser.refresh()
    assert browser.title == "Federated algorithms on digits"
    loaded = browser.execute_script(
        "return performance.getEntriesByType('resource').map(entry => entry.name)"
    )
    assert [name for name in loaded if not name.startswith("data:")] == []
    buttons = browser.execute_script(
        "return [...document.querySelectorAll('#plot-metric .modebar-btn')]"
        ".map(button => button.dataset.title)"
    )
    assert len(buttons) == 5
    assert not any("share" in button.lower() or "cloud" in button.lower() for button in buttons)


def test_console_has_no_errors(browser):
    browser.refresh()
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []
