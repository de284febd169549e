"""Opens the page as a reader would: in Chromium, from a file, without a network."""

import itertools
import json
import re

import pytest

from fedda.reports import comparison, tables
from fedda.reports.runs import read_runs
from fedda.reports.statistics import table
from helpers.browser import colours, line_paths, resize, wait_for_plots

# The first is the worst.
ALGORITHMS = ("<b><script>document.title = 'run'</script></b>", "fedadam", "fedavg", "fedda-adam")
VIEWS = ["plot-metric", "plot-megabytes", "plot-seconds"]
PLOTS = [*VIEWS, "plot-train_loss", "plot-clients"]


def write_run(directory, algorithm, seed, number):
    """A run whose accuracy ends at 0.9 and some, as those of an easy task do."""
    directory.mkdir()
    (directory / "config.toml").write_text(
        f'algorithm = "{algorithm}"\ntask = "digits"\nseed = {seed}\n'
        f'commit = "{"0123456789abcdef" * 8}"\nnumber = {number}\n'
    )
    rows = [
        {
            "round": 40 * i,
            "train_loss": None if i == 0 else (2.0 + seed) / (i + number),
            "loss": 1.0,
            "accuracy": 0.95 + number / 200 - (0.85 + 0.02 * seed) / (1 + i**3 * (1 + number)),
            "bytes_down": 1_000_000 * i,
            "bytes_up": 500_000 * i,
            "nonfinite_clients": 0,
            "skipped_rounds": 0,
        }
        for i in range(6)
    ]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    accuracies = [0.5 + number / 20 + client / 100 for client in range(20)]
    summary = {
        "metric": "accuracy",
        "higher_is_better": True,
        "seconds": {"total": 3.0, "compile": 1.0},
        "per_client": {
            "on": "test",
            "metrics": {"accuracy": accuracies},
            "lower_is_better": [],
            "clients": list(range(20)),
            "examples": [10] * 20,
        },
    }
    (directory / "summary.json").write_text(json.dumps(summary))


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    directory = tmp_path_factory.mktemp("report")
    for number, algorithm in enumerate(ALGORITHMS):
        for seed in (0, 1):
            write_run(directory / f"{number}-{seed}", algorithm, seed, number)
    return comparison.write(read_runs([directory]), directory).files[0]


@pytest.fixture(scope="module")
def browser(chromium, page):
    chromium.get(page.as_uri())
    return chromium


def show_everything(browser):
    """Opens every part that unfolds, and the plot of every tab."""
    browser.execute_script(
        "document.querySelectorAll('details').forEach(part => part.open = true);"
        "document.querySelectorAll('.plot').forEach(plot => plot.hidden = false);"
    )
    wait_for_plots(browser)


def names_beside(browser, plot):
    """The labels at the ends of lines: their text and their boxes."""
    return browser.execute_script(
        "return [...document.querySelectorAll(`#${arguments[0]} text.end`)].map(text => {"
        " const box = text.getBoundingClientRect();"
        " return [text.textContent, box.top, box.bottom, box.right] })",
        plot,
    )


@pytest.mark.parametrize("width", [1280, 390])
def test_every_plot_draws_a_line_per_algorithm(browser, width):
    resize(browser, width)
    show_everything(browser)
    plots = browser.execute_script(
        "return [...document.querySelectorAll('.plot')].map(plot => plot.id)"
    )
    assert plots == PLOTS
    for plot in plots:
        lines = line_paths(browser, plot)
        assert len(lines) == len(ALGORITHMS)
        assert len({d for d, _ in lines}) == len(ALGORITHMS)
        for d, drawn in lines:
            assert d.count(",") >= 5  # as many points as trained evaluations
            assert drawn > 0.4 * width
        legend = browser.execute_script(
            "return [...document.querySelectorAll(`#${arguments[0]} .legend button`)]"
            ".map(text => text.textContent)",
            plot,
        )
        assert legend == list(reversed(ALGORITHMS)), "the best first"


