"""A Stack Exchange dump, byte by byte as it is published, becomes users with posts and tags."""

import contextlib
import gc
import os
import random
import sqlite3
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from fedda.data import store
from fedda.data.readers import stackexchange
from fedda.errors import InputError
from helpers import sandboxed

BOM = b"\xef\xbb\xbf"
HEAD = b'<?xml version="1.0" encoding="utf-8"?>\r\n<posts>\r\n'
TAIL = b"</posts>\r\n"


def line(**attributes):
    """A row as dumps have it: two spaces, escaped attributes, CRLF."""

    def escaped(value):
        for plain, code in (("&", "amp"), ("<", "lt"), (">", "gt"), ('"', "quot"), ("\n", "#xA")):
            value = value.replace(plain, f"&{code};")
        return value

    parts = [f'{name}="{escaped(str(value))}"' for name, value in attributes.items()]
    return f"  <row {' '.join(parts)} />\r\n".encode()


def common(post, kind, owner, body, **more):
    owned = {} if owner is None else {"OwnerUserId": owner}
    date = "2016-08-02T15:39:14.947"
    return line(
        **{"Id": post, "PostTypeId": kind, "CreationDate": date, "Score": -1, "Body": body},
        **owned,
        **more,
    )


def question(post, owner, body, title, tags):
    return common(post, 1, owner, body, Title=title, Tags=tags, AnswerCount=0)


def answer(post, owner, body, parent):
    return common(post, 2, owner, body, ParentId=parent)


def dump(folder, *lines):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "Posts.xml").write_bytes(BOM + HEAD + b"".join(lines) + TAIL)
    return folder / "Posts.xml"


# Users 1 and 20 with a question each; a train and a test split cannot be empty.
SMALL = (question(1, 1, "<p>a</p>", "b", "<t>"), question(2, 20, "<p>a</p>", "b", "<t>"))


def imported(path, place):
    return store.write(place, stackexchange.read(path, "stackexchange"), {})


def users(made, split):
    """Every user's posts, as lists of words and of tags; "?" is a word without a rank."""
    words = dict(enumerate(made.text("words.txt").splitlines())) | {65534: "?"}
    tags = made.text("tags.txt").splitlines()
    found = made.splits[split]

    def rows(name, client, vocabulary):
        column = found.column(name, client)
        cut = np.split(column.values, np.cumsum(column.length))[:-1]
        return [" ".join(vocabulary[rank] for rank in row.tolist()) for row in cut]

    return {
        user: list(zip(rows("x", client, words), rows("y", client, tags), strict=True))
        for client, user in enumerate(found.clients)
    }


def test_a_dump_as_it_is_published(tmp_path):
    path = dump(
        tmp_path / "ai",
        question(
            1, 8, "<p>What does &quot;x &lt; 1&quot; mean?</p>\n", "A & <b> \xdcber", "<c#><.net>"
        ),
        answer(3, 9, "<p>Nothing.</p>", 1),
        answer(4, 8, "<pre><code>f(a)</code></pre>", 7),  # before its question
        common(5, 4, 9, "<p>about a tag</p>"),  # a tag's wiki page
        line(Id=6, PostTypeId=5, CreationDate="2016-08-02T15:39:14.947"),  # and an empty one
        question(7, None, "<p>lost</p>", "Why", "|c#|new|"),
        answer(10, 9, "lost", 99),  # to a question that was deleted
        answer(11, 9, "lost", 3),  # to an answer
        answer(12, None, "lost", 1),
        answer(13, 20, "zebra Nothing", 1),
    )
    made = imported(path, tmp_path / "s")
    assert users(made, "train") == {
        "ai:8": [
            ('what does " x < 1 " mean ? a & < b > ber', "c# .net"),
            ("f ( a ) why", "c# new"),
        ],
        "ai:9": [("nothing . a & < b > ber", "c# .net")],
    }
    assert users(made, "test") == {"ai:20": [("? nothing a & < b > ber", "c# .net")]}
    about = made.meta["words"]
    assert "4 questions and answers by 3 users of Stack Exchange (ai)" in about
    assert "2 posts without a user and 2 answers without their question" in about
    assert "CC BY-SA" in about


