"""Archives are unpacked whole or refused, and never write outside of their folder."""

import bz2
import contextlib
import gzip
import io
import lzma
import random
import struct
import tarfile
import zipfile
import zlib
from pathlib import Path

import pytest

from fedda.data import archives
from fedda.errors import InputError

FILES = {"a.txt": b"first", "folder/b.bin": bytes(range(256)) * 40, "folder/deep/c": b""}


def header(name: bytes, size: int, kind: bytes = b"0", link: bytes = b"") -> bytes:
    """One block of a tar (ustar), byte by byte."""
    fields = [
        name.ljust(100, b"\0"),
        b"0000644\0" + b"0000000\0" * 2,
        b"%011o\0" % size if size >= 0 else b"\xff" * 4 + struct.pack(">q", size),
        b"00000000000\0",
        b" " * 8,  # the checksum counts as spaces
        kind,
        link.ljust(100, b"\0"),
        b"ustar\x0000",
    ]
    block = b"".join(fields).ljust(512, b"\0")
    return block[:148] + b"%06o\0 " % sum(block) + block[156:]


def tar_of(*members: tuple[bytes, bytes]) -> bytes:
    """Headers with their content, then the end mark."""
    padded = [head + data + bytes(-len(data) % 512) for head, data in members]
    return b"".join(padded) + bytes(1024)


def plain_tar(files=FILES) -> bytes:
    return tar_of(*((header(name.encode(), len(data)), data) for name, data in files.items()))


