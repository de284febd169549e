"""Download files over HTTP: the only network code of the package.

A file is written as `NAME.part` and renamed when it is complete and its checksum is right. An
interrupted download continues where it stopped. The checksum shows whether the parts fit together.
"""

import http.client
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from urllib.parse import unquote, urlsplit

from fedda.data.store import sha256
from fedda.errors import InputError, is_full

Progress = Callable[[int, int | None], None]  # the bytes so far, and in total if known

_CHUNK = 1 << 16


def download(
    url: str,
    into: Path,
    checksum: str,
    progress: Progress = lambda done, total: None,
    timeout: float = 30.0,
) -> Path:
    """Download a file into a folder, unless it already exists there.

    Args:
        url: An address that begins with http:// or https:// and ends in the name of the file.
        into: The folder. It is created if it does not exist.
        checksum: The SHA-256 of the file in hexadecimal digits.
        progress: Called with the bytes so far, and the size of the file or None.
        timeout: The longest time without a byte, in seconds.

    Returns:
        The path of the file.

    Raises:
        InputError: The file could not be downloaded, or its checksum is wrong.
    """
    name = file_name(url)
    target, part = into / name, into / f"{name}.part"
    if target.exists() and sha256(target) == checksum:
        return target
    into.mkdir(parents=True, exist_ok=True)
    try:
        _fill(part, url, progress, timeout)
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, OSError) and (is_full(error) or error.filename):
            raise  # an error of this machine, not of the server
        have = _size(part)
        kept = f" The first {have:,} bytes are kept. The same command continues from there."
        reason = str(getattr(error, "reason", error)).rstrip(".") or type(error).__name__
        raise InputError(f"could not download {url}: {reason}.{kept if have else ''}") from None
    if (digest := sha256(part)) != checksum:
        part.unlink()
        raise InputError(
            f"{url} is not the expected file: its checksum is {digest} instead of {checksum}. "
            "The download was deleted. The same command downloads it again."
        )
    os.replace(part, target)
    return target


def file_name(url: str) -> str:
    """Return the name of the file at an address. Other addresses are refused."""
    try:
        parts = urlsplit(url)
    except ValueError:  # such as http://[broken/file
        parts = urlsplit("")
    name = unquote(parts.path.rpartition("/")[2])
    usable = parts.scheme in ("http", "https") and parts.netloc and name.strip(".")
    if not usable or re.search(r"[/\\:\0]", name):
        raise InputError(f"expected an address such as https://host/folder/file, got {url!r}.")
    return name


def _fill(part: Path, url: str, progress: Progress, timeout: float) -> None:
    """Download the rest of a file that `part` begins."""
    have = _size(part)
    headers = {"Accept-Encoding": "identity"}  # bytes on the wire are bytes of the file
    if have:
        headers["Range"] = f"bytes={have}-"
    request = urllib.request.Request(url, headers=headers)
    try:
        response = urllib.request.build_opener().open(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        response = error
    with response:
        if response.status == 416 and have:  # the file has no more bytes
            return
        fits = response.headers.get("Content-Range", "").startswith(f"bytes {have}-")
        if response.status == 206 and have and not fits:
            part.unlink()
            return _fill(part, url, progress, timeout)
        if response.status == 200:
            have = 0
            part.write_bytes(b"")
        elif response.status != 206 or not fits:
            raise ConnectionError(f"the server answered {response.status} {response.reason}")
        total = None if response.length is None else have + response.length
        with open(part, "ab") as file:
            progress(have, total)
            while data := response.read(_CHUNK):
                file.write(data)
                have += len(data)
                progress(have, total)
            file.flush()
            os.fsync(file.fileno())
    if total is not None and have != total:
        raise ConnectionError(f"the connection ended after {have:,} of {total:,} bytes")


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0