def test_vocabularies_are_counted_in_train_alone(tmp_path):
    path = dump(
        tmp_path / "s",
        question(1, 10, "seen " * 9, "rare", "<mine><yours>"),
        answer(2, 1, "common seen", 3),
        question(3, 2, "common", "title", "<yours><zone>"),
        question(4, 2, "common", "title", "<zone>"),
    )
    made = imported(path, tmp_path / "store")
    # users: common 2, title 2, seen 1; posts: zone 3, yours 2
    assert made.text("words.txt").split() == ["common", "title", "seen"]
    assert made.text("tags.txt").split() == ["zone", "yours"]
    assert users(made, "test") == {"s:10": [("seen " * 9 + "?", "yours")]}


def test_sites_do_not_share_users_or_questions(tmp_path):
    dump(tmp_path / "se" / "beer", *SMALL, answer(5, 1, "here", 1))
    dump(tmp_path / "se" / "ai", question(1, 1, "one", "two", "|u|"), answer(3, 1, "there", 2))
    (tmp_path / "se" / "notes").mkdir()
    made = imported(tmp_path / "se", tmp_path / "s")
    assert users(made, "train") == {
        "ai:1": [("one two", "u")],
        "beer:1": [("a b", "t"), ("here b", "t")],
    }
    assert made.splits["test"].clients == ["beer:20"]


def test_a_user_is_named_alike_however_the_site_is_given(tmp_path, monkeypatch):
    file = dump(tmp_path / "in" / "beer", *SMALL)
    monkeypatch.chdir(file.parent)
    for path in (file, file.parent, tmp_path / "in", Path("Posts.xml"), Path(".")):
        assert stackexchange.files(path, "stackexchange"), path
        made = imported(path, tmp_path / "s")
        assert [each.clients for each in made.splits.values()] == [["beer:1"], ["beer:20"]]


def test_other_folders_are_not_found(tmp_path):
    (tmp_path / "Posts.xml").mkdir()
    (tmp_path / "site" / "Posts.xml").mkdir(parents=True)
    dump(tmp_path / "too" / "deep" / "down")
    for path in (tmp_path, tmp_path / "Posts.xml", tmp_path / "too", tmp_path / "absent"):
        assert not stackexchange.files(path, "stackexchange"), path
    assert not stackexchange.files(dump(tmp_path / "other", *SMALL), "emnist")


def test_every_tenth_user_is_held_out(tmp_path):
    owners = [-10, -1, 0, 1, 9, 10, 11, 19, 20, 100, 101, 12345678901234560]
    posts = [question(post, owner, "a", "b", "<t>") for post, owner in enumerate(owners)]
    made = imported(dump(tmp_path / "s", *posts), tmp_path / "store")
    for split, held_out in (("train", False), ("test", True)):
        expected = sorted(f"s:{owner}" for owner in owners if (owner % 10 == 0) == held_out)
        assert made.splits[split].clients == expected


def test_posts_are_in_the_order_of_their_ids_and_splits_may_be_read_in_turns(tmp_path):
    numbers = random.Random(0).sample(range(1, 10_000), 200)
    posts = [question(post, post % 40, f"w{post}", "", "<t>") for post in numbers]
    source = stackexchange.read(dump(tmp_path / "s", *posts), "stackexchange")
    found = dict(
        client
        for pair in zip(source.splits["train"], [None, *source.splits["test"]], strict=False)
        for client in pair
        if client
    )
    words = source.texts()["words.txt"].split()
    assert len(found) >= 8
    for user, columns in found.items():
        owner = int(user.removeprefix("s:"))
        expected = [f"w{post}" for post in sorted(numbers) if post % 40 == owner]
        got = [words[rank] if rank < 65534 else "?" for rank in columns["x"].values.tolist()]
        assert got == (expected if owner % 10 else ["?"] * len(expected))


