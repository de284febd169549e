"""What TensorFlow Federated's data sets hold, whether in its HDF5 or in its SQLite files."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple

from fedda.data.readers import text
from fedda.data.readers.common import Arrays, are_bytes, labels, pixels, stored
from fedda.data.readers.text import Post
from fedda.data.store import Source
from fedda.errors import InputError

ADVICE = "Download or unpack it again."


class Images(NamedTuple):
    """The features of a data set of images, by the names that its files give them."""

    feature: str
    kinds: str  # of dtypes: "f" for pixels in 0..1, "iu" for 0..255
    shape: tuple[int, ...]
    labels: Mapping[str, tuple[str, int]]  # feature -> our column, number of classes


IMAGES = {
    "emnist": Images("pixels", "f", (28, 28), {"label": ("y", 62)}),
    "emnist-digits": Images("pixels", "f", (28, 28), {"label": ("y", 10)}),
    "cifar100": Images(
        "image", "iu", (32, 32, 3), {"label": ("y", 100), "coarse_label": ("coarse", 20)}
    ),
}
TEXTS = ("tokens", "title", "tags")  # of Stack Overflow; its other features are not used
_WORD_COUNT, _TAG_COUNT = "stackoverflow.word_count", "stackoverflow.tag_count"


class Clients(NamedTuple):
    """The clients of a split as a file has them."""

    place: str  # for messages
    read: Callable[[], Iterator[tuple[str, Arrays]]]  # called twice: to look, then to store


def features(name: str) -> tuple[str, ...]:
    """The features that a data set needs, the one that says how many examples there are first."""
    return (IMAGES[name].feature, *IMAGES[name].labels) if name in IMAGES else TEXTS


def counts_layout(name: str) -> str:
    """The files of counts that may lie beside a data set, in words."""
    return "" if name in IMAGES else f" (and beside, if you have them, {_WORD_COUNT}, {_TAG_COUNT})"


def counts(name: str, folder: Path) -> list[Path]:
    """The files of counts that do."""
    wanted = () if name in IMAGES else (_WORD_COUNT, _TAG_COUNT)
    return [folder / each for each in wanted if (folder / each).is_file()]


def source(name: str, folder: Path, splits: Mapping[str, Clients], words: str) -> Source:
    """The columns of a data set. Vocabularies are those of the count files in `folder`, if any."""
    if name not in IMAGES:
        found = {file.name: file for file in counts(name, folder)}
        return text.source(
            {split: partial(_users, clients) for split, clients in splits.items()},
            words=text.read_word_count(found[_WORD_COUNT]) if _WORD_COUNT in found else None,
            tags=text.read_tag_count(found[_TAG_COUNT]) if _TAG_COUNT in found else None,
            about=words,
        )
    kind = IMAGES[name]
    # A column has one dtype, so all floats must be seen before the first of them is stored.
    exact = kind.kinds != "f" or all(
        are_bytes(_columns(kind, clients)) for clients in splits.values()
    )
    return Source(
        {split: stored(_columns(kind, clients), exact) for split, clients in splits.items()},
        words=words,
    )


def _columns(kind: Images, clients: Clients) -> Iterator[tuple[str, Arrays]]:
    for client, arrays in clients.read():
        place = f"{clients.place}, client {client!r}: the feature "
        values = arrays[kind.feature]
        if values.dtype.kind not in kind.kinds:
            expected = "floats" if kind.kinds == "f" else "integers"
            raise InputError(
                f"{place}{kind.feature!r} is of the dtype {values.dtype}, expected {expected}. "
                f"{ADVICE}"
            )
        columns = {"x": pixels(values, kind.shape, f"{place}{kind.feature!r}", ADVICE)}
        for feature, (column, classes) in kind.labels.items():
            columns[column] = labels(
                arrays[feature], classes, len(values), f"{place}{feature!r}", ADVICE
            )
        yield client, columns


def _users(clients: Clients) -> Iterator[tuple[str, list[Post]]]:
    for client, arrays in clients.read():
        strings: dict[str, list[str]] = {}
        for feature in TEXTS:
            try:
                strings[feature] = [each.decode() for each in arrays[feature]]
            except UnicodeDecodeError as error:
                raise InputError(
                    f"{clients.place}, client {client!r}: the feature {feature!r} is not UTF-8 "
                    f"({error}). {ADVICE}"
                ) from None
        rows = zip(*(strings[feature] for feature in TEXTS), strict=True)
        yield client, [Post(f"{body} {title}", tags.split("|")) for body, title, tags in rows]
