"""Downloads from a real server on this machine, which misbehaves in the ways servers do."""

import hashlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fedda.data import download
from fedda.errors import InputError
from helpers.downloads import CONTENT, HALF, SHA256, Server


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def cut_in_half(server: Server, into: Path) -> None:
    server.cut_after = HALF
    with pytest.raises(InputError, match="ended after 150,000 of 300,000 bytes"):
        download.download(server.url, into, SHA256)
    assert (into / "file.bin.part").read_bytes() == CONTENT[:HALF]
    assert not (into / "file.bin").exists()
    server.cut_after = None
    server.asked.clear()
    server.sent = 0


def test_a_file_is_downloaded_once(server, tmp_path):
    told = []
    into = tmp_path / "new" / "folder"
    path = download.download(server.url, into, SHA256, lambda *each: told.append(each))
    assert path == into / "file.bin"
    assert path.read_bytes() == CONTENT
    assert told[0] == (0, 300_000)
    assert told[-1] == (300_000, 300_000)
    assert download.download(server.url, into, SHA256) == path
    assert len(server.asked) == 1
    assert names(into) == {"file.bin"}, "nothing else is left"


def test_a_file_that_is_there_but_wrong_is_downloaded_again(server, tmp_path):
    (tmp_path / "file.bin").write_bytes(CONTENT[:-1])
    assert download.download(server.url, tmp_path, SHA256).read_bytes() == CONTENT


def test_only_the_rest_is_asked_for(server, tmp_path):
    cut_in_half(server, tmp_path)
    told = []
    path = download.download(server.url, tmp_path, SHA256, lambda *each: told.append(each))
    assert path.read_bytes() == CONTENT
    (asked,) = server.asked
    assert asked["Range"] == f"bytes={HALF}-"
    assert server.sent == len(CONTENT) - HALF
    assert told[0] == (HALF, len(CONTENT))
    assert names(tmp_path) == {"file.bin"}


@pytest.mark.parametrize("change", ["no ranges", "wrong range"])
def test_where_the_rest_cannot_be_had_it_starts_over(server, tmp_path, change):
    cut_in_half(server, tmp_path)
    server.ranges = change != "no ranges"
    server.range_shift = 7 if change == "wrong range" else 0
    assert download.download(server.url, tmp_path, SHA256).read_bytes() == CONTENT
    assert server.asked[0]["Range"] == f"bytes={HALF}-"
    assert server.sent >= len(CONTENT)


def test_another_mirror_goes_on_where_the_first_ended(server, tmp_path):
    cut_in_half(server, tmp_path)
    other = server.url.replace("/folder/", "/elsewhere/")
    assert download.download(other, tmp_path, SHA256).read_bytes() == CONTENT
    assert server.sent == len(CONTENT) - HALF


def test_a_part_that_is_whole_or_too_long(server, tmp_path):
    """Killed before the renaming; or of a longer file: the server answers 416 to both."""
    part = tmp_path / "file.bin.part"
    part.write_bytes(CONTENT)
    assert download.download(server.url, tmp_path, SHA256).read_bytes() == CONTENT
    (tmp_path / "file.bin").unlink()
    part.write_bytes(CONTENT + b"more")
    with pytest.raises(InputError, match=r"was deleted\. The same command downloads it again"):
        download.download(server.url, tmp_path, SHA256)
    assert download.download(server.url, tmp_path, SHA256).read_bytes() == CONTENT


@pytest.mark.parametrize("resumed", [False, True])
def test_wrong_bytes_are_deleted_and_told(server, tmp_path, resumed):
    if resumed:
        cut_in_half(server, tmp_path)
    server.content = CONTENT[:-1] + b"?"
    found = hashlib.sha256(server.content).hexdigest()
    with pytest.raises(InputError, match=f"{found} instead of {SHA256}. The download was") as error:
        download.download(server.url, tmp_path, SHA256)
    assert server.url in str(error.value)
    assert names(tmp_path) == set()


@pytest.mark.parametrize("status", [404, 500, 403, 416])
def test_an_answer_that_is_an_error(server, tmp_path, status):
    server.status = status
    with pytest.raises(InputError, match=rf"could not download {server.url}.*answered {status} "):
        download.download(server.url, tmp_path, SHA256)
    assert names(tmp_path) == set()


