"""A download server on this machine that misbehaves in the ways servers do."""

import contextlib
import hashlib
import http.server
import random
import threading
from collections.abc import Iterator

import pytest

CONTENT = random.Random(0).randbytes(300_000)
SHA256 = hashlib.sha256(CONTENT).hexdigest()
HALF = 150_000


class Server(http.server.ThreadingHTTPServer):
    """Serves one file at every path; a test sets how."""

    daemon_threads = True
    content = CONTENT
    ranges = True
    cut_after: int | None = None  # bytes, then the connection ends
    status = 200
    pause = 0.0  # before the first byte
    slow = 0.0  # before every 10,000 bytes
    range_shift = 0
    redirect = ""
    length = True
    says: str | None = None  # instead of a number of bytes

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.over = threading.Event()  # what is left to wait for is not waited for
        self.asked: list[dict[str, str]] = []
        self.sent = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/folder/file.bin"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *words: object) -> None:
        pass

    def do_GET(self) -> None:
        server = self.server
        server.asked.append(dict(self.headers))
        if server.redirect and self.path.startswith("/folder"):
            self.send_response(302)
            self.send_header("Location", server.redirect)
            self.end_headers()
            return
        if server.status != 200:
            self.send_error(server.status)
            return
        server.over.wait(server.pause)
        begin, whole = 0, len(server.content)
        wanted = self.headers.get("Range")
        if wanted and server.ranges:
            begin = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if begin >= whole:
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{whole}")
                self.end_headers()
                return
            begin += server.range_shift
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {begin}-{whole - 1}/{server.says or whole}")
        else:
            self.send_response(200)
        body = server.content[begin:]
        if server.length:
            self.send_header("Content-Length", server.says or str(len(body)))
        self.end_headers()
        body = body[: server.cut_after]
        with contextlib.suppress(ConnectionError):
            for start in range(0, len(body), 10_000):
                server.over.wait(server.slow)
                self.wfile.write(body[start : start + 10_000])
                server.sent += len(body[start : start + 10_000])


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield running
        running.over.set()
        running.shutdown()
        thread.join()
