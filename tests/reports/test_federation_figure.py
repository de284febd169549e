"""The figure of a federation."""

import sys
import time

import numpy as np
import pytest

from fedda.data import digits, partition
from fedda.errors import MissingExtraError
from fedda.reports import federation
from helpers.labels import label_histogram

MAGIC = {"png": b"\x89PNG\r\n\x1a\n", "pdf": b"%PDF-"}


def sizes_and_labels(clients, classes, seed=0):
    histogram = np.random.default_rng(seed).integers(0, 9, (clients, classes))
    histogram[:, 0] += 1  # nobody is empty
    return histogram.sum(axis=1), histogram


def names(histogram):
    return () if histogram is None else [str(label) for label in range(histogram.shape[1])]


@pytest.fixture
def drawn(monkeypatch, tmp_path):
    """Draws, saves nothing, and gives the axes of the figure by what is written at their side."""
    from matplotlib.figure import Figure

    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *_, **__: figures.append(self))

    def draw(count, histogram=None, images=(), labels=None):
        labels = names(histogram) if labels is None else labels
        federation.draw(tmp_path / "figure.png", "title", count, histogram, labels, images)
        return {axes.get_ylabel(): axes for axes in figures[-1].axes}

    return draw


IMAGES, SIZES, LABELS, BAR = "a row is a client", "clients", "label", "share of a client's labels"


@pytest.mark.parametrize("suffix", ["png", "pdf"])
def test_same_federation_same_file(tmp_path, monkeypatch, suffix):
    data = digits.load()
    rows = partition.split("dirichlet:0.3", data.train_y, 30, seed=0)
    histogram = label_histogram(data.train_y, rows, 10)
    images = [data.train_x[own] for own in rows[:8]]
    for name in ("a", "b"):
        path = tmp_path / f"{name}.{suffix}"
        federation.draw(path, "Digits", histogram.sum(axis=1), histogram, names(histogram), images)
        # A date would show in the second file.
        monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    first, second = (tmp_path / f"{name}.{suffix}" for name in ("a", "b"))
    assert first.read_bytes().startswith(MAGIC[suffix])
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize(
    ("clients", "classes", "suffix"),
    [
        (1, 1, "png"),
        (1, 10, "pdf"),
        (40, 1, "pdf"),
        (51, 100, "png"),
        (5, 101, "png"),
        (60, 700, "pdf"),
    ],
)
def test_any_size(tmp_path, clients, classes, suffix):
    count, histogram = sizes_and_labels(clients, classes)
    path = tmp_path / f"figure.{suffix}"
    federation.draw(path, "title", count, histogram, names(histogram))
    assert path.read_bytes().startswith(MAGIC[suffix])


def test_panels_are_there_if_their_data_is(drawn):
    count, histogram = sizes_and_labels(8, 3)
    images = [np.zeros((2, 4, 4), np.uint8)]
    assert set(drawn(count, histogram, images)) == {IMAGES, SIZES, LABELS, BAR}
    assert set(drawn(count, histogram)) == {SIZES, LABELS, BAR}
    assert set(drawn(count, None, images)) == {IMAGES, SIZES}
    assert set(drawn(count, None)) == {SIZES}
    assert set(drawn(count, None, [np.zeros((0, 4, 4), np.uint8)])) == {SIZES}


@pytest.mark.parametrize(
    ("count", "scale"),
    [
        (np.arange(50, 100), "linear"),
        (np.r_[np.arange(50, 100), 5000], "log"),
        (np.r_[0, 0, np.arange(50, 100), 5000], "log"),
        (np.r_[np.zeros(60, int), 1, 2, 3], "linear"),
        (np.full(9, 7), "linear"),
    ],
)
def test_every_client_is_in_one_bar(drawn, count, scale):
    axes = drawn(count, None)[SIZES]
    assert axes.get_xscale() == scale
    (bars,) = axes.patches
    values, edges, _ = bars.get_data()
    on_the_axis = count[count > 0] if scale == "log" else count
    assert sum(values) == len(on_the_axis)
    missing = " (2 without any)" if len(on_the_axis) < len(count) else ""
    assert axes.get_xlabel() == f"examples of a client{missing}"
    for value, low, high in zip(values, edges[:-1], edges[1:], strict=True):
        assert value == sum(low < each < high for each in on_the_axis.tolist())


