"""Figures: the palette, the axes, and files that are the same every day."""

import numpy as np
import pytest

from fedda.reports import figures
from fedda.reports.figures import Line, Panel
from fedda.reports.statistics import Curve


def curve(label, mean, x=(1, 2, 3)):
    return Curve(label, list(x), list(mean), list(mean), list(mean))


def panel(*curves, **settings):
    lines = [Line(one, number) for number, one in enumerate(curves)]
    return Panel(name="name", x_label="round", y_label="loss", lines=lines, **settings)


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws panels, saves nothing, and gives the figure."""
    from matplotlib.figure import Figure

    saved = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: saved.append(self))

    def draw(*panels):
        figures.draw(panels, tmp_path, "name")
        return saved[-1]

    return draw


def test_forty_four_lines_differ_in_colour_or_dash():
    assert len({figures.line_style(number) for number in range(44)}) == 44


def test_a_logarithmic_axis_is_for_values_that_span_more_than_a_factor_of_ten():
    def scale(*curves, higher_is_better=False):
        return figures.choose_scale(curves, higher_is_better)

    assert scale(curve("a", (0.5, 1, 2)), curve("b", (1, 9, float("nan")))) == figures.LOG
    assert scale(curve("a", (0.5, 1, 2)), curve("b", (1, 4, float("inf")))) == figures.LINEAR
    assert scale(curve("a", (0, 1, 100))) == figures.LINEAR
    # If higher is better, the distance to 1 counts.
    assert scale(curve("a", (0.1, 0.9, 0.95)), higher_is_better=True) == figures.LOG_ERROR
    assert scale(curve("a", (0.1, 0.3, 0.5)), higher_is_better=True) == figures.LINEAR
    assert scale(curve("a", (0.1, 0.9, 1.0)), higher_is_better=True) == figures.LINEAR
    assert scale(curve("a", (1, 20, 300)), higher_is_better=True) == figures.LINEAR


def test_of_many_lines_a_few_have_colours():
    many = figures.lines_of([curve(str(number), (1, 2, 3)) for number in range(9)])
    assert [line.faded for line in many] == [False] * 5 + [True] * 4
    assert not any(line.faded for line in figures.lines_of([line.curve for line in many[:8]]))


def test_the_range_leaves_out_the_first_tenth():
    drawn = curve("a", (0.1, 0.5, 0.8, 0.9), x=(0, 1, 10, 20))
    low, high = figures.late_range([drawn], figures.LINEAR)
    assert (low, high) == (pytest.approx(0.8 - 0.004), pytest.approx(0.9 + 0.004))
    low, high = figures.late_range([drawn], figures.LOG_ERROR)
    room = 2**0.04  # errors of 0.2 and 0.1 are a factor of 2 apart
    assert (1 - low, 1 - high) == (pytest.approx(0.2 * room), pytest.approx(0.1 / room))
    assert figures.late_range([curve("a", (1, 1, 1))], figures.LINEAR) is None


def test_labels_keep_their_order_and_a_gap():
    wanted = np.random.default_rng(0).uniform(0.9, 1, 12)
    placed = np.array(figures.spread(wanted.tolist(), 0.05, 0.98))
    assert np.argsort(placed).tolist() == np.argsort(wanted).tolist()
    assert np.diff(np.sort(placed)).min() >= 0.05 - 1e-9
    assert placed.max() <= 0.98
    assert figures.spread([0.2, 0.8], 0.05, 0.98) == [0.2, 0.8]


def test_a_single_panel_names_its_lines_at_their_ends(drawn):
    figure = drawn(panel(curve("a", (0.1, 0.5, 0.9)), curve("b", (0.1, 0.6, 0.9))))
    assert figure.legends == []
    (axes,) = figure.axes
    names = {text.get_text(): text.get_position() for text in axes.texts}
    assert names.keys() == {"a", "b"}
    (x, one), (_, other) = names.values()
    assert x > 1, "beside the axes"
    assert abs(one - other) > 0.04, "though both end at 0.9"


def test_lines_that_end_at_different_places_have_a_legend(drawn):
    figure = drawn(panel(curve("a", (1, 2, 3)), curve("b", (1, 2, 3), x=(2, 4, 6))))
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b"]


def test_panels_share_one_legend_with_every_label_once(drawn):
    figure = drawn(
        panel(curve("a", (1, 2, 3))), panel(curve("b", (1, 2, 3)), curve("a", (1, 1, 1)))
    )
    assert len(figure.axes) == 2
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["a", "b"]


def test_marked_points_have_ticks_that_do_not_touch(drawn):
    points = (50, 100, 200, 500, 1000, 1500)
    (axes,) = drawn(panel(curve("a", range(6), points), markers=True)).axes
    assert axes.get_xscale() == "log"
    assert list(axes.get_xticks()) == [1500, 500, 200, 100, 50], "1,000 would touch 1,500"
    assert axes.lines[0].get_marker() == "o"


@pytest.mark.parametrize("suffix", ["png", "pdf"])
def test_a_figure_is_the_same_file_on_another_day(tmp_path, monkeypatch, suffix):
    for name in ("a", "b"):
        figure = figures.new_figure(2, 2)
        figure.add_subplot().plot([1, 2])
        assert figures.save(figure, tmp_path / f"{name}.{suffix}") == [
            tmp_path / f"{name}.{suffix}"
        ]
        monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")  # a date would show in the second file
    first, second = ((tmp_path / f"{name}.{suffix}").read_bytes() for name in ("a", "b"))
    assert first == second
