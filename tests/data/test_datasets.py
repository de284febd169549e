"""Data sets by name: imported from any layout, and never read when their files have changed."""

import bz2
import json
import logging
import os
import shlex
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedda.data import catalogue, datasets, sandbox, store
from fedda.data.catalogue import Dataset
from fedda.data.store import Source
from fedda.errors import InputError
from helpers.archives import tar_bz2
from helpers.downloads import Server


def fake_reader(suffix: str, read: Callable[..., Source] | None = None) -> types.ModuleType:
    """Reads files NAME.suffix: one client for each, whose one example is the file's length."""
    reader = types.ModuleType(f"fedda.data.readers.fake_{suffix}")

    def files(path: Path) -> list[Path]:
        own = path.is_file() and path.suffix == f".{suffix}"
        return [path] if own else sorted(path.glob(f"*.{suffix}"))

    def clients(path: Path):
        for file in files(path):
            content = file.read_bytes()
            if content == b"bad":
                raise InputError(f"{file} is bad.")
            one = np.array([len(content)])
            yield f"{path.name}/{file.stem}", {"x": one, "y": one}

    reader.layout = lambda name: f"files of {name} that end in .{suffix}"
    reader.files = lambda path, name: files(path)
    reader.read = read or (lambda path, name: Source({"train": clients(path)}, description="fake"))
    return reader


def call_here(function, arguments, what, limits, tell, lock=None):
    """Does what `sandbox.call` does, in this process and without limits."""
    return function(*json.loads(json.dumps(arguments)), tell=tell)


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Two data sets with fake readers, and an empty folder for stores.

    Fake readers are known to this process alone, so that nothing is read in a child process here.
    """
    monkeypatch.setenv("FEDDA_DATA", str(tmp_path / "root"))
    monkeypatch.setattr(sandbox, "call", call_here)
    download = ("http://127.0.0.1:9/letters.tar.bz2", "md5:0")
    sets = {
        "letters": Dataset("letters", (fake_reader("one"), fake_reader("two")), (download,)),
        "byhand": Dataset("dumps", (fake_reader("one"),), by_hand="Go to the archive."),
    }
    for module in (catalogue, datasets):
        monkeypatch.setattr(module, "DATASETS", sets)
    return sets


def folder_of(path: Path, **files: str) -> Path:
    path.mkdir(parents=True)
    for name, text in files.items():
        (path / name.replace("_", ".")).write_text(text)
    return path


def content(opened: store.Store) -> dict[str, int]:
    split = opened.splits["train"]
    return {name: int(split.column("x", k)[0]) for k, name in enumerate(split.clients)}


def left(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()} if root.exists() else set()


def changed(file: Path, text: str) -> None:
    """Also where a file system's clock is coarse: a time of its own."""
    file.write_text(text)
    os.utime(file, ns=(1, file.stat().st_mtime_ns + 1_000_000_000))


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"FEDDA_DATA": "/a/b", "XDG_CACHE_HOME": "/c"}, "/a/b"),
        ({"FEDDA_DATA": "", "XDG_CACHE_HOME": "/c"}, "/c/fedda"),
        ({"FEDDA_DATA": "~/x"}, "/home/me/x"),
        ({}, "/home/me/.cache/fedda"),
    ],
)
def test_where_data_sets_are_kept(monkeypatch, variables, expected):
    for name in ("FEDDA_DATA", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"HOME": "/home/me"} | variables).items():
        monkeypatch.setenv(name, value)
    assert datasets.root() == Path(expected)


def test_a_folder_is_imported_and_opened(tmp_path):
    source = folder_of(tmp_path / "raw", a_one="1", b_one="22")
    told = []
    imported = datasets.import_files("letters", source, told.append)
    assert content(imported) == {"raw/a": 1, "raw/b": 2}
    assert content(datasets.open_dataset("letters")) == {"raw/a": 1, "raw/b": 2}
    assert told[-1] == "train: 2 clients, 2 examples"
    assert imported.meta["origin"]["reader"] == "fake_one"
    assert imported.meta["origin"]["path"] == str(source)
    assert left(tmp_path / "root") == {"letters"}


