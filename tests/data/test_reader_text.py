"""Words and tags become ranks by the counts that the official files have, and nothing else."""

import json
import random
import time
from collections import Counter

import numpy as np
import pytest

from fedda.data import store
from fedda.data.readers import text
from fedda.data.readers.text import Post
from fedda.errors import InputError


def population(seed, users):
    """Users with zero to four posts, of words and tags drawn so that many counts are equal."""
    rng = random.Random(seed)
    for user in range(users):
        yield (
            f"u{user}",
            [
                Post(
                    " ".join(f"w{int(rng.paretovariate(0.5))}" for _ in range(rng.randrange(9))),
                    [f"t{int(rng.paretovariate(0.8))}" for _ in range(rng.randrange(5))],
                )
                for _ in range(rng.randrange(5))
            ],
        )


def ranked(counts):
    return [each for _, each in sorted((-count, each) for each, count in counts.items())]


def counted(users):
    """The vocabularies, by the slowest way: one membership test for every word and user."""
    texts = [" ".join(post.text for post in posts).split() for _, posts in users]
    tags = [set(post.tags) for _, posts in users for post in posts]
    return (
        ranked({word: sum(word in own for own in texts) for word in set().union(*texts)}),
        ranked({tag: sum(tag in own for own in tags) for tag in set().union(*tags)}),
    )


def rows(column):
    ends = np.cumsum(column.length)
    return [each.tolist() for each in np.split(column.values, ends)[:-1]]


def ranks(posts, words=None, tags=None):
    """The ranks of one user's words and tags."""
    made = text.source({"train": lambda: iter([("u", posts)])}, words, tags, "")
    ((_, columns),) = made.splits["train"]
    return rows(columns["x"]), rows(columns["y"])


def vocabularies(source):
    return [source.texts()[name].splitlines() for name in ("words.txt", "tags.txt")]


def test_counts_and_ranks_are_those_of_a_slow_count(tmp_path):
    train, test = list(population(0, 60)), list(population(1, 20))
    about = "made here"
    source = text.source(
        {"train": lambda: iter(train), "test": lambda: iter(test)}, *[None] * 2, about
    )
    made = store.write(tmp_path / "s", source, {})
    words, tags = counted(train)
    assert made.text("words.txt").splitlines() == words
    assert made.text("tags.txt").splitlines() == tags
    assert made.meta["words"] == about
    assert len({post.text for _, posts in test for post in posts} - set(words)) > 0
    for name, users in (("train", train), ("test", test)):
        split = made.splits[name]
        for user, posts in users:
            x, y = (split.column(each, split.clients.index(user)) for each in "xy")
            assert x.values.dtype == y.values.dtype == np.uint16
            assert rows(x) == [
                [words.index(word) if word in words else 65534 for word in post.text.split()]
                for post in posts
            ]
            assert rows(y) == [
                [tags.index(tag) for tag in dict.fromkeys(post.tags) if tag in tags]
                for post in posts
            ]


def test_a_word_counts_once_a_user_and_a_tag_once_a_post():
    often = [Post("loud loud", ["x", "x"]), Post("loud", ["y"]), Post("", ["y"])]
    both = [Post("quiet", ["x"])]
    users = [("a", often), ("b", both), ("c", both)]
    source = text.source({"train": lambda: iter(users)}, None, None, "")
    assert vocabularies(source) == [["quiet", "loud"], ["x", "y"]]  # 2 and 1 users; 3 and 2 posts


def test_the_order_of_users_and_posts_does_not_matter():
    users = list(population(3, 40))
    expected = vocabularies(text.source({"train": lambda: iter(users)}, None, None, ""))
    mixed = [(user, posts[::-1]) for user, posts in random.Random(0).sample(users, len(users))]
    assert vocabularies(text.source({"train": lambda: iter(mixed)}, None, None, "")) == expected