def test_curves_that_end_close_together_are_apart(browser):
    """The accuracies end 0.005 apart. On a linear axis from the first round that is 2 pixels."""
    resize(browser, 1280)
    ends = []
    for d, _ in line_paths(browser, "plot-metric"):
        ends.append(float(re.findall(r"[-\d.]+", d)[-1]))
    gaps = [abs(a - b) for a, b in itertools.pairwise(sorted(ends))]
    assert min(gaps) > 8
    label = "return document.querySelector('#plot-metric svg').getAttribute('aria-label')"
    assert browser.execute_script(label) == "accuracy, log scale of 1 - accuracy by round"


def test_names_at_the_ends_of_lines_do_not_overlap(browser):
    resize(browser, 1280)
    names = names_beside(browser, "plot-metric")
    assert sorted(name for name, *_ in names) == sorted(ALGORITHMS)
    for (*_, above, _), (_, below, *_) in itertools.pairwise(sorted(names, key=lambda n: n[1])):
        assert above <= below + 2  # boxes have a little room above letters
    assert max(right for *_, right in names) <= 1280
    resize(browser, 390)
    assert names_beside(browser, "plot-metric") == [], "a phone has a legend"


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_scrolls_sideways(browser, width):
    resize(browser, width)
    show_everything(browser)
    wide = browser.execute_script(
        "return [document.documentElement, ...document.body.querySelectorAll('*')]"
        ".filter(part => part instanceof HTMLElement && part.clientWidth"
        "  && part.scrollWidth > part.clientWidth + 1).map(part => part.outerHTML.slice(0, 99))"
    )
    assert wide == []
    assert browser.execute_script(
        "return [...document.querySelectorAll('td')].every("
        "cell => cell.getBoundingClientRect().right <= innerWidth)"
    )


@pytest.mark.parametrize("width", [1280, 390])
def test_the_last_round_has_its_label(browser, width):
    resize(browser, width)
    labels = browser.execute_script(
        "return [...document.querySelectorAll('#plot-metric .xtick')]"
        ".map(text => [text.textContent, text.getBoundingClientRect().right])"
    )
    assert labels[-1][0] == "200"
    assert labels[-1][1] <= width


def test_tabs_show_one_view_at_a_time(browser):
    resize(browser, 1280)

    def shown():
        return browser.execute_script(
            "return [...document.querySelectorAll('.plot')]"
            ".filter(plot => plot.clientHeight > 100).map(plot => plot.id)"
        )

    others = PLOTS[len(VIEWS) :]
    assert shown() == ["plot-metric", *others]
    for view, tab in zip(VIEWS, browser.find_elements("css selector", ".tabs button"), strict=True):
        tab.click()
        wait_for_plots(browser)
        assert shown() == [view, *others]
        assert len(line_paths(browser, view)) == len(ALGORITHMS)


def test_a_press_on_a_name_hides_its_line_and_a_pointer_shows_values(browser):
    resize(browser, 1280)
    first = browser.find_element("css selector", "#plot-metric .legend button")
    first.click()
    assert len(line_paths(browser, "plot-metric")) == len(ALGORITHMS) - 1
    assert first.get_attribute("aria-pressed") == "false"
    first.click()
    assert len(line_paths(browser, "plot-metric")) == len(ALGORITHMS)
    shown = browser.execute_script(
        """
        const box = part => part.getBoundingClientRect();
        const svg = document.querySelector('#plot-metric svg');
        const round = [...svg.querySelectorAll('.xtick')].at(-1);
        const at = {clientX: box(round).left, clientY: box(svg).top + 100};
        svg.dispatchEvent(new PointerEvent('pointermove', at));
        const tip = document.querySelector('#plot-metric .tip'), place = box(tip);
        return [tip.textContent, place.left >= 0 && place.right <= innerWidth];
        """
    )
    # Of round 200: the mean of both seeds, and their range.
    assert re.match(r"round 200fedda-adam0.96\d0.96\d to 0.96\d", shown[0])
    assert shown[1]


