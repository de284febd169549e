"""Figures: the palette, the axes, and files that are the same every day."""

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
    assert figures.needs_log_axis([curve("a", (0.5, 1, 2)), curve("b", (1, 9, float("nan")))])
    assert not figures.needs_log_axis([curve("a", (0.5, 1, 2)), curve("b", (1, 4, float("inf")))])
    assert not figures.needs_log_axis([curve("a", (0, 1, 100))])


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