def test_given_vocabularies_are_taken_as_they_are():
    post = [Post("b a c b", ["y", "z", "x", "y"])]
    assert ranks(post, ["a", "b"], ["x", "y"]) == ([[1, 0, 65534, 1]], [[1, 0]])
    assert ranks(post, ["a", "b"], None) == ([[1, 0, 65534, 1]], [[1, 2, 0]])
    assert ranks(post, None, ["x", "y"]) == ([[1, 0, 2, 1]], [[1, 0]])


def test_ranks_end_where_the_room_for_them_ends():
    words = [f"w{rank}" for rank in range(65537)]
    tags = [f"t{rank}" for rank in range(65537)]
    post = [Post("w0 w65533 w65534 w65535 w65536", ["t65534", "t65533", "t65535", "t0"])]
    assert ranks(post, words, tags) == ([[0, 65533, 65534, 65534, 65534]], [[65533, 0]])


def test_counted_vocabularies_end_there_too(monkeypatch):
    monkeypatch.setattr(text, "KNOWN", 2)
    users = [("u", [Post("a b c", ["p", "q", "r"])]), ("v", [Post("c", ["r"])])]
    source = text.source({"train": lambda: iter(users)}, None, None, "")
    (_, first), _ = source.splits["train"]
    assert (rows(first["x"]), rows(first["y"])) == ([[1, 65534, 0]], [[1, 0]])
    assert vocabularies(source) == [["c", "a"], ["r", "p"]]


def test_posts_and_users_may_be_empty():
    assert ranks([]) == ([], [])
    assert ranks([Post(" ", []), Post("a", [""]), Post("", ["t"])]) == (
        [[], [0], []],
        [[], [], [0]],
    )


@pytest.mark.parametrize("given", [True, False])
def test_users_are_read_once_to_encode_and_once_to_count(given):
    calls = Counter()

    def users(split):
        calls[split] += 1
        yield "u", [Post("a", ["t"])]

    vocabulary = ["a"] if given else None
    splits = {"test": lambda: users("test"), "train": lambda: users("train")}
    source = text.source(splits, vocabulary, vocabulary, "")
    assert not calls  # a count may take an hour: not before somebody asks for it
    for clients in source.splits.values():
        list(clients)
    source.texts()
    assert calls == {"test": 1, "train": 1 if given else 2}


@pytest.mark.parametrize("tag", ["a\nb", "a\x85b", "a\u2028b", "a\x0bb", "a\r", "\ud800", ""])
def test_a_tag_that_is_not_a_line_is_refused(tag):
    with pytest.raises(InputError, match="not one line"):
        ranks([Post("a", ["a"])], ["a"], ["ok", tag])


@pytest.mark.parametrize(
    ("markup", "expected"),
    [
        ("", ""),
        ("<p>Hello World</p>\n\n<p>again</p>", "hello world again"),
        ("<p>one</p><p>two</p>", "one two"),
        ("a, b. (c)?", "a , b . ( c ) ?"),
        ("don't use the well-known __init__", "don't use the well-known _ _ init _ _"),
        ("1 &lt; 2 &amp;&amp; &quot;x&quot;", '1 < 2 & & " x "'),
        ("&amp;lt;", "& lt ;"),  # unescaped once, as it was escaped
        ("<code>if (a &lt;b&gt; c)</code>", "if ( a < b > c )"),
        ('see <a href="http://x.org/y">this</a>', "see this"),
        ("at https://x.org/a?b=c&amp;d#e. Or (www.y.com), ok", "at <url> . or ( <url> ) , ok"),
        ("HTTP://X.ORG", "<url>"),
        ("the awww.x http is", "the awww . x http is"),
        ("caf\xe9 na\xefve \u201cquoted\u201d \u2192 \U0001f600 end", "caf nave quoted end"),
        ("no&nbsp;break\u2003space\x85line", "no break space line"),
        ("<br/>a<br>b<!-- c -->", "a b"),
        ("a < b", "a < b"),  # a lone bracket is no tag
        ("&#65;&#x42;&#0065;&#x1F600;&bogus; x", "aba & bogus ; x"),
        ("a\tb\r\nc\x00d", "a b c d"),
    ],
)
def test_tokens(markup, expected):
    assert text.tokens(markup) == expected


