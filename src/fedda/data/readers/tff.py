"""TensorFlow Federated's data sets: the parts that its HDF5 and SQLite files share."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fedda.data.readers import text
from fedda.data.readers.common import Arrays, are_bytes, damaged, labels, pixels, stored
from fedda.data.readers.text import Post
from fedda.data.store import Source


class Feature(NamedTuple):
    """One value of every example."""

    kind: str  # of the dtype: "f" for floats, "i" for integers, "O" for byte strings
    shape: tuple[int, ...] = ()
    column: str = ""  # our column, for labels
    classes: int = 0


_LABEL = Feature("i", column="y")
_PIXELS = Feature("f", (28, 28))
IMAGES = {  # the feature of the images comes first
    "emnist": {"pixels": _PIXELS, "label": _LABEL._replace(classes=62)},
    "emnist-digits": {"pixels": _PIXELS, "label": _LABEL._replace(classes=10)},
    "cifar100": {
        "image": Feature("i", (32, 32, 3)),
        "label": _LABEL._replace(classes=100),
        "coarse_label": Feature("i", column="coarse", classes=20),
    },
}
# The features of Stack Overflow that are used.
TEXTS = dict.fromkeys(("tokens", "title", "tags"), Feature("O"))
KINDS = {"f": "floats", "i": "integers", "O": "byte strings"}
_WORD_COUNT, _TAG_COUNT = "stackoverflow.word_count", "stackoverflow.tag_count"


class Clients(NamedTuple):
    """The clients of a split of a file."""

    place: str  # for messages
    read: Callable[[], Iterator[tuple[str, Arrays]]]  # called twice for images


def features(name: str) -> Mapping[str, Feature]:
    """Return the features of a data set that are read."""
    return IMAGES.get(name, TEXTS)


def counts_layout(name: str) -> str:
    """Return a description of the optional files with the counts of words and tags."""
    return "" if name in IMAGES else f" (optionally with {_WORD_COUNT} and {_TAG_COUNT})"


def count_files(name: str, folder: Path) -> list[Path]:
    """Return the files with the counts of words and tags that exist in a folder."""
    wanted = () if name in IMAGES else (_WORD_COUNT, _TAG_COUNT)
    return [folder / file for file in wanted if (folder / file).is_file()]


def source(name: str, folder: Path, splits: Mapping[str, Clients], form: str) -> Source:
    """Return a data set from the clients of each split.

    Args:
        name: The data set.
        folder: Where the counts of words and tags may be.
        splits: The clients of each split.
        form: The format of the files, for the description.
    """
    description = f"{name} as in TensorFlow Federated's {form} files."
    if name not in IMAGES:
        counts = {file.name: file for file in count_files(name, folder)}
        return text.source(
            {split: partial(_users, clients) for split, clients in splits.items()},
            words=text.read_word_count(counts[_WORD_COUNT]) if _WORD_COUNT in counts else None,
            tags=text.read_tag_count(counts[_TAG_COUNT]) if _TAG_COUNT in counts else None,
            description=description,
        )
    # A column has one dtype, so all images are read before the first is stored.
    exact = name == "cifar100" or all(are_bytes(_columns(name, each)) for each in splits.values())
    return Source(
        {split: stored(_columns(name, clients), exact) for split, clients in splits.items()},
        description=description,
    )


def _columns(name: str, clients: Clients) -> Iterator[tuple[str, Arrays]]:
    for client, arrays in clients.read():
        columns: Arrays = {}
        for feature, (kind, shape, column, classes) in IMAGES[name].items():
            values = arrays[feature]
            place = f"{clients.place}, client {client!r}: the feature {feature!r}"
            if values.dtype.kind not in ("f" if kind == "f" else "iu"):
                raise damaged(f"{place} is of the dtype {values.dtype}, expected {KINDS[kind]}")
            if column:
                columns[column] = labels(values, classes, len(columns["x"]), place)
            else:
                columns["x"] = pixels(values, shape, place)
        yield client, columns


def _users(clients: Clients) -> Iterator[tuple[str, list[Post]]]:
    for client, arrays in clients.read():
        try:
            strings = [[value.decode() for value in arrays[feature]] for feature in TEXTS]
            rows = list(zip(*strings, strict=True))
        except (ValueError, TypeError, AttributeError) as error:
            raise damaged(
                f"{clients.place}, client {client!r}: expected {' and '.join(TEXTS)} as lists of "
                f"one length of texts in UTF-8 ({error})"
            ) from None
        yield client, [Post(f"{body} {title}", tags.split("|")) for body, title, tags in rows]