def test_counts_are_those_of_a_slow_count(tmp_path):
    rng = random.Random(1)

    def some(prefix, most, exponent):
        return [
            f"{prefix}{int(rng.paretovariate(exponent))}" for _ in range(rng.randrange(1, most))
        ]

    kept, lines = {}, []
    asked = {post: (some("t", 5, 1), some("w", 4, 0.7)) for post in range(0, 300, 3)}
    for post in range(300):
        owner, body = rng.randrange(1, 60), some("w", 9, 0.7)
        parent = rng.choice(list(asked))
        tags, title = asked[post] if post in asked else asked[parent]
        marked = "".join(f"<p>{word.upper()}</p>" for word in body)
        if post in asked:
            shown = "".join(f"<{tag}>" for tag in tags)
            lines.append(question(post, owner, marked, " ".join(title), shown))
        else:
            lines.append(answer(post, owner, marked, parent))
        kept.setdefault(f"s:{owner}", []).append((body + title, tags))
    made = imported(dump(tmp_path / "s", *lines), tmp_path / "store")
    train = {user: posts for user, posts in kept.items() if int(user[2:]) % 10}
    words = Counter(w for posts in train.values() for w in set().union(*(p[0] for p in posts)))
    tags = Counter(tag for posts in train.values() for post in posts for tag in set(post[1]))
    for name, counts in (("words.txt", words), ("tags.txt", tags)):
        expected = sorted(counts, key=lambda each: (-counts[each], each))
        assert made.text(name).splitlines() == expected
        assert len(set(counts.values())) < len(counts) - 5  # so there are ties to settle
    assert users(made, "train") == {
        user: [(" ".join(body), " ".join(dict.fromkeys(tags))) for body, tags in posts]
        for user, posts in train.items()
    }


GOOD = question(1, 1, "a", "b", "<t>")


def without(row, name):
    return b" ".join(part for part in row.split(b" ") if not part.startswith(name + b"="))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "ParseError: no element found: line 1"),
        (BOM + HEAD + GOOD, "ParseError: no element found: line 4"),
        (BOM + HEAD + GOOD[:-9], "ParseError: .*: line 3"),
        (HEAD + GOOD + GOOD.replace(b'"a"', b'"\xff"') + TAIL, "ParseError: .*: line 4"),
        (HEAD + GOOD.replace(b'"a"', b'"\0"') + TAIL, "ParseError: .*: line 3"),
        (HEAD + GOOD.replace(b'"a"', b'"&nbsp;"') + TAIL, "undefined entity.*: line 3"),
        (HEAD + GOOD + TAIL + GOOD, "junk after document element: line 5"),
        (b"\x37\x7a\xbc\xaf\x27\x1c", "ParseError: .*: line 1"),  # 7z, still packed
        (b"<comments>\n</comments>", "expected the element <posts>, got <comments>"),
        (HEAD + b"<post/>" + TAIL, "row 1: expected the attribute PostTypeId"),
        (HEAD + without(GOOD, b"Id") + TAIL, "row 1: expected the attribute Id"),
        (HEAD + GOOD + without(GOOD, b"PostTypeId") + TAIL, "row 2: .* attribute PostTypeId"),
        (HEAD + without(GOOD, b"Body") + TAIL, "row 1: expected the attribute Body"),
        (HEAD + without(GOOD, b"Title") + TAIL, "row 1: expected the attribute Title"),
        (HEAD + without(GOOD, b"Tags") + TAIL, "row 1: expected the attribute Tags"),
        (HEAD + without(answer(1, 1, "a", 1), b"ParentId") + TAIL, "row 1: .* attribute ParentId"),
        (HEAD + question("one", 1, "a", "b", "<t>") + TAIL, "row 1: .* number as Id, got 'one'"),
        (HEAD + question("one" * 5000, 1, "a", "b", "<t>") + TAIL, "number as Id, got 'one"),
        (HEAD + question("9" * 19, 1, "a", "b", "<t>") + TAIL, "number as Id, got '999"),
        (HEAD + question(1, "x", "a", "b", "<t>") + TAIL, "number as OwnerUserId, got 'x'"),
        (HEAD + question(1, "", "a", "b", "<t>") + TAIL, "number as OwnerUserId, got ''"),
        (HEAD + answer(1, 1, "a", "1.0") + TAIL, "number as ParentId, got '1.0'"),
        (HEAD + common(1, "1e0", 1, "a") + TAIL, "number as PostTypeId"),
        (HEAD + GOOD + answer(1, 1, "a", 1) + TAIL, "row 2: the Id 1 occurs twice"),
    ],
)
def test_damage_is_named_with_its_place(tmp_path, content, words):
    (tmp_path / "Posts.xml").write_bytes(content)
    with pytest.raises(InputError, match=words) as caught:
        stackexchange.read(tmp_path, "stackexchange")
    message = str(caught.value)
    assert message.startswith(str(tmp_path / "Posts.xml")), message
    assert len(message) < len(str(tmp_path)) + 200