def test_table_holds_the_sorted_rows(browser, page):
    shown = browser.execute_script(
        "return [...document.querySelectorAll('#results tr')]"
        ".map(row => [...row.cells].map(cell => cell.textContent))"
    )
    assert shown == tables.text_table(table(read_runs([page.parent])))
    assert [line[0] for line in shown[1:]] == list(reversed(ALGORITHMS))


def test_the_page_begins_with_the_verdict(browser):
    first = browser.find_element("css selector", "main > h1 + p").text
    assert first.startswith("fedda-adam ends highest: accuracy 0.96")
    assert "(95 % interval, 2 seeds)" in first


def test_clients_have_a_table(browser):
    lines = browser.execute_script(
        "return [...document.querySelectorAll('#clients tr')]"
        ".map(row => [...row.cells].map(cell => cell.textContent))"
    )
    assert lines[0] == ["algorithm", "clients", "mean", "spread", "worst tenth"]
    # Of 0.65, 0.66, ... 0.84: the mean, sqrt((20² - 1) / 12) / 100, and the mean of the first two.
    assert lines[1] == ["fedda-adam", "20", "0.745", "0.0577", "0.655"]


LUMINANCE = """
const luminance = colour => {
  const parts = colour.match(/[\\d.]+/g).slice(0, 3).map(part => {
    const share = part / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2];
};
const contrast = (a, b) => {
  const [low, high] = [a, b].map(luminance).sort((x, y) => x - y);
  return (high + 0.05) / (low + 0.05);
};
const behind = part => {
  const own = getComputedStyle(part).backgroundColor;
  return own === 'rgba(0, 0, 0, 0)' ? behind(part.parentElement) : own;
};
"""


@pytest.mark.parametrize("mode", ["light", "dark"])
def test_text_and_lines_stand_out(browser, mode):
    """By the rules of WCAG for text. Lines are less: two of Okabe and Ito's colours are light."""
    colours(browser, mode)
    resize(browser, 1280)
    page, text, lines = browser.execute_script(
        LUMINANCE
        + """
        const kinds = 'p, td, th, h1, h2, button, summary, .canvas text';
        const read = [...document.querySelectorAll(kinds)].filter(part => part.textContent.trim());
        const ink = part => getComputedStyle(part)[part instanceof SVGElement ? 'fill' : 'color'];
        return [luminance(behind(document.body)),
          Math.min(...read.map(part => contrast(ink(part), behind(part)))),
          Math.min(...[...document.querySelectorAll('path.line')]
            .map(part => contrast(getComputedStyle(part).stroke, behind(part))))];
        """
    )
    assert (page > 0.5) == (mode == "light")
    assert text >= 4.5
    assert lines >= 2
    colours(browser, "light")


def test_the_page_is_small(page):
    assert page.stat().st_size < 150_000


def test_names_do_not_run_and_nothing_leaves_the_page(browser):
    browser.refresh()
    assert browser.title == "Federated algorithms on digits"
    loaded = browser.execute_script(
        "return performance.getEntriesByType('resource').map(entry => entry.name)"
    )
    assert [name for name in loaded if not name.startswith("data:")] == []


def test_console_has_no_errors(browser):
    browser.refresh()
    assert [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"] == []


def test_of_many_algorithms_a_few_have_colours_and_all_have_a_name(chromium, tmp_path):
    names = [f"method-{number}" for number in range(25)]
    for number, name in enumerate(names):
        write_run(tmp_path / name, name, 0, number / 10)
    chromium.get(comparison.write(read_runs([tmp_path]), tmp_path).files[0].as_uri())
    resize(chromium, 1280)
    beside = names_beside(chromium, "plot-metric")
    assert len(beside) == 25
    for (*_, above, _), (_, below, *_) in itertools.pairwise(sorted(beside, key=lambda n: n[1])):
        assert above <= below + 3
    strokes = (
        "return [...document.querySelectorAll('#plot-metric path.line')]"
        ".map(path => path.getAttribute('stroke')).filter(stroke => stroke !== 'var(--faded)')"
    )
    assert len(chromium.execute_script(strokes)) == 5
    chromium.find_elements("css selector", "#plot-metric .legend button")[-1].click()
    assert len(chromium.execute_script(strokes)) == 6
