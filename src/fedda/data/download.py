"""Download files over HTTP: the only network code of the package.

A file grows as `NAME.part` and gets its name when it is whole and its checksum is right. A download
that was cut off continues where it ended, if the server still has the same file.
"""

import hashlib
import http.client
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from fedda.errors import InputError, is_full

Progress = Callable[[int, int | None], None]  # bytes so far, and of the whole if that is known

_CHUNK = 1 << 16


def download(
    url: str,
    into: Path,
    checksum: str,
    progress: Progress = lambda done, total: None,
    timeout: float = 30.0,
) -> Path:
    """Download a file into a folder, unless it is there already.

    Args:
        url: An address that begins with http:// or https:// and ends in the name of the file.
        into: The folder. It is made if it does not exist.
        checksum: The digest of the file, such as "sha256:0a1b...".
        progress: Called with the bytes so far and, if it is known, the size of the file.
        timeout: The longest time without a byte, in seconds.

    Returns:
        The path of the file.

    Raises:
        InputError: The file could not be downloaded, or its checksum is another one.
    """
    name = file_name(url)
    target, part = into / name, into / f"{name}.part"
    if target.exists() and _digest(target, checksum) == checksum:
        return target
    into.mkdir(parents=True, exist_ok=True)
    try:
        _fill(part, url, progress, timeout)
    except (OSError, http.client.HTTPException, ValueError) as error:
        if isinstance(error, OSError) and (is_full(error) or error.filename):
            raise  # the problem is here, not there
        have = _size(part)
        kept = f" The first {have:,} bytes are kept: the same command continues from there."
        reason = str(getattr(error, "reason", error)).rstrip(".") or type(error).__name__
        raise InputError(f"could not download {url}: {reason}.{kept if have else ''}") from None
    if (digest := _digest(part, checksum)) != checksum:
        _forget(part)
        raise InputError(
            f"{url} is not the file expected: its checksum is {digest} instead of {checksum}. "
            "What was downloaded was deleted."
        )
    os.replace(part, target)
    _forget(part)
    return target


def file_name(url: str) -> str:
    """Return the last part of an address, if it is one of a file that can be downloaded."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise InputError(f"{url!r} is not an address: {error}.") from None
    name = unquote(parts.path.rpartition("/")[2])
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise InputError(f"expected an address that begins with http:// or https://, got {url!r}.")
    if not name.strip(".") or re.search(r"[/\\:\0]", name):
        raise InputError(f"expected an address that ends in the name of a file, got {url!r}.")
    return name


def mirrored(url: str, base: str) -> str:
    """Return the address of the same file below another address."""
    return f"{base.rstrip('/')}/{file_name(url)}"


def _fill(part: Path, url: str, progress: Progress, timeout: float) -> None:
    """Download from where `part` ends to the end. The checksum tells if the halves fit."""
    have = _size(part)
    headers = {"Accept-Encoding": "identity"}  # so that bytes of the file are counted
    if have:
        headers["Range"] = f"bytes={have}-"
        if version := _seen_version(part, url):
            headers["If-Range"] = version
    request = urllib.request.Request(url, headers=headers)
    try:
        response = urllib.request.build_opener().open(request, timeout=timeout)
    except urllib.error.HTTPError as error:
        response = error
    with response:
        begin, total = _range(response.headers)
        if response.status == 416 and have and have == total:  # range not satisfiable: it is whole
            return
        if have and (response.status == 416 or (response.status == 206 and begin != have)):
            _forget(part)
            return _fill(part, url, progress, timeout)
        if response.status == 200:
            have, total = 0, response.length
            part.write_bytes(b"")
            _remember_version(part, url, response.headers)
        elif response.status != 206 or begin != have:
            raise ConnectionError(f"the server answered {response.status} {response.reason}")
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


def _range(headers: Any) -> tuple[int | None, int | None]:
    """Where a part begins and how long the whole is: `bytes 5-9/10`, or `bytes */10`."""
    number = "[0-9]{1,18}"
    match = re.fullmatch(
        rf"bytes (?:({number})-{number}|\*)/(?:({number})|\*)",
        headers.get("Content-Range", "").strip(),
    )
    begin, total = match.groups() if match else (None, None)
    return int(begin) if begin else None, int(total) if total else None


def _version_file(part: Path) -> Path:
    return part.with_name(f"{part.name}.from")


def _remember_version(part: Path, url: str, headers: Any) -> None:
    tag = headers.get("ETag", "")
    version = tag if tag.startswith('"') else headers.get("Last-Modified", "")  # no weak tags
    _version_file(part).write_text(f"{url}\n{version}", encoding="utf-8")


def _seen_version(part: Path, url: str) -> str:
    """How the server named the version of the file of which `part` is the beginning."""
    file = _version_file(part)
    seen_url, _, version = (file.read_text("utf-8") if file.exists() else "").partition("\n")
    return version if seen_url == url else ""


def _forget(part: Path) -> None:
    part.unlink(missing_ok=True)
    _version_file(part).unlink(missing_ok=True)


def _size(file: Path) -> int:
    return file.stat().st_size if file.exists() else 0


def _digest(path: Path, checksum: str) -> str:
    kind = checksum.partition(":")[0]
    with open(path, "rb") as file:
        return f"{kind}:{hashlib.file_digest(file, kind).hexdigest()}"