def test_the_first_reader_that_finds_its_layout_reads(tmp_path):
    source = folder_of(tmp_path / "raw", a_two="1", b_txt="22")
    assert content(datasets.import_files("letters", source)) == {"raw/a": 1}
    (source / "c.one").write_text("333")
    assert content(datasets.import_files("letters", source)) == {"raw/c": 3}


@pytest.mark.parametrize("inner", ["", "deep/", "./very/deep/"])
def test_an_archive_is_unpacked_and_what_was_unpacked_is_removed(tmp_path, inner):
    tar_bz2(tmp_path / "raw.tar.bz2", {f"{inner}a.one": b"1234", f"{inner}b.one": b"1"})
    opened = datasets.import_files("letters", tmp_path / "raw.tar.bz2")
    where = inner.rstrip("/").rpartition("/")[2] or "raw"
    assert content(opened) == {f"{where}/a": 4, f"{where}/b": 1}, "no name of a temporary folder"
    assert left(tmp_path / "root") == {"letters"}
    assert opened.meta["origin"]["path"] == str(tmp_path / "raw.tar.bz2")


def test_a_single_compressed_file(tmp_path):
    (tmp_path / "a.one.bz2").write_bytes(bz2.compress(b"12345"))
    opened = datasets.import_files("letters", tmp_path / "a.one.bz2")
    assert list(content(opened).values()) == [5]


def test_archives_downloaded_by_hand_are_found_in_their_folder(tmp_path, known):
    raw = folder_of(tmp_path / "raw", note_txt="x")
    downloads = []
    for name in ("p", "q"):
        checksum = tar_bz2(raw / f"{name}.tar.bz2", {f"{name}.one": b"1"})
        downloads.append((f"http://host/{name}.tar.bz2", checksum))
    tar_bz2(raw / "unrelated.tar.bz2", {"u.one": b"1"})
    known["letters"] = Dataset("", (fake_reader("one"),), tuple(downloads))
    assert content(datasets.import_files("letters", raw)) == {"raw/p": 1, "raw/q": 1}


def test_a_data_set_may_unpack_to_no_more_than_its_limit(tmp_path, known):
    tar_bz2(tmp_path / "raw.tar.bz2", {"a.one": bytes(50_000)})
    known["letters"] = Dataset("", (fake_reader("one"),), unpacked_limit=40_000)
    with pytest.raises(InputError, match="more than the 40,000 bytes"):
        datasets.import_files("letters", tmp_path / "raw.tar.bz2")
    assert left(tmp_path / "root") == set()


def change_content(raw: Path, place: Path) -> str:
    changed(raw / "a.one", "7")  # of the same length
    return "have changed"


def add_file(raw: Path, place: Path) -> str:
    (raw / "z.one").write_text("1")
    return "have changed"


def remove_file(raw: Path, place: Path) -> str:
    (raw / "b.one").unlink()
    return "have changed"


def write_by_another_version(raw: Path, place: Path) -> str:
    meta = json.loads((place / "meta.json").read_text())
    (place / "meta.json").write_text(json.dumps(meta | {"version": store.VERSION + 1}))
    return "another version"


def lose_half(raw: Path, place: Path) -> str:
    file = place / "train" / "x.values"
    file.write_bytes(file.read_bytes()[:-1])
    return "bytes instead of"


SPOILED = [change_content, add_file, remove_file, write_by_another_version, lose_half]


@pytest.mark.parametrize("spoil", SPOILED)
def test_a_stale_store_is_imported_again_from_its_files(tmp_path, spoil, caplog):
    raw = folder_of(tmp_path / "raw", a_one="1", b_one="22")
    datasets.import_files("letters", raw)
    words = spoil(raw, tmp_path / "root" / "letters")
    found = datasets.look("letters")
    assert found.store is None
    assert words in found.problem
    opened = datasets.open_dataset("letters")
    expected = {f"raw/{file.stem}": len(file.read_bytes()) for file in raw.glob("*.one")}
    assert content(opened) == expected
    (told,) = (each for each in caplog.records if each.levelno >= logging.WARNING)
    assert f"letters is imported again from {raw}: " in told.getMessage()
    assert words in told.getMessage()
    caplog.clear()
    datasets.open_dataset("letters")
    assert caplog.records == [], "once"