def test_an_error_while_resuming_keeps_the_part(server, tmp_path):
    cut_in_half(server, tmp_path)
    server.status = 503
    with pytest.raises(InputError, match="answered 503"):
        download.download(server.url, tmp_path, SHA256)
    assert (tmp_path / "file.bin.part").read_bytes() == CONTENT[:HALF]


@pytest.mark.parametrize("when", ["pause", "slow"])
def test_a_server_that_hangs(server, tmp_path, when):
    setattr(server, when, 60.0)
    began = time.monotonic()
    with pytest.raises(InputError, match="timed out"):
        download.download(server.url, tmp_path, SHA256, timeout=0.2)
    assert time.monotonic() - began < 30


def test_a_slow_server_is_waited_for(server, tmp_path):
    """Longer than the time limit in all, never longer without a byte."""
    server.slow = 0.06  # 1.8 s in all
    assert download.download(server.url, tmp_path, SHA256, timeout=1.5).read_bytes() == CONTENT


def test_no_length_and_cut_is_found_by_the_checksum(server, tmp_path):
    server.length, server.cut_after = False, HALF
    with pytest.raises(InputError, match="is not the expected file"):
        download.download(server.url, tmp_path, SHA256)
    assert names(tmp_path) == set()


@pytest.mark.parametrize("says", ["9" * 5000, "many", "-5"])
def test_a_length_that_is_no_number_of_bytes(server, tmp_path, says):
    """A number of more than 4,300 digits is an error of its own to Python."""
    cut_in_half(server, tmp_path / "other")
    server.says = says
    for folder in ("new", "other"):  # a part cannot be continued, so the file comes as a whole
        assert download.download(server.url, tmp_path / folder, SHA256).read_bytes() == CONTENT


def test_no_server_and_no_such_host(tmp_path):
    with socket.socket() as closed:  # bound but not listening: connections are refused
        closed.bind(("127.0.0.1", 0))
        with pytest.raises(InputError, match="Connection refused"):
            download.download(f"http://127.0.0.1:{closed.getsockname()[1]}/a.bin", tmp_path, SHA256)
    with pytest.raises(InputError, match=r"could not download http://nowhere.invalid/a.bin: "):
        download.download("http://nowhere.invalid/a.bin", tmp_path, SHA256)
    assert names(tmp_path) == set()


def test_a_server_that_speaks_another_protocol(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"220 welcome to something else\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        port = listening.getsockname()[1]
        with pytest.raises(InputError, match="could not download"):
            download.download(f"http://127.0.0.1:{port}/a.bin", tmp_path, SHA256)
        thread.join()


def test_redirections_are_followed_but_not_to_files(server, tmp_path):
    server.redirect = server.url.replace("/folder/", "/elsewhere/")
    assert download.download(server.url, tmp_path, SHA256).read_bytes() == CONTENT
    server.redirect = "file:///etc/passwd"
    with pytest.raises(InputError, match="not allowed"):
        download.download(server.url, tmp_path / "other", SHA256)


@pytest.mark.parametrize(
    "url",
    [
        "file:///etc/passwd",
        "ftp://host/a",
        "host/a.bin",
        "https:///a.bin",
        "http://host/",
        "http://host/..",
        "http://host/a%2Fb",
        "http://[broken/a",
        "",
    ],
)
def test_addresses_that_are_refused(tmp_path, url):
    with pytest.raises(InputError, match="address"):
        download.download(url, tmp_path / "into", SHA256)
    assert names(tmp_path) == set()


def test_a_space_in_an_address_is_a_message(tmp_path):
    with pytest.raises(InputError, match="could not download"):
        download.download("http://127.0.0.1/a b/c.bin", tmp_path, SHA256)


def test_a_killed_download_goes_on(server, tmp_path):
    server.slow = 0.2  # 6 s in all
    command = (
        "import sys; from pathlib import Path; from fedda.data import download; "
        "download.download(sys.argv[1], Path(sys.argv[2]), sys.argv[3])"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", command, server.url, str(tmp_path), SHA256],
        env=os.environ | {"no_proxy": "*"},
    )
    part = tmp_path / "file.bin.part"
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and not (part.exists() and part.stat().st_size > 65_000):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    kept = part.stat().st_size
    assert 65_000 < kept < len(CONTENT)
    assert part.read_bytes() == CONTENT[:kept]
    server.slow = 0
    server.asked.clear()
    assert download.download(server.url, tmp_path, SHA256).read_bytes() == CONTENT
    assert [asked["Range"] for asked in server.asked] == [f"bytes={kept}-"]
    assert names(tmp_path) == {"file.bin"}
