"""One figure of a federation: images of some clients, how large clients are, how labels differ."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fedda.data.statistics import Statistics, describe
from fedda.errors import InputError
from fedda.storage.files import naming

# Of Okabe and Ito's colours, as in the other figures.
_BLUE, _ORANGE = "#0072B2", "#D55E00"

_SHEET = (6, 10)  # clients on the contact sheet, and images of each
_COLUMNS = 50  # clients in the panel of labels
_NAMES = 50  # that fit beside the panel of labels
_MOST_LABELS = 100  # of more labels only the commonest are shown, as many as can be named
_NAME_LENGTH = 24


def draw(
    path: str | Path,
    title: str,
    count: np.ndarray,
    histogram: np.ndarray | None,
    images: Sequence[np.ndarray] | None = None,
    label_names: Sequence[str] | None = None,
) -> None:
    """Draws clients of `count[client]` examples with `histogram[client, label]` labels.

    `images` are the first images of a few clients, each [n, height, width] or with one or three
    colours as a last axis. Without images, or without labels, their panel is left out. The suffix
    of `path` chooses PNG or PDF.
    """
    path = Path(path)
    if path.suffix not in (".png", ".pdf"):
        raise InputError(f"got a figure named {path.name!r}, expected a name in .png or .pdf.")
    about = describe(count, histogram)
    sheet = _contact_sheet([] if images is None else images)
    labels = 0 if histogram is None else histogram.shape[1]
    names = [str(label) for label in range(labels)] if label_names is None else label_names
    if len(names) != labels:
        raise InputError(f"got {len(names)} names of labels, expected {labels}.")
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'fedda[report]'") from error

    heights = [2.7]  # in inches
    if histogram is not None:
        shown = _shown_labels(histogram)
        heights.append(0.9 + 0.13 * min(max(len(shown), 12), _NAMES))
    figure = Figure(figsize=(8, 0.4 + sum(heights)))
    figure.set_layout_engine("constrained", hspace=0.04, wspace=0.04)
    figure.suptitle(title, fontsize=13, parse_math=False)
    rows = figure.add_gridspec(len(heights), 1, height_ratios=heights)
    if sheet is None:
        _draw_sizes(figure.add_subplot(rows[0]), count, about)
    else:
        halves = rows[0].subgridspec(1, 2, width_ratios=[1.2, 1])
        _draw_sheet(figure.add_subplot(halves[0]), sheet)
        _draw_sizes(figure.add_subplot(halves[1]), count, about)
    if histogram is not None:
        _draw_labels(figure.add_subplot(rows[1]), histogram, shown, names, about)
    # A date in the file would make one figure differ from day to day.
    undated = {"CreationDate": None} if path.suffix == ".pdf" else {}
    with naming(path):
        figure.savefig(path, dpi=200, metadata=undated)


def _contact_sheet(images: Sequence[np.ndarray]) -> np.ndarray | None:
    """Images as one image, a row for each client: [height, width, 3] from 0 to 1."""
    clients, columns = _SHEET
    some = [np.asarray(own[:columns]) for own in images if len(own)][:clients]
    if not some:
        return None
    some = [own[..., None] if own.ndim == 3 else own for own in some]
    for own in some:
        if own.ndim != 4 or own.shape[1:] != some[0].shape[1:] or own.shape[3] not in (1, 3):
            raise InputError(
                f"got images of shape {own.shape}, expected [images, height, width] or [images, "
                "height, width, 1 or 3 colours], of one size for all clients."
            )
    darkest = min(own.min() for own in some).astype(float)
    range_of_values = max(own.max() for own in some).astype(float) - darkest
    height, width = some[0].shape[1:3]
    gap = max(1, height // 14)
    sheet = np.ones(
        (len(some) * (height + gap) + gap, max(map(len, some)) * (width + gap) + gap, 3)
    )
    for row, own in enumerate(some):
        for column, image in enumerate(own):
            top, left = row * (height + gap), column * (width + gap)
            # A grey frame, because the background of images may be as white as the page.
            sheet[top : top + height + 2 * gap, left : left + width + 2 * gap] = 0.8
            sheet[top + gap : top + gap + height, left + gap : left + gap + width] = (
                image - darkest
            ) / (range_of_values or 1)
    return sheet


def _draw_sheet(axes: Any, sheet: np.ndarray) -> None:
    axes.imshow(sheet, interpolation="nearest")
    axes.set_title("First images of some clients", fontsize=10)
    axes.set(xticks=[], yticks=[], ylabel="a row is a client")
    axes.spines[:].set_visible(False)


def _draw_sizes(axes: Any, count: np.ndarray, about: Statistics) -> None:
    skewed = about.most > 10 * max(about.median, 1)
    empty = len(count) - np.count_nonzero(count)
    bars = int(np.clip(2 * np.sqrt(about.clients), 8, 32))
    if skewed:  # on a linear axis nearly all clients would be in the first bar
        bounds = np.geomspace(max(about.fewest, 1), about.most + 1, bars + 1)
        edges: np.ndarray = np.unique(bounds.round()) - 0.5
        axes.set_xscale("log")
    else:
        width = -(-(about.most - about.fewest + 1) // bars)
        edges = np.arange(about.fewest, about.most + width + 1, width) - 0.5
    axes.stairs(np.histogram(count, edges)[0], edges, fill=True, color=_BLUE)
    if not skewed:
        axes.set_xlim(min(edges[0], about.median - 3), max(edges[-1], about.median + 3))
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.xaxis.get_major_locator().set_params(integer=True, nbins=6)
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.get_major_locator().set_params(integer=True)
    if about.median > 0:
        axes.axvline(about.median, color=_ORANGE, ls="--", label=f"median {about.median:,.5g}")
        axes.legend(frameon=False, fontsize=9)
    axes.set_title(_number(about.clients, "client") + _number(about.examples, "example", ", "))
    axes.title.set_fontsize(10)
    left_out = f" ({empty:,} without any)" if empty and skewed else ""
    axes.set(xlabel=f"examples of a client{left_out}", ylabel="clients")
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _number(count: int, noun: str, before: str = "") -> str:
    return f"{before}{count:,} {noun}{'' if count == 1 else 's'}"


def _shown_labels(histogram: np.ndarray) -> np.ndarray:
    if histogram.shape[1] <= _MOST_LABELS:
        return np.arange(histogram.shape[1])
    return np.argsort(-histogram.sum(axis=0, dtype=np.int64), kind="stable")[:_NAMES]


def _draw_labels(
    axes: Any,
    histogram: np.ndarray,
    shown: np.ndarray,
    names: Sequence[str],
    about: Statistics,
) -> None:
    from matplotlib.colors import PowerNorm

    clients, labels = histogram.shape
    # At equal distances, so that a federation sorted by client shows all its kinds of client.
    picked = histogram[np.unique(np.linspace(0, clients - 1, _COLUMNS).round().astype(int))]
    share = picked[:, shown] / np.maximum(picked.sum(axis=1, keepdims=True), 1)
    # By commonest label, those with most of it first; clients without a shown label come last.
    commonest = np.where(share.any(axis=1), share.argmax(axis=1), len(shown))
    share = share[np.lexsort((-share.max(axis=1), commonest))]
    # One client of few examples must not make the others pale. The square root tells few from none,
    # which on a linear scale look alike.
    darkest = float(np.quantile(share, 0.995) or share.max() or 1)
    norm = PowerNorm(0.5, vmin=0, vmax=darkest)
    image = axes.imshow(share.T, aspect="auto", interpolation="nearest", cmap="Blues", norm=norm)
    ticks = range(0, len(shown), -(-len(shown) // _NAMES))
    short = [names[shown[tick]] for tick in ticks]
    short = [
        name if len(name) <= _NAME_LENGTH else f"{name[: _NAME_LENGTH - 1]}…" for name in short
    ]
    axes.set_yticks(ticks, short, fontsize=8, parse_math=False)
    axes.set_xticks([])
    some = "" if len(share) == clients else f"{len(share)} of "
    axes.set_xlabel(f"{some}{clients:,} clients, sorted by their commonest label")
    axes.set_ylabel("label" if len(shown) == labels else f"the {len(shown)} commonest labels")
    axes.set_title(
        f"A client holds {about.distinct_labels:.3g} of {labels:,} labels (mean); entropy "
        f"{about.client_entropy:.2f} bits, of all clients together {about.label_entropy:.2f}",
        fontsize=10,
    )
    beyond = "max" if share.max() > darkest else "neither"
    bar = axes.figure.colorbar(image, ax=axes, extend=beyond, extendfrac=0.02, aspect=30, pad=0.01)
    bar.set_label("share of a client's labels")