def test_only_files_that_are_read_make_a_store_stale(tmp_path):
    """Whatever else lies, comes and goes there, also beside a folder that was alone."""
    raw = folder_of(tmp_path / "raw" / "inner", a_one="1", notes_txt="x")
    imported = datasets.import_files("letters", tmp_path / "raw")
    assert imported.meta["origin"]["path"] == str(raw)
    (tmp_path / "raw" / "beside.txt").write_text("")
    folder_of(raw / "deeper", b_one="1")
    changed(raw / "notes.txt", "y")
    (raw / "plot.png").write_text("")
    assert datasets.look("letters").store is not None
    changed(raw / "a.one", "22")
    assert "have changed" in datasets.look("letters").problem
    assert content(datasets.open_dataset("letters")) == {"inner/a": 2}


def test_an_archive_that_changes_makes_a_store_stale(tmp_path, known):
    raw = folder_of(tmp_path / "raw", notes_txt="x")
    downloads = tuple((f"http://host/{name}.tar.bz2", "md5:0") for name in "pq")
    known["letters"] = Dataset("", (fake_reader("one"),), downloads)
    for name in "pq":
        tar_bz2(raw / f"{name}.tar.bz2", {f"{name}.one": b"1"})
    datasets.import_files("letters", raw)
    changed(raw / "notes.txt", "y")
    tar_bz2(raw / "other.tar.bz2", {"o.one": b"1"})
    assert datasets.look("letters").problem == ""
    tar_bz2(raw / "q.tar.bz2", {"q.one": b"22"})
    os.utime(raw / "q.tar.bz2", ns=(1, 1))
    assert "have changed" in datasets.look("letters").problem
    assert content(datasets.open_dataset("letters")) == {"raw/p": 1, "raw/q": 2}


@pytest.mark.parametrize("spoil", [write_by_another_version, lose_half])
@pytest.mark.parametrize("folder_stays", [True, False])
def test_a_stale_store_without_its_files_is_an_error(tmp_path, spoil, folder_stays):
    raw = folder_of(tmp_path / "raw", a_one="1")
    datasets.import_files("letters", raw)
    words = spoil(raw, tmp_path / "root" / "letters")
    (raw / "a.one").unlink()
    if not folder_stays:
        raw.rmdir()
    with pytest.raises(InputError, match=rf"{words}.* no longer in {raw}.*fedda data import"):
        datasets.open_dataset("letters")


def test_a_store_whose_files_are_gone_is_read(tmp_path):
    """Nobody must keep the files that were imported. Hidden files are no change either."""
    raw = folder_of(tmp_path / "raw", a_one="1")
    datasets.import_files("letters", raw)
    (raw / ".hidden").write_text("")
    assert datasets.look("letters").problem == ""
    (raw / "a.one").unlink()
    assert content(datasets.open_dataset("letters")) == {"raw/a": 1}


def test_a_store_that_cannot_be_imported_again_is_not_read(tmp_path):
    raw = folder_of(tmp_path / "raw", a_one="1")
    datasets.import_files("letters", raw)
    changed(raw / "a.one", "bad")
    for _ in range(2):
        with pytest.raises(InputError, match=r"a\.one is bad"):
            datasets.open_dataset("letters")
    assert left(tmp_path / "root") == {"letters"}, "the old one stays, and nothing else"


def test_files_that_change_while_they_are_read_are_read_again(tmp_path, known):
    raw = folder_of(tmp_path / "raw", a_one="1")
    one = np.array([1])

    def read(path: Path, name: str) -> Source:
        changed(raw / "a.one", "22")
        return Source({"train": [("a", {"x": one, "y": one})]})

    known["letters"] = Dataset("", (fake_reader("one", read),))
    datasets.import_files("letters", raw)
    assert "have changed" in datasets.look("letters").problem


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "letters",
            r"letters \(letters\) is not here yet. Get it with: fedda data fetch letters, or",
        ),
        ("byhand", "not here yet. Go to the archive."),
        ("leters", "unknown data set 'leters'. Did you mean letters"),
        ("../letters", "cannot be the name"),
        ("downloads", "cannot be the name"),
        (".hidden", "cannot be the name"),
        ("", "cannot be the name"),
    ],
)
def test_what_is_not_here_is_an_error_with_advice(name, words):
    with pytest.raises(InputError, match=words):
        datasets.open_dataset(name)


