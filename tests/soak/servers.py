"""Download servers on this machine that misbehave in several ways at once."""

import hashlib
import os
import random
import shutil
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedda.data import download
from fedda.errors import InputError
from helpers.downloads import Server

CONTENT = random.Random(1).randbytes(50_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()
TIMEOUT = 0.3  # seconds without a byte
HEADS = [
    b"",
    b"HTTP/1.1 200 OK\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\n",
    b"HTTP/1.1 206 X\r\nContent-Range: bytes 0-\r\n\r\n",
    b"HTTP/1.1 206 X\r\nContent-Range: bytes 99-1/2\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n",
    b"HTTP/1.1 416 X\r\nContent-Range: bytes */0\r\n\r\n",
    b"HTTP/1.1 999 \xff\r\n\r\n",
    b"HTTP/9.9 OK\r\n\r\n",
    b"220 ftp\r\n",
    b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 1000,
    b"HTTP/1.1 200 OK\r\n" + b"A" * 100_000,
    b"HTTP/1.1 302 X\r\nLocation: file:///etc/passwd\r\n\r\n",
    b"HTTP/1.1 302 X\r\nLocation: //[::\r\n\r\n",
    b"HTTP/1.1 302 X\r\nLocation: ftp://127.0.0.1/a\r\n\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n" * 50,
]


def misbehaviour(draw: random.Random) -> dict[str, Any]:
    ways: dict[str, Any] = {
        "cut_after": draw.choice([0, 1, draw.randrange(50_000)]),
        "ranges": False,
        "status": draw.choice([204, 301, 304, 403, 404, 416, 429, 500, 503]),
        "pause": draw.choice([0.01, 1.0]),
        "slow": 0.02,
        "range_shift": draw.choice([-1, 1, 10_000]),
        "redirect": draw.choice(["/other", "file:///etc/passwd", "http://127.0.0.1:9/a", "//", ""]),
        "length": False,
        "says": draw.choice(["0", "-1", "x", "10", "9" * 30]),
        "content": draw.choice([b"", CONTENT[:-1], CONTENT + b"x", draw.randbytes(50_000)]),
    }
    return {name: ways[name] for name in draw.sample(list(ways), draw.randint(1, 3))}


@contextmanager
def serving(server: Any) -> Iterator[Any]:
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.over.set()
            server.shutdown()
            thread.join()


@contextmanager
def raw(answer: bytes) -> Iterator[str]:
    """A server that sends these bytes to whoever comes."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.settimeout(5)

        def serve() -> None:
            for _ in range(12):  # redirects come again
                try:
                    client, _ = listening.accept()
                    with client:
                        client.settimeout(1)
                        client.recv(65536)
                        client.sendall(answer)
                except OSError:
                    return

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}/folder/file.bin"
        finally:
            listening.shutdown(socket.SHUT_RDWR)
            thread.join()


def prepare(folder: Path, name: str) -> Callable[[int], Counter[str]]:
    place = folder / "downloads"

    def once(url: str) -> bool:
        try:
            path = download.download(url, place, SHA256, timeout=TIMEOUT)
        except InputError:
            assert not (place / "file.bin").exists()
            return False
        assert path.read_bytes() == CONTENT
        return True

    def attempt(seed: int) -> Counter[str]:
        draw = random.Random(seed)
        shutil.rmtree(place, ignore_errors=True)
        tries = draw.randint(1, 3)
        for _ in range(tries):
            if draw.random() < 0.4:
                head = draw.choice(HEADS)
                if draw.random() < 0.5 and head:
                    damaged = bytearray(head)
                    damaged[draw.randrange(len(head))] = draw.randrange(256)
                    head = bytes(damaged)
                with raw(head + draw.choice([b"", CONTENT[:100], CONTENT])) as url:
                    done = once(url)
            else:
                server = Server()
                server.content = CONTENT
                vars(server).update(misbehaviour(draw))
                with serving(server):
                    done = once(server.url)
            if done:
                break
        if not (place / "file.bin").exists():  # an honest server finishes what they began
            server = Server()
            server.content = CONTENT
            with serving(server):
                assert once(server.url) or once(server.url)  # a wrong beginning is deleted first
        assert os.listdir(place) == ["file.bin"]
        return Counter(downloads=tries)

    return attempt
