"""Stack Exchange dumps: questions and answers of a site's users, with the tags of the question.

Each user of a site is a client with the id "site:user id", where the site is the name of its
folder. An example is a whole post. The official Stack Overflow data set splits posts into sentences
and leaves out users with fewer than 100 of them, so results on the two data sets are not
comparable. As in the official data set, an answer has the title and the tags of its question, and
the users whose id is a multiple of ten are held out, here as "test". Most posts of held-out users
(19 of 20 on seven small sites) are about questions that training users asked or answered too. So
a model can memorise the tags of a title: recall on "test" measures new users, not new questions.

A dump may be larger than memory, and its posts are ordered by id, not by user. A temporary SQLite
database sorts them. It uses the disk if needed, and leaves no file behind.
"""

import html
import re
import sqlite3
import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from xml.etree import ElementTree

from fedda.data.readers import text
from fedda.data.readers.common import damaged, parsing
from fedda.data.readers.text import Post
from fedda.data.store import Source, encoded_id

_QUESTION, _ANSWER = 1, 2  # the PostTypeIds that are used; others, such as wiki pages, are not

_POSTS = """
CREATE TABLE post (
    site TEXT, id INTEGER, owner INTEGER, parent INTEGER, title TEXT, tags TEXT, body TEXT,
    PRIMARY KEY (site, id)
)
"""
# A question is its own parent. Only questions have tags, so an answer to an answer is left out.
_EXAMPLES = """
CREATE TABLE example AS
SELECT post.site, post.owner, post.body || ' ' || question.title AS text, question.tags
FROM post JOIN post AS question
ON question.site = post.site AND question.id = post.parent AND question.tags IS NOT NULL
WHERE post.owner IS NOT NULL
ORDER BY post.site, post.owner, post.id
"""


def layout(name: str) -> str:
    return "Posts.xml of a Stack Exchange dump, or a folder with one folder/Posts.xml for each site"


def files(path: Path, name: str) -> list[Path]:
    return list(_by_site(path).values()) if name == "stackexchange" else []


def read(path: Path, name: str) -> Source:
    database = sqlite3.connect("")  # a temporary file without a name

    def users(held_out: bool) -> Iterator[tuple[str, list[Post]]]:
        rows = database.execute(
            "SELECT site, owner, text, tags FROM example WHERE (owner % 10 = 0) = ? ORDER BY rowid",
            [held_out],
        )
        for (site, owner), own in groupby(rows, key=itemgetter(0, 1)):
            yield f"{site}:{owner}", [Post(words, tags.split()) for _, _, words, tags in own]

    weakref.finalize(users, database.close)  # after the last user was read
    description = _fill(database, _by_site(path))
    splits = {"train": partial(users, False), "test": partial(users, True)}
    return text.source(splits, words=None, tags=None, description=description)


def _by_site(path: Path) -> dict[str, Path]:
    """Return the path of Posts.xml of each site."""
    folder = path.absolute()
    if folder.name == "Posts.xml":
        folder = folder.parent
    files = [folder / "Posts.xml"]
    if not files[0].is_file():
        files = sorted(file for file in path.glob("*/Posts.xml") if file.is_file())
    return {file.parent.name: file for file in files}


def _fill(database: sqlite3.Connection, sites: Mapping[str, Path]) -> str:
    """Put the examples of all sites into the database, sorted by user. Return a description."""
    database.execute(_POSTS)
    for site, file in sites.items():
        encoded_id(site)
        for place, attributes in _rows(file):
            row = _post(attributes, place)
            if row is not None:
                try:
                    database.execute("INSERT INTO post VALUES (?, ?, ?, ?, ?, ?, ?)", (site, *row))
                except sqlite3.IntegrityError:
                    raise damaged(f"{place}: the Id {row[0]} occurs twice") from None
    database.execute(_EXAMPLES)

    def count(query: str) -> int:
        return int(database.execute(f"SELECT count(*) FROM {query}").fetchone()[0])

    used, owned = count("example"), count("post WHERE owner IS NOT NULL")
    users = count("(SELECT DISTINCT site, owner FROM example)")
    return (
        f"{used} questions and answers by {users} users of Stack Exchange ({', '.join(sites)}). "
        f"Left out: {count('post') - owned} posts without a user and {owned - used} answers "
        "without their question. The content belongs to its users and is licensed under CC BY-SA: "
        "name Stack Exchange, the site and the user where you show it."
    )


def _rows(file: Path) -> Iterator[tuple[str, Mapping[str, str]]]:
    """Yield the place and the attributes of each row, without reading the whole file at once."""
    number = 0
    with parsing(file), open(file, "rb") as content:
        events = ElementTree.iterparse(content, ("start", "end"))
        _, posts = next(events)
        if posts.tag != "posts":
            raise damaged(f"{file}: expected the element <posts>, got <{posts.tag}>")
        for event, row in events:
            if event == "start":
                number += 1
            elif row is not posts:
                yield f"{file}, row {number}", row.attrib
                posts.clear()


def _post(row: Mapping[str, str], place: str) -> tuple[int | str | None, ...] | None:
    """Return id, owner, parent, title, tags and body of a question or answer, for the database."""

    def string(name: str) -> str:
        if name not in row:
            raise damaged(f"{place}: expected the attribute {name}")
        return row[name]

    def number(name: str) -> int:
        if not re.fullmatch("-?[0-9]{1,18}", string(name)):
            raise damaged(f"{place}: expected a whole number as {name}, got {row[name][:60]!r}")
        return int(row[name])

    kind, post = number("PostTypeId"), number("Id")
    if kind not in (_QUESTION, _ANSWER):
        return None
    owner = number("OwnerUserId") if "OwnerUserId" in row else None
    body = text.tokens(string("Body"))
    if kind == _ANSWER:
        return post, owner, number("ParentId"), None, None, body
    title = text.tokens(html.escape(string("Title")))  # a title is plain text, a body is HTML
    tags = " ".join(re.findall(r"[^<>|\s]+", string("Tags")))  # <a><b>, or |a|b| since 2024
    return post, owner, post, title, tags, body