@pytest.mark.parametrize(
    ("name", "path", "options", "words"),
    [
        ("letters", "nowhere", {}, "nowhere does not exist. Expected"),
        ("letters", "empty", {}, "empty does not hold letters. Expected"),
        (
            "letters",
            "raw",
            {"client": "c"},
            "have fixed columns: only tables of your own have options. Leave out: --client",
        ),
        ("letters", "raw", {"features": ["f"]}, "Leave out: --feature"),
        ("mine", "raw", {}, r"does not hold mine \(the data sets known are letters, byhand\)"),
        ("a/b", "raw", {"client": "c", "label": "l"}, "cannot be the name"),
        ("byhand", "raw", {}, "not hold byhand. Expected\n- files of byhand that end in .one"),
        ("letters", "raw/cut.tar.bz2", {}, "is damaged or of another format"),
    ],
)
def test_what_cannot_be_imported_leaves_nothing(tmp_path, name, path, options, words):
    raw = folder_of(tmp_path / "raw", a_two="1")
    (tmp_path / "empty").mkdir()
    tar_bz2(raw / "cut.tar.bz2", {"a.one": b"1"})
    (raw / "cut.tar.bz2").write_bytes((raw / "cut.tar.bz2").read_bytes()[:60])
    with pytest.raises(InputError, match=words):
        datasets.import_files(name, tmp_path / path, **options)
    assert left(tmp_path / "root") == set()


def test_a_folder_of_other_files_is_never_replaced(tmp_path):
    """Such as the files to be imported themselves, if FEDDA_DATA is where they lie."""
    raw = folder_of(tmp_path / "root" / "letters", a_one="1")
    with pytest.raises(InputError, match="but it is not a data set of fedda"):
        datasets.import_files("letters", raw)
    assert (raw / "a.one").read_text() == "1"


def test_ones_own_federation_keeps_its_options(tmp_path, monkeypatch):
    given = []

    def read(path: Path, name: str, **options: object) -> Source:
        given.append(options)
        one = np.array([len(path.read_text())])
        return Source({"train": [("a", {"x": one, "y": one})]})

    monkeypatch.setattr(catalogue, "table", fake_reader("csv", read))
    file = tmp_path / "mine.csv"
    file.write_text("1")
    options = {"client": "c", "label": "l", "features": ["f", "g"]}
    datasets.import_files("mine", file, **options)
    changed(file, "22")
    assert content(datasets.open_dataset("mine")) == {"a": 2}
    assert given == [options, options]
    for other in ("not a name", "foreign", "downloads", ".hidden"):
        folder_of(
            tmp_path / "root" / other,
            meta_json="{}" if other == "foreign" else '{"origin": {"path": "x"}}',
        )
    assert datasets.names() == ["letters", "byhand", "mine"]


@pytest.mark.parametrize(
    "origin",
    [
        {"path": ["raw"]},
        {"path": None},
        {"path": "raw", "options": ["client"]},
        {"path": "raw", "options": {"client": 5}},
        {"path": "raw", "options": {"features": [["f"]]}},
        {"path": "raw", "options": {"other": "f"}},
        ["path"],
    ],
)
def test_an_origin_of_wrong_types_is_none(tmp_path, origin):
    raw = folder_of(tmp_path / "raw", a_one="1")
    datasets.import_files("letters", raw)
    file = tmp_path / "root" / "letters" / "meta.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"origin": origin}))
    assert datasets.look("letters").origin == {}
    assert datasets.repair("letters").startswith("Delete ")
    with pytest.raises(InputError, match="but it is not a data set of fedda"):
        datasets.import_files("letters", raw)


def test_verify(tmp_path):
    raw = folder_of(tmp_path / "raw", a_one="1")
    datasets.import_files("letters", raw)
    assert "train/x.values" in datasets.verify("letters")
    file = tmp_path / "root" / "letters" / "train" / "x.values"
    file.write_bytes(bytes(file.stat().st_size))
    with pytest.raises(store.Stale, match=r"x\.values has sha256"):
        datasets.verify("letters")
    file.unlink()
    with pytest.raises(store.Stale, match=r"x\.values is missing"):
        datasets.verify("letters")
    with pytest.raises(InputError, match="is not here"):
        datasets.verify("byhand")
    with pytest.raises(InputError, match=r"unknown data set 'leters'. Did you mean letters"):
        datasets.verify("leters")


