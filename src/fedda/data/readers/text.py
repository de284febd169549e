"""Posts with tags as two columns of ranks: words, and tags, the most frequent one being 0.

Every word is stored, by its rank, so a vocabulary of any size can be chosen when the data are used:
a rank at or above that size is a word outside it.
"""

import html
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, islice, repeat
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedda.data.store import Client, Rows, Source
from fedda.errors import InputError

KNOWN = 65534  # words, or tags, that have a rank of their own
OTHER = KNOWN  # the rank of any further word; 65535 is left free for padding

# A tag ends at the next "<" at the latest, or many of them would take quadratic time. A character
# whose number is too long to be one goes too: html.unescape fails at those of 5,000 digits.
_MARKUP = re.compile("<[^<>]*>|&#[0-9]{8,};?")
_URL = re.compile(r"\b(?:(?:https?|ftp)://|www\.)\S*[a-z0-9/]")  # without a full stop after it
_TOKEN = re.compile("<url>|[a-z0-9'-]+|[!-~]")


class Post(NamedTuple):
    """One example."""

    text: str  # tokens with white space between them: the body, then the title
    tags: Sequence[str]


Users = Callable[[], Iterator[tuple[str, list[Post]]]]  # called twice: to count, then to encode


def source(
    splits: Mapping[str, Users],
    words: Sequence[str] | None,
    tags: Sequence[str] | None,
    about: str,
) -> Source:
    """The columns `x` (words) and `y` (tags) of every user, and the texts words.txt and tags.txt.

    `words` and `tags` are vocabularies in the order of rank. What is None is counted in the split
    "train": a word by the users that have it, as the official word count is, and a tag by its
    posts. Counting holds every distinct word in memory, but only one user's posts.
    """
    if (words is None or tags is None) and "train" not in splits:
        raise InputError(
            f"words and tags are counted in the split 'train', got only {', '.join(splits)}. "
            "Add the train split, or the files of word and tag counts."
        )

    @cache  # counting reads the whole split: only once, and not before it is needed
    def vocabularies() -> tuple[Sequence[str], Sequence[str]]:
        counted = _count(splits["train"]()) if words is None or tags is None else ([], [])
        return (
            one_line_each("word", (counted[0] if words is None else words)[:KNOWN]),
            one_line_each("tag", (counted[1] if tags is None else tags)[:KNOWN]),
        )

    def clients(users: Users) -> Iterator[Client]:
        word_rank, tag_rank = (
            {each: rank for rank, each in enumerate(known)} for known in vocabularies()
        )
        for user, posts in users():
            yield user, {"x": _words(posts, word_rank), "y": _tags(posts, tag_rank)}

    def texts() -> dict[str, str]:
        return {
            name: "".join(f"{each}\n" for each in known)
            for name, known in zip(("words.txt", "tags.txt"), vocabularies(), strict=True)
        }

    return Source({name: clients(users) for name, users in splits.items()}, texts, about)


def one_line_each(kind: str, texts: Sequence[str]) -> Sequence[str]:
    """The same texts, which `splitlines` will find again in a file that has one a line."""
    for each in texts:
        if each.encode(errors="ignore").decode().splitlines() != [each]:
            raise InputError(f"the {kind} {each!r} is not one line of UTF-8. Correct the data.")
    return texts


def tokens(markup: str) -> str:
    """Text of HTML as in the official Stack Overflow set: lower-case tokens, one space between.

    Tags are removed and split words, entities are unescaped, what is not ASCII is left out, and a
    URL becomes <url>. Punctuation marks are tokens of their own, except apostrophes and hyphens.
    Code is kept as text: it is part of the body, and a post about code may say little else.
    """
    # White space first becomes ASCII, or words on both sides of a no-break space would be joined.
    text = " ".join(html.unescape(_MARKUP.sub(" ", markup)).split())
    text = text.encode("ascii", "ignore").decode("ascii").lower()
    return " ".join(_TOKEN.findall(_URL.sub(" <url> ", text)))


def read_word_count(path: Path) -> list[str]:
    """The first words of a file with one "word count" a line, the counts decreasing.

    The official file has millions of lines; those without a rank of their own are not read.
    """
    words: dict[str, None] = {}
    last = 10**18
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(islice(file, KNOWN), 1):
                fields = line.split()
                if len(fields) != 2 or not re.fullmatch("[0-9]{1,18}", fields[1]):
                    raise _damaged(f"{path}, line {number}", "a word and its count", line[:60])
                word, count = fields[0], int(fields[1])
                if count > last:
                    raise _damaged(f"{path}, line {number}", f"a count of at most {last}", count)
                if word in words:
                    raise _damaged(f"{path}, line {number}", "a word not given before", word)
                words[word], last = None, count
    except UnicodeDecodeError as error:
        raise _damaged(str(path), "text in UTF-8", str(error)) from None
    if not words:
        raise _damaged(str(path), "a word and its count on every line", "an empty file")
    return list(words)


def read_tag_count(path: Path) -> list[str]:
    """The tags of a JSON object from tag to count, the most frequent first.

    Equally frequent tags stay in the order of the file, as they do in the programs that published
    results with it; another order would exchange labels.
    """
    try:
        counts = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise _damaged(str(path), "JSON in UTF-8", str(error)) from None
    if not isinstance(counts, dict) or not counts:
        raise _damaged(str(path), "a JSON object of tags and counts", type(counts).__name__)
    for tag, count in counts.items():
        if type(count) is not int or count < 0:  # True is an int to isinstance
            raise _damaged(str(path), f"a count as the value of {tag!r}", count)
    return sorted(counts, key=lambda tag: -counts[tag])


def _damaged(place: str, expected: str, got: object) -> InputError:
    return InputError(f"{place}: expected {expected}, got {got!r}. Download or unpack it again.")


def _count(users: Iterable[tuple[str, list[Post]]]) -> tuple[list[str], list[str]]:
    words: Counter[str] = Counter()
    tags: Counter[str] = Counter()
    for _, posts in users:
        words.update(set(chain.from_iterable(post.text.split() for post in posts)))
        for post in posts:
            tags.update(set(post.tags))
    del tags[""]  # what is left of a post without tags
    return _by_rank(words), _by_rank(tags)


def _by_rank(counts: Mapping[str, int]) -> list[str]:
    """The most frequent first; equally frequent ones by their text, whatever order they came in."""
    return sorted(counts, key=lambda each: (-counts[each], each))


def _words(posts: list[Post], rank: Mapping[str, int]) -> Rows:
    words = [post.text.split() for post in posts]
    length = np.fromiter(map(len, words), np.int32, len(words))
    ranks = map(rank.get, chain.from_iterable(words), repeat(OTHER))
    return Rows(np.fromiter(ranks, np.uint16, int(length.sum(dtype=np.int64))), length)


def _tags(posts: list[Post], rank: Mapping[str, int]) -> Rows:
    tags = [[rank[tag] for tag in dict.fromkeys(post.tags) if tag in rank] for post in posts]
    length = np.fromiter(map(len, tags), np.int32, len(tags))
    ranks = chain.from_iterable(tags)
    return Rows(np.fromiter(ranks, np.uint16, int(length.sum(dtype=np.int64))), length)