@pytest.mark.parametrize(
    "hostile",
    [
        "<a" * 200_000,
        "<" * 400_000,
        "&" * 400_000,
        "&#" + "9" * 400_000,
        "&#x" + "9" * 400_000,
        "http://" * 60_000 + "!" * 60_000,
        "http://!" * 50_000,
        "www." * 100_000,
    ],
)
def test_no_text_takes_long(hostile):
    begin = time.perf_counter()
    text.tokens(hostile)
    assert time.perf_counter() - begin < 20  # 0.1 s; with tags as "<[^>]*>" the first takes 45


def test_read_word_count(tmp_path):
    (tmp_path / "w").write_bytes("the 90\n, 7\nü 7\n<url> 0\n".encode())
    assert text.read_word_count(tmp_path / "w") == ["the", ",", "ü", "<url>"]


def test_words_without_a_rank_are_not_read(tmp_path):
    lines = [b"w%d %d\n" % (rank, 100_000 - rank) for rank in range(70_000)]
    (tmp_path / "w").write_bytes(b"".join(lines))
    assert text.read_word_count(tmp_path / "w") == [f"w{rank}" for rank in range(65534)]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"the 90\na\n", "line 2: expected a new word and a count of at most .*, got 'a"),
        (b"the 90\n\na 1\n", "line 2: expected a new word and a count of at most 90"),
        (b"the 90 1\n", "line 1: expected a new word and a count of at most 10*"),
        (b"the -90\n", "line 1: expected a new word and a count of at most 10*"),
        (b"the 9.5\n", "line 1: expected a new word and a count of at most 10*"),
        (b"the " + b"9" * 5000, "another format"),
        (b"the 5\na 6\n", "line 2: expected a new word and a count of at most 5, got"),
        (b"a 6\nb 5\na 4\n", "line 3: expected a new word and a count of at most .*, got 'a 4"),
        (b"a 6\n\xff\xfe 5\n", "UnicodeDecodeError"),
        (b"\x1f\x8b\x08\x00\x00", "UnicodeDecodeError"),  # still packed
    ],
)
def test_a_damaged_word_count_is_refused(tmp_path, content, words):
    (tmp_path / "stackoverflow.word_count").write_bytes(content)
    with pytest.raises(InputError, match=words) as caught:
        text.read_word_count(tmp_path / "stackoverflow.word_count")
    assert "stackoverflow.word_count" in str(caught.value)


def test_read_tag_count_keeps_the_order_of_equal_counts(tmp_path):
    counts = {"c#": 5, "z": 7, "java": 7, "a": 7, "b": 5, "none": 0}
    (tmp_path / "t").write_text(json.dumps(counts))
    assert text.read_tag_count(tmp_path / "t") == ["z", "java", "a", "c#", "b", "none"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "JSONDecodeError"),
        (b'{"a": 1', "JSONDecodeError"),
        (b'{"a": 1, "\xff": 2}', "UnicodeDecodeError"),
        (b'{"a": ' + b"9" * 5000 + b"}", "another format"),
        (b"[" * 100_000, "RecursionError"),
        (b'["a"]', "'list' object has no attribute 'items'"),
        (b"{}", "expected tags and counts, got 'none'"),
        (b'{"a": "1"}', "expected tags and counts, got '1'"),
        (b'{"a": 1, "b": 1.5}', "expected tags and counts, got 1.5"),
        (b'{"a": NaN}', "expected tags and counts, got nan"),
        (b'{"a": true}', "expected tags and counts, got True"),
        (b'{"a": -1}', "expected tags and counts, got -1"),
        (b'{"a": null}', "expected tags and counts, got None"),
    ],
)
def test_a_damaged_tag_count_is_refused(tmp_path, content, words):
    (tmp_path / "stackoverflow.tag_count").write_bytes(content)
    with pytest.raises(InputError, match=words) as caught:
        text.read_tag_count(tmp_path / "stackoverflow.tag_count")
    assert "stackoverflow.tag_count" in str(caught.value)
