"""The figure of a federation: images of some clients, the sizes of clients, and their labels."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedda.data.statistics import Statistics, describe
from fedda.errors import import_extra
from fedda.reports.figures import BLUE, ORANGE, new_figure, save, style_axes

SHEET = (6, 10)  # clients on the sheet of images, and images of each
_COLUMNS = 50  # clients in the panel of labels
_NAMES = 50  # labels whose names fit beside their panel
_MOST_LABELS = 100  # if there are more labels, only the most common _NAMES are shown


def draw(
    path: Path,
    title: str,
    count: np.ndarray,
    histogram: np.ndarray | None = None,
    labels: Sequence[str] = (),
    images: Sequence[np.ndarray] = (),
) -> None:
    """Draw a federation. A panel without data is left out.

    Args:
        path: A PNG or PDF file.
        title: The heading of the figure.
        count: The number of examples of each client.
        histogram: How often each client has each label: `[clients, labels]`.
        labels: The names of the labels.
        images: The first images of a few clients: `[images, height, width]`, or with a last axis
            of one or three colours. All have one size.
    """
    about = describe(count, histogram)
    heights = [2.7]  # in inches
    if histogram is not None:
        common = np.argsort(-histogram.sum(axis=0, dtype=np.int64), kind="stable")
        shown = np.sort(common) if len(common) <= _MOST_LABELS else common[:_NAMES]
        heights.append(0.9 + 0.13 * min(max(len(shown), 12), _NAMES))
    figure = new_figure(8, 0.4 + sum(heights))
    figure.suptitle(title, fontsize=13, parse_math=False)
    rows = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    top = rows[0].subgridspec(1, 2, width_ratios=[1.2, 1])
    if images := [own for own in images if len(own)]:
        axes = figure.add_subplot(top[0])
        axes.imshow(_sheet(images), interpolation="nearest")
        axes.set_title("First images of some clients", fontsize=10)
        axes.set(xticks=[], yticks=[], ylabel="a row is a client")
        axes.spines[:].set_visible(False)
    _draw_sizes(figure.add_subplot(top[1] if images else top[:]), count, about)
    if histogram is not None:
        _draw_labels(figure.add_subplot(rows[1]), histogram, shown, labels, about)
    save(figure, path)


def _sheet(images: Sequence[np.ndarray]) -> np.ndarray:
    """Return one image `[height, width, 3]` from 0 to 1, with a row of images for each client."""
    clients, columns = SHEET
    some = [np.asarray(own[:columns], float) for own in images[:clients]]
    low, high = min(own.min() for own in some), max(own.max() for own in some)
    height, width = some[0].shape[1:3]
    gap = max(1, height // 28)
    rows = []
    for own in some:
        pixels = (own.reshape(len(own), height, width, -1) - low) / (high - low or 1)
        # A grey frame separates images with a white background from the page.
        framed = np.full((columns, height + 2 * gap, width + 2 * gap, 3), 1.0)
        framed[: len(own)] = 0.8
        framed[: len(own), gap:-gap, gap:-gap] = pixels
        rows.append(np.concatenate(framed, axis=1))
    return np.concatenate(rows)


def _draw_sizes(axes: Any, count: np.ndarray, about: Statistics) -> None:
    bars = int(np.clip(2 * np.sqrt(about.clients), 8, 32))
    empty = ""
    if about.most > 10 * max(
        about.median, 1
    ):  # on a linear axis, most clients would be in the first bar
        bounds = np.geomspace(max(about.fewest, 1), about.most + 1, bars + 1)
        edges: np.ndarray = np.unique(bounds.round()) - 0.5
        axes.set_xscale("log")
        if missing := len(count) - np.count_nonzero(count):
            empty = f" ({missing:,} without any)"
    else:
        width = -(-(about.most - about.fewest + 1) // bars)
        edges = np.arange(about.fewest, about.most + width + 1, width) - 0.5
        axes.set_xlim(min(edges[0], about.median - 3), max(edges[-1], about.median + 3))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.xaxis.get_major_locator().set_params(integer=True, nbins=6)
    axes.stairs(np.histogram(count, edges)[0], edges, fill=True, color=BLUE)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.get_major_locator().set_params(integer=True)
    if about.median > 0:
        axes.axvline(about.median, color=ORANGE, ls="--", label=f"median {about.median:,.5g}")
        axes.legend(frameon=False, fontsize=9)
    axes.set_title(f"clients: {about.clients:,}, examples: {about.examples:,}", fontsize=10)
    axes.set(xlabel=f"examples of a client{empty}", ylabel="clients")
    style_axes(axes)


def _draw_labels(
    axes: Any, histogram: np.ndarray, shown: np.ndarray, names: Sequence[str], about: Statistics
) -> None:
    colors = import_extra("matplotlib.colors", extra="report", action="draw figures")
    clients, labels = histogram.shape
    # Clients at equal distances, because similar clients may be neighbours.
    picked = histogram[np.unique(np.linspace(0, clients - 1, _COLUMNS).round().astype(int))]
    share = picked[:, shown] / np.maximum(picked.sum(axis=1, keepdims=True), 1)
    # Sorted by the most common label, then by its share. Clients without a shown label come last.
    commonest = np.where(share.any(axis=1), share.argmax(axis=1), len(shown))
    share = share[np.lexsort((-share.max(axis=1), commonest))]
    # A single client with few examples must not make the others pale. The square root makes small
    # shares visible.
    darkest = float(np.quantile(share, 0.995) or share.max() or 1)
    norm = colors.PowerNorm(0.5, vmin=0, vmax=darkest)
    image = axes.imshow(share.T, aspect="auto", interpolation="nearest", cmap="Blues", norm=norm)
    ticks = np.arange(0, len(shown), -(-len(shown) // _NAMES))
    axes.set_yticks(ticks, [f"{names[i]:.24}" for i in shown[ticks]], fontsize=8, parse_math=False)
    axes.set_xticks([])
    some = "" if len(share) == clients else f"{len(share)} of "
    axes.set_xlabel(f"{some}{clients:,} clients, sorted by their most common label")
    axes.set_ylabel("label" if len(shown) == labels else f"the {len(shown)} most common labels")
    axes.set_title(
        f"A client holds {about.distinct_labels:.3g} of {labels:,} labels (mean); entropy "
        f"{about.client_entropy:.2f} bits, of all clients together {about.label_entropy:.2f}",
        fontsize=10,
    )
    bar = axes.figure.colorbar(image, ax=axes, extend="max", extendfrac=0.02, aspect=30, pad=0.01)
    bar.set_label("share of a client's labels")