LAUGHS = "".join(f'<!ENTITY a{n} "{f"&a{n - 1};" * 10}">' for n in range(1, 12))


def with_document_type(tmp_path, declared):
    (tmp_path / "secret").write_text("treasure")
    row = GOOD.replace(b'"a"', b'"&a11;"')
    content = HEAD.replace(b"<posts>", declared.encode() + b"<posts>") + row + TAIL
    (tmp_path / "Posts.xml").write_bytes(content)
    return tmp_path


@pytest.mark.parametrize(
    "declared",
    [
        '<!DOCTYPE posts [<!ENTITY a11 SYSTEM "secret">]>',
        '<!DOCTYPE posts SYSTEM "secret">',
        '<!DOCTYPE posts [<!ENTITY % a SYSTEM "secret"> %a;]>',
    ],
)
def test_no_other_file_is_read(tmp_path, monkeypatch, declared):
    monkeypatch.chdir(tmp_path)
    with contextlib.suppress(InputError):
        source = stackexchange.read(with_document_type(tmp_path, declared), "stackexchange")
        assert "treasure" not in source.texts()["words.txt"]


def test_entities_that_grow_without_end_are_refused_or_end_the_child(tmp_path):
    path = with_document_type(tmp_path, f'<!DOCTYPE posts [<!ENTITY a0 "ha">{LAUGHS}]>')
    (found,) = sandboxed.outcomes("stackexchange", "stackexchange", [path])
    assert found in ("refused", "memory", "SIGALRM")


def test_a_site_whose_name_is_not_utf8_is_refused(tmp_path):
    dump(tmp_path / "all" / os.fsdecode(b"caf\xe9"), *SMALL)
    with pytest.raises(InputError, match=r"the client id 'caf\\udce9' must be UTF-8"):
        imported(tmp_path / "all", tmp_path / "store")


def test_a_file_cut_anywhere_is_refused(tmp_path):
    whole = BOM + HEAD + b"".join(SMALL) + TAIL.rstrip()
    file = tmp_path / "Posts.xml"
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(InputError, match=r"Posts\.xml is damaged or of another format"):
            stackexchange.read(file, "stackexchange")
    file.write_bytes(whole)
    stackexchange.read(file, "stackexchange")


def test_any_changed_byte_is_read_or_refused(tmp_path):
    whole = BOM + HEAD + b"".join(SMALL) + TAIL
    rng = random.Random(0)
    refused = 0
    for _ in range(400):
        changed = bytearray(whole)
        changed[rng.randrange(len(whole))] = rng.randrange(256)
        (tmp_path / "Posts.xml").write_bytes(changed)
        try:
            source = stackexchange.read(tmp_path / "Posts.xml", "stackexchange")
            for clients in source.splits.values():
                list(clients)
            "".join(source.texts().values()).encode()
        except InputError:
            refused += 1
    assert 100 < refused < 400