def test_what_replaces_a_store(tmp_path, monkeypatch):
    one = np.array([1])
    source = Source({"train": [("a", {"x": one, "y": one})]})
    monkeypatch.setattr(catalogue, "table", fake_reader("csv", lambda *_, **__: source))
    file = tmp_path / "my own.csv"
    file.write_text("1")
    options = {"client": "c", "label": "a label", "features": ["f", "g"]}
    datasets.import_files("mine", file, **options)
    words = ["fedda", "data", "import", "mine", str(file), "--client", "c", "--label", "a label"]
    words += ["--feature", "f", "--feature", "g"]
    before, _, command = datasets.repair("mine").partition(": ")
    assert before == "Import it again, which replaces it"
    assert shlex.split(command) == words
    file.unlink()
    assert datasets.repair("mine") == "Import it: fedda data import mine PATH"
    (tmp_path / "root" / "mine" / "meta.json").unlink()  # now an import would not replace it
    assert datasets.repair("mine").startswith(f"Delete {tmp_path / 'root' / 'mine'}. Import it: ")


@pytest.fixture
def remote(server: Server, tmp_path: Path, known) -> Server:
    """A data set that lies on a server as one archive."""
    archive = tmp_path / "file.bin"
    checksum = tar_bz2(archive, {"a.one": b"1", "b.one": b"22"})
    server.content = archive.read_bytes()
    url = server.url.replace("file.bin", "file.tar.bz2")
    known["letters"] = Dataset("", (fake_reader("one"),), ((url, checksum),))
    return server


def test_what_is_fetched_is_imported_once(remote, tmp_path):
    files = []
    told = []

    def track(file: str):
        files.append(file)
        return lambda done, total: None

    opened = datasets.fetch_dataset("letters", None, track, told.append)
    assert content(opened) == {"letters/a": 1, "letters/b": 2}
    assert files == ["file.tar.bz2"]
    assert left(tmp_path / "root") == {"letters", "downloads"}
    assert (datasets.downloads("letters") / "file.tar.bz2").read_bytes() == remote.content
    told.clear()
    datasets.fetch_dataset("letters", None, track, told.append)
    assert told == [], "not imported again"
    assert len(remote.asked) == 1, "nor downloaded"


def test_a_mirror_replaces_the_base_and_the_checksum_still_counts(remote, known):
    (url, checksum), *_ = known["letters"].downloads
    elsewhere = ("http://nowhere.invalid/x/file.tar.bz2", checksum)
    known["letters"] = Dataset("", (fake_reader("one"),), (elsewhere,))
    mirror = url.removesuffix("/file.tar.bz2")
    remote.content, right = remote.content[::-1], remote.content
    with pytest.raises(InputError, match="is not the expected file"):
        datasets.fetch_dataset("letters", mirror)
    remote.content = right
    assert content(datasets.fetch_dataset("letters", mirror)) == {"letters/a": 1, "letters/b": 2}


def test_a_failed_fetch_says_what_else_can_be_done(remote, tmp_path):
    remote.status = 404
    words = r"answered 404 .* --mirror URL, .* fedda data import letters PATH"
    with pytest.raises(InputError, match=words):
        datasets.fetch_dataset("letters")
    with pytest.raises(InputError, match=r"cannot be downloaded by this command. Go to"):
        datasets.fetch_dataset("byhand")
    with pytest.raises(InputError, match="unknown data set 'leters'"):
        datasets.fetch_dataset("leters")


def test_the_real_catalogue_is_sound(monkeypatch):
    monkeypatch.undo()
    for name, dataset in catalogue.DATASETS.items():
        assert datasets._place(name).name == name
        assert dataset.readers
        assert dataset.downloads or dataset.by_hand
        for reader in dataset.readers:
            assert reader.layout(name)
            assert not reader.files(Path("/nowhere"), name)
        for url, checksum in dataset.downloads:
            assert url.startswith("https://")
            assert len(bytes.fromhex(checksum)) == 32