def zip_of(files=FILES) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def found(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def refused(tmp_path: Path, name: str, content: bytes, words: str, **limit: int) -> None:
    """Unpacks, expects the message, and that nothing but the archive and its folder is there."""
    place = tmp_path / "place"
    place.mkdir()
    (place / name).write_bytes(content)
    with pytest.raises(InputError, match=words) as error:
        archives.unpack(place / name, place / "into", **limit)
    assert name in str(error.value), "the message names the file"
    assert {path.name for path in tmp_path.iterdir()} == {"place"}
    assert {path.name for path in place.iterdir()} <= {name, "into"}
    assert not any(path.is_symlink() for path in place.rglob("*"))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.tar", plain_tar()),
        ("x.tar.gz", gzip.compress(plain_tar())),
        ("x.TGZ", gzip.compress(plain_tar())),
        ("x.tar.bz2", bz2.compress(plain_tar())),
        ("x.tar.xz", lzma.compress(plain_tar())),
        ("x.zip", zip_of()),
    ],
)
def test_files_come_out_as_they_went_in(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    told = []
    assert archives.is_archive(tmp_path / name)
    archives.unpack(tmp_path / name, tmp_path / "into", progress=told.append)
    assert found(tmp_path / "into") == FILES
    assert told == sorted(told)
    assert told[-1] >= sum(map(len, FILES.values()))


@pytest.mark.parametrize("style", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_long_names_and_folders_of_real_tars(tmp_path, style):
    name = "/".join(["longer" * 8] * 6) + "/é"
    with tarfile.open(tmp_path / "x.tar.bz2", "w:bz2", format=style) as archive:
        for member, data in ((f"./{name}", b"data"), ("./empty", None)):
            info = tarfile.TarInfo(member)
            info.type = tarfile.REGTYPE if data else tarfile.DIRTYPE
            info.size = len(data or b"")
            archive.addfile(info, io.BytesIO(data or b""))
    archives.unpack(tmp_path / "x.tar.bz2", tmp_path / "into")
    assert found(tmp_path / "into") == {name: b"data"}
    assert (tmp_path / "into" / "empty").is_dir()


@pytest.mark.parametrize(
    ("suffix", "compress"),
    [
        (".gz", gzip.compress),
        (".bz2", bz2.compress),
        (".xz", lzma.compress),
        (".lzma", lambda data: lzma.compress(data, lzma.FORMAT_ALONE)),
    ],
)
def test_a_single_file_loses_its_suffix_and_a_cut_one_is_refused(tmp_path, suffix, compress):
    data = random.Random(0).randbytes(5000)
    (tmp_path / f"x.sqlite{suffix}").write_bytes(compress(data))
    archives.unpack(tmp_path / f"x.sqlite{suffix}", tmp_path / "into")
    assert found(tmp_path / "into") == {"x.sqlite": data}
    whole = compress(data)
    for number, cut in enumerate((0, 7, len(whole) // 2, len(whole) - 1)):
        place = tmp_path / str(number)
        place.mkdir()
        refused(place, f"x{suffix}", whole[:cut], "is damaged or of another format")


@pytest.mark.parametrize("compress", [None, bz2.compress, gzip.compress, lzma.compress])
def test_a_tar_cut_anywhere_is_refused(tmp_path, compress):
    """Also between two members and inside a header, where tarfile sees a regular end."""
    plain = plain_tar()
    content = compress(plain) if compress else plain
    suffix = {None: "", bz2.compress: ".bz2", gzip.compress: ".gz", lzma.compress: ".xz"}[compress]
    cuts = [0, 100, 512, 1024, 1100, 1536, len(content) // 2, len(content) - 1025]
    if compress:
        cuts = [0, 9, *(len(content) * k // 7 for k in range(1, 7)), len(content) - 1]
    for cut in cuts:
        place = tmp_path / str(cut)
        place.mkdir(exist_ok=True)
        if not list(place.iterdir()):
            refused(place, f"x.tar{suffix}", content[:cut], "is damaged or of another format")


def test_a_zip_cut_anywhere_is_refused(tmp_path):
    content = zip_of()
    for cut in (0, 10, len(content) // 2, len(content) - 1):
        place = tmp_path / str(cut)
        place.mkdir()
        refused(place, "x.zip", content[:cut], "is damaged or of another format")


OUTSIDE = ["../evil", "a/../../evil", "/tmp/evil-fedda", "..\\evil", "C:\\evil", "\\\\host\\evil"]


def unpacked_inside(place, name, content):
    """Unpacks, or refuses, and expects nothing but plain files inside the folder."""
    place.mkdir()
    (place / name).write_bytes(content)
    with contextlib.suppress(InputError):
        archives.unpack(place / name, place / "into")
    assert {path.name for path in place.iterdir()} <= {name, "into"}
    assert not any(path.is_symlink() for path in place.rglob("*"))
    return found(place / "into")


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("kind", ["tar.bz2", "tar", "zip"])
def test_nothing_is_written_outside(tmp_path, name, kind):
    files = {"good": b"g", name: b"evil"}
    content = {"zip": zip_of, "tar": plain_tar}.get(kind, lambda f: bz2.compress(plain_tar(f)))
    inside = unpacked_inside(tmp_path / "place", f"x.{kind}", content(files))
    assert inside["good"] == b"g"
    assert {path.name for path in tmp_path.iterdir()} == {"place"}
    assert not Path("/tmp/evil-fedda").exists()


def test_no_folder_is_made_outside(tmp_path):
    tar = tar_of((header(b"../evil/", 0, b"5"), b""))
    assert unpacked_inside(tmp_path / "tar", "x.tar", tar) == {}
    assert unpacked_inside(tmp_path / "zip", "x.zip", zip_of({"../evil/": b""})) == {}
    assert {path.name for path in tmp_path.iterdir()} == {"tar", "zip"}


@pytest.mark.parametrize(
    ("kind", "link"),
    [(b"2", b".."), (b"1", b"../../secret"), (b"3", b""), (b"4", b""), (b"6", b"")],
    ids=["symlink", "hardlink", "character device", "block device", "pipe"],
)
def test_what_is_not_a_plain_file_is_refused(tmp_path, kind, link):
    """A link to the parent, and then a file through that link."""
    content = tar_of((header(b"link", 0, kind, link), b""), (header(b"link/evil", 4), b"evil"))
    refused(tmp_path, "x.tar", content, "holds 'link', which is not a plain file")


def test_a_symlink_in_a_zip_becomes_no_link(tmp_path):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        link = zipfile.ZipInfo("link")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "..")
        archive.writestr("link/evil", b"evil")
    assert unpacked_inside(tmp_path / "place", "x.zip", buffer.getvalue()) == {"link": b".."}


@pytest.mark.parametrize("names", [("a", "a"), ("a", "a/b"), ("a/b", "a")])
@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_a_file_given_twice_is_one_plain_file(tmp_path, names):
    tar = tar_of(*((header(name.encode(), 1), b"x") for name in names))
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name in names:
            archive.writestr(name, b"x")
    for kind, content in (("tar", tar), ("zip", buffer.getvalue())):
        assert unpacked_inside(tmp_path / kind, f"x.{kind}", content) == {names[0]: b"x"}


@pytest.mark.parametrize("honest", [True, False])
def test_a_zip_bomb_is_refused(tmp_path, honest):
    """50 MB of zeros in 50 kB, declared truly or as 100 bytes, in both of a zip's headers."""
    size = 50 * 10**6
    packer = zlib.compressobj(wbits=-15)
    packed = packer.compress(bytes(size)) + packer.flush()
    declared = size if honest else 100
    facts = struct.pack("<HHHHHIIIHH", 20, 0, 8, 0, 33, 0, len(packed), declared, 4, 0)
    local = b"PK\3\4" + facts + b"bomb" + packed
    central = b"PK\1\2" + struct.pack("<H", 20) + facts + struct.pack("<HHHII", 0, 0, 0, 0, 0)
    central += b"bomb"
    end = b"PK\5\6" + struct.pack("<HHHHIIH", 0, 0, 1, 1, len(central), len(local), 0)
    content = local + central + end
    assert len(content) < 60_000
    words = "more than the 1,000,000 bytes" if honest else "is damaged or of another format"
    refused(tmp_path, "x.zip", content, words, limit_bytes=10**6)
    written = sum(len(data) for data in found(tmp_path / "place" / "into").values())
    assert written <= 10**6


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("x.tar.bz2", bz2.compress(tar_of((header(b"big", 10**7), bytes(10**7))))),
        ("x.bz2", bz2.compress(bytes(10**7))),
        ("x.lzma", lzma.compress(bytes(10**7), lzma.FORMAT_ALONE)),
        ("trailer.tar.gz", gzip.compress(plain_tar() + bytes(10**7))),
    ],
)
def test_too_many_bytes_are_refused_before_they_are_written(tmp_path, name, content):
    refused(tmp_path, name, content, "more than the 1,000,000 bytes", limit_bytes=10**6)
    written = sum(len(data) for data in found(tmp_path / "place" / "into").values())
    assert written <= 10**6


def test_too_many_members_are_refused(tmp_path, monkeypatch):
    assert archives.MEMBERS == 100_000
    monkeypatch.setattr(archives, "MEMBERS", 5)
    names = [f"{k}" for k in range(6)]
    refused(tmp_path, "x.tar", plain_tar(dict.fromkeys(names, b"")), "more than 5 files")
    for number, count in enumerate((5, 6)):
        (tmp_path / str(number)).mkdir()
        content = zip_of(dict.fromkeys(names[:count], b""))
        if count == 6:
            refused(tmp_path / str(number), "x.zip", content, "more than 5 files")
        else:
            (tmp_path / "five.zip").write_bytes(content)
            archives.unpack(tmp_path / "five.zip", tmp_path / "into")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (tar_of((header(b"a", -512), b"")), "is damaged"),
        (tar_of((header(b"h", 10**9, b"x"), bytes(600))), "is damaged"),
        (tar_of((header(b"h", 10**9, b"L"), bytes(600))), "is damaged"),
        (plain_tar()[:1024] + b"?" * 512 + plain_tar()[1536:], "a header is wrong"),
    ],
    ids=["negative size", "endless attributes", "endless name", "overwritten header"],
)
def test_a_tar_that_lies_is_refused(tmp_path, content, words):
    refused(tmp_path, "x.tar", content, words)


@pytest.mark.parametrize("key", ["size", "mtime", "uid", "GNU.sparse.size", "GNU.sparse.realsize"])
@pytest.mark.parametrize("value", ["many", "9" * 5000, "nan", "1e999"])
def test_numbers_in_extended_headers_that_are_none_are_no_traceback(tmp_path, key, value):
    """Such a header is refused, or counts as 0 where nobody asks for it."""
    line = f" {key}={value}\n".encode()
    length = next(n for n in range(len(line), len(line) + 9) if len(str(n)) + len(line) == n)
    extended = str(length).encode() + line
    content = tar_of((header(b"h", len(extended), b"x"), extended), (header(b"a", 5), b"first"))
    (tmp_path / "x.tar").write_bytes(content)
    with contextlib.suppress(InputError):
        archives.unpack(tmp_path / "x.tar", tmp_path / "into")
        assert found(tmp_path / "into") in ({"a": b"first"}, {"a": b""})


@pytest.mark.parametrize("pack", [plain_tar, zip_of])
def test_a_path_that_is_too_deep_is_refused(tmp_path, pack):
    """Python makes a folder within a folder by recursion, and so removes it."""
    with tarfile.open(tmp_path / "deep.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("a/" * 1500 + "b"))
    content = (tmp_path / "deep.tar").read_bytes()
    (tmp_path / "deep.tar").unlink()
    if pack is zip_of:
        refused(
            tmp_path,
            "x.zip",
            zip_of({"a/" * 1500 + "b": b""}),
            "or 100 nested folders",
        )
    else:
        refused(tmp_path, "x.tar", content, "or 100 nested folders")


def test_unusual_zips_are_read_but_not_encrypted_ones(tmp_path):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("a", bytes(10**5))
    (tmp_path / "x.zip").write_bytes(buffer.getvalue())
    archives.unpack(tmp_path / "x.zip", tmp_path / "into")
    assert found(tmp_path / "into") == {"a": bytes(10**5)}
    encrypted = bytearray(zip_of({"a": b"text"}))
    encrypted[6] |= 1  # the flags of the local header, then those of the central one
    encrypted[encrypted.index(b"PK\1\2") + 8] |= 1
    (tmp_path / "z").mkdir()
    refused(tmp_path / "z", "x.zip", bytes(encrypted), "is encrypted")


def test_random_damage_is_a_message_or_harmless(tmp_path):
    rng = random.Random(0)
    whole = {
        "x.tar": plain_tar(),
        "x.tar.bz2": bz2.compress(plain_tar()),
        "x.zip": zip_of(),
        "x.lzma": lzma.compress(plain_tar(), lzma.FORMAT_ALONE),
    }
    outcomes = {True: 0, False: 0}
    for number in range(300):
        name = rng.choice(list(whole))
        content = bytearray(whole[name])
        for _ in range(rng.choice([1, 2, 8])):
            content[rng.randrange(len(content))] = rng.randrange(256)
        place = tmp_path / str(number)
        place.mkdir()
        (place / name).write_bytes(content)
        try:
            archives.unpack(place / name, place / "into", 10**6)
            outcomes[True] += 1
        except InputError:
            outcomes[False] += 1
        assert {path.name for path in place.iterdir()} <= {name, "into"}
    assert min(outcomes.values()) > 20, "both happen, or this proves nothing"