def test_rows_are_whole_across_pieces_of_the_file(tmp_path):
    """The file is read in pieces of 256 KiB: rows end in the middle of them, and one is longer."""
    sizes = [1000, 700_000, 3, 262_144, 90_000]
    posts = [question(10 + at, 10 + at, "w" * size, "b", "<t>") for at, size in enumerate(sizes)]
    source = stackexchange.read(dump(tmp_path / "s", *posts), "stackexchange")
    assert len(list(source.splits["train"])) == 4
    assert sorted(map(len, source.texts()["words.txt"].split())) == [1, *sorted(sizes[1:])]


@pytest.mark.parametrize("damaged", [False, True])
def test_the_database_goes_with_its_source(tmp_path, monkeypatch, damaged):
    opened = []
    connect = sqlite3.connect

    def noted(*arguments):
        opened.append(connect(*arguments))
        return opened[-1]

    monkeypatch.setattr(sqlite3, "connect", noted)
    file = dump(tmp_path / "s", *SMALL, *SMALL[:damaged])
    if damaged:
        with pytest.raises(InputError, match="occurs twice"):
            stackexchange.read(file, "stackexchange")
    else:
        source = stackexchange.read(file, "stackexchange")
        list(source.splits["train"])
        gc.collect()
        opened[0].execute("SELECT 1")  # still open: the test split was not read
        del source
    gc.collect()
    with pytest.raises(sqlite3.ProgrammingError, match="closed"):
        opened[0].execute("SELECT 1")


PEAK = """
import sys
from pathlib import Path
from fedda.data import store
from fedda.data.readers import stackexchange
store.write(Path(sys.argv[2]), stackexchange.read(Path(sys.argv[1]), "stackexchange"), {})
print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux tells the peak")
def test_memory_does_not_grow_with_the_file(tmp_path):
    peaks, rng = [], random.Random(0)
    for megabytes in (5, 60):
        file = dump(tmp_path / str(megabytes))
        with open(file, "wb") as out:
            out.write(HEAD)
            post = 0
            while out.tell() < megabytes * 10**6:
                body = " ".join(f"w{rng.randrange(5000)}" for _ in range(300))
                out.write(question(post, post % 2003, body, "title", "<t>"))
                post += 1
            out.write(TAIL)
        command = [sys.executable, "-c", PEAK, str(file), str(tmp_path / f"s{megabytes}")]
        peaks.append(int(subprocess.run(command, capture_output=True, check=True).stdout))
    assert peaks[1] - peaks[0] < 20_000, peaks  # KiB; a copy of the larger file would be 60,000


def test_real_dumps(tmp_path):
    """Seven sites: figures from an independent count with xml.etree over the same files."""
    if "FEDDA_TEST_DATA" not in os.environ:
        pytest.skip("FEDDA_TEST_DATA names no folder with stackexchange/<site>/Posts.xml")
    made = imported(Path(os.environ["FEDDA_TEST_DATA"]) / "stackexchange", tmp_path / "s")
    train, test = made.splits["train"], made.splits["test"]
    assert (train.num_examples + test.num_examples, test.num_examples) == (18_201, 1_701)
    assert (train.num_clients + test.num_clients, test.num_clients) == (4_007, 397)
    assert "391 posts without a user and 2 answers without" in made.meta["words"]
    posts = {user: own for split in ("train", "test") for user, own in users(made, split).items()}
    counts = Counter(tag for own in posts.values() for _, tags in own for tag in tags.split())
    frequent = {tag for tag, _ in counts.most_common(500)}
    # Users, and users of ten posts or more, if only posts with a frequent tag count.
    left = [sum(not frequent.isdisjoint(tags.split()) for _, tags in own) for own in posts.values()]
    assert (sum(each > 0 for each in left), sum(each >= 10 for each in left)) == (3_890, 311)