def test_contact_sheet_shows_the_first_images_of_a_client_in_its_row(drawn):
    # Image i of client k has the one value 10 k + i, but for a black and a white pixel.
    images = []
    for client in range(8):
        own = (
            np.full((12, 14, 14), 10 * client, np.uint8)
            + np.arange(12, dtype=np.uint8)[:, None, None]
        )
        own[:, 0, 0], own[:, 0, 1] = 0, 255
        images.append(own)
    images[1] = images[1][:3]
    sheet = drawn(np.array([12]), None, images)[IMAGES].images[0].get_array()
    assert sheet.shape == (6 * 16, 10 * 16, 3)  # frames of one pixel
    for client in range(6):
        for image in range(10):
            middle = sheet[16 * client + 8, 16 * image + 8]
            white = client == 1 and image >= 3  # it has no such image
            np.testing.assert_allclose(middle, 1 if white else (10 * client + image) / 255)


def test_contact_sheet_keeps_colours(drawn):
    image = np.random.default_rng(0).random((1, 5, 7, 3)).astype(np.float32)
    image[0, 0, 0] = [0, 1, 0.5]
    sheet = drawn(np.array([1]), None, [2 * image - 1])[IMAGES].images[0].get_array()
    np.testing.assert_allclose(sheet[1:6, 1:8], image[0], atol=1e-6)  # the range is the page's


def test_labels_are_shares_with_clients_in_the_order_of_their_commonest(drawn):
    histogram = np.array([[0, 0, 8], [3, 1, 0], [0, 0, 0], [0, 6, 4], [4, 0, 0]])
    panel = drawn(histogram.sum(axis=1), histogram, labels=["a", "$b$", "c" * 30])[LABELS]
    shares = panel.images[0].get_array()
    # Columns are clients: 4 and 1 hold most of label 0, 3 of 1, 0 of 2, and 2 holds nothing.
    expected = [[1, 0.75, 0, 0, 0], [0, 0.25, 0.6, 0, 0], [0, 0, 0.4, 1, 0]]
    np.testing.assert_allclose(shares, expected)
    assert [text.get_text() for text in panel.get_yticklabels()] == ["a", "$b$", "c" * 24]
    assert not panel.get_yticklabels()[1].get_parse_math()
    assert panel.get_xlabel().startswith("5 clients,")
    # 2, 2, 1 and 1 labels of the four clients that hold any.
    assert panel.get_title().startswith("A client holds 1.5 of 3 labels")


def test_many_clients_and_labels_are_thinned(drawn):
    count, histogram = sizes_and_labels(1000, 62)
    panel = drawn(count, histogram)[LABELS]
    assert panel.images[0].get_array().shape == (62, 50)
    assert [text.get_text() for text in panel.get_yticklabels()] == [
        str(i) for i in range(0, 62, 2)
    ]
    assert panel.get_xlabel().startswith("50 of 1,000 clients")


def test_of_very_many_labels_the_commonest_are_shown(drawn):
    _, histogram = sizes_and_labels(20, 300)
    common = np.random.default_rng(1).permutation(300)[:50]
    histogram[:, common] += 1000 + np.arange(50)  # the last is the commonest
    panel = drawn(histogram.sum(axis=1), histogram)["the 50 most common labels"]
    # Shares are of all of a client's labels, also of those that are not shown.
    assert panel.images[0].get_array().sum(axis=0).max() < 1
    got = [int(text.get_text()) for text in panel.get_yticklabels()]
    assert sorted(got) == sorted(common)
    totals = histogram.sum(axis=0)[got]
    assert (np.diff(totals) <= 0).all()


def test_one_client_of_few_examples_does_not_pale_the_others(drawn):
    histogram = np.full((50, 40), 5)
    histogram[7] = 0
    histogram[7, 3] = 1
    axes = drawn(histogram.sum(axis=1), histogram)
    assert axes[LABELS].images[0].norm.vmax == pytest.approx(1 / 40)


def test_a_million_clients(tmp_path):
    rng = np.random.default_rng(0)
    count = rng.lognormal(5, 1, 10**6).astype(np.int64)
    histogram = rng.integers(0, 9, (10**6, 10), dtype=np.int32)
    begin = time.perf_counter()
    federation.draw(tmp_path / "a.png", "title", count, histogram, names(histogram))
    assert time.perf_counter() - begin < 5


def test_missing_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'fedda\[report\]'"):
        federation.draw(tmp_path / "a.png", "title", np.array([1]), None)
