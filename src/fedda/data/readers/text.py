"""Posts with tags, stored as ranks of words and ranks of tags. The most frequent has rank 0.

All words are stored, so the size of the vocabulary can be chosen when the data are used. Words with
a rank of at least that size are outside of the vocabulary.
"""

import html
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedda.data.readers.common import damaged, parsing
from fedda.data.store import Client, Rows, Source
from fedda.errors import InputError

KNOWN = 65534  # the number of words, or tags, with a rank
OTHER = KNOWN  # the rank of all other words; 65535 is the padding

# Markup ends at the next "<" at the latest, because many "<" would take quadratic time. Character
# references with too many digits are removed too: html.unescape fails if they have 5,000 digits.
_MARKUP = re.compile("<[^<>]*>|&#[0-9]{8,};?")
_URL = re.compile(r"\b(?:(?:https?|ftp)://|www\.)\S*[a-z0-9/]")  # without a full stop at its end
_TOKEN = re.compile("<url>|[a-z0-9'-]+|[!-~]")


class Post(NamedTuple):
    """One example."""

    text: str  # tokens separated by white space: the body, then the title
    tags: Sequence[str]


Users = Callable[[], Iterator[tuple[str, list[Post]]]]  # called twice: to count, then to encode


def source(
    splits: Mapping[str, Users],
    words: Sequence[str] | None,
    tags: Sequence[str] | None,
    description: str,
) -> Source:
    """Return the columns `x` (words) and `y` (tags) of users, and the files words.txt and tags.txt.

    Args:
        splits: The users of each split.
        words: The vocabulary, in the order of ranks. If it is None, words are ranked by their
            number of users in the split "train", as in the official word count.
        tags: The tags, in the order of ranks. If it is None, they are ranked by their number of
            posts in the split "train".
        description: The description of the data set.
    """

    @cache  # counting reads the whole split, so it is done once, and only if needed
    def vocabularies() -> tuple[Sequence[str], Sequence[str]]:
        counted = _count(splits["train"]()) if words is None or tags is None else ([], [])
        return (
            one_line_each("word", (counted[0] if words is None else words)[:KNOWN]),
            one_line_each("tag", (counted[1] if tags is None else tags)[:KNOWN]),
        )

    def clients(users: Users) -> Iterator[Client]:
        words, tags = ({text: rank for rank, text in enumerate(known)} for known in vocabularies())
        for user, posts in users():
            x = [[words.get(word, OTHER) for word in post.text.split()] for post in posts]
            y = [[tags[tag] for tag in dict.fromkeys(post.tags) if tag in tags] for post in posts]
            yield user, {"x": _rows(x), "y": _rows(y)}

    def texts() -> dict[str, str]:
        return {
            name: "".join(f"{text}\n" for text in known)
            for name, known in zip(("words.txt", "tags.txt"), vocabularies(), strict=True)
        }

    return Source({name: clients(users) for name, users in splits.items()}, texts, description)


def one_line_each(kind: str, texts: Sequence[str]) -> Sequence[str]:
    """Return the texts, after a check that each is one line of a file."""
    for text in texts:
        if text.encode(errors="ignore").decode().splitlines() != [text]:
            raise InputError(f"the {kind} {text!r} is not one line of UTF-8. Correct the data.")
    return texts


def tokens(markup: str) -> str:
    """Return HTML as lower-case tokens with spaces between, as in the official Stack Overflow set.

    HTML tags become spaces, entities are unescaped, characters outside of ASCII are left out, and
    a URL becomes <url>. Each punctuation mark is a token, except apostrophes and hyphens. Code is
    kept as text, because some posts hold little else.
    """
    # White space becomes ASCII first, because a no-break space separates words.
    text = " ".join(html.unescape(_MARKUP.sub(" ", markup)).split())
    text = text.encode("ascii", "ignore").decode("ascii").lower()
    return " ".join(_TOKEN.findall(_URL.sub(" <url> ", text)))


def read_word_count(path: Path) -> list[str]:
    """Read the most frequent words of a file with lines "word count", in decreasing order.

    The official file has millions of lines. Only the first `KNOWN` are read.
    """
    words: dict[str, int] = {}
    last = 10**18
    with parsing(path), open(path, encoding="utf-8") as file:
        for number, line in enumerate(islice(file, KNOWN), 1):
            match line.split():
                case [word, n] if word not in words and n.isdecimal() and int(n) <= last:
                    words[word] = last = int(n)
                case _:
                    raise damaged(
                        f"{path}, line {number}: expected a new word and a count of at most "
                        f"{last}, got {line[:60]!r}"
                    )
    if not words:
        raise damaged(f"{path} is empty")
    return list(words)


def read_tag_count(path: Path) -> list[str]:
    """Read the tags of a JSON object from tag to count, the most frequent first.

    Equally frequent tags stay in the order of the file, as in the programs of published results.
    Another order would exchange labels.
    """
    with parsing(path):
        counts = json.loads(path.read_text(encoding="utf-8"))
        wrong = [tag for tag, count in counts.items() if type(count) is not int or count < 0]
    if wrong or not counts:
        raise damaged(
            f"{path}: expected tags and counts, got {counts[wrong[0]] if wrong else 'none'!r}"
        )
    return sorted(counts, key=lambda tag: -counts[tag])


def _count(users: Iterable[tuple[str, list[Post]]]) -> tuple[list[str], list[str]]:
    words: Counter[str] = Counter()
    tags: Counter[str] = Counter()
    for _, posts in users:
        words.update(set(chain.from_iterable(post.text.split() for post in posts)))
        for post in posts:
            tags.update(set(post.tags))
    del tags[""]  # from posts without tags
    return _by_rank(words), _by_rank(tags)


def _by_rank(counts: Mapping[str, int]) -> list[str]:
    """Return the texts, the most frequent first. Equally frequent texts are sorted."""
    return sorted(counts, key=lambda text: (-counts[text], text))


def _rows(ranks: list[list[int]]) -> Rows:
    length = np.fromiter(map(len, ranks), np.int32, len(ranks))
    return Rows(np.fromiter(chain.from_iterable(ranks), np.uint16), length)
