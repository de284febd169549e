"""Downloads over HTTP, the only network code of the package.

A file grows as `NAME.part` and gets its name when it is whole and its checksum is right. What was
cut off goes on where it ended, if the server still has the same file.
"""

import hashlib
import http.client
import json
import os
import re
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from fedda.errors import InputError

Progress = Callable[[int, int | None], None]  # bytes so far, and of the whole if that is known

_CHUNK = 1 << 16
_NUMBER = "[0-9]{1,18}"  # of bytes, as a server writes it


def download(
    url: str,
    into: Path,
    checksum: str,
    progress: Progress = lambda done, total: None,
    timeout: float = 30.0,
) -> Path:
    """The file of a URL, in a folder: downloaded unless it is there already.

    `checksum` is like "sha256:0a1b...". `timeout`: seconds without a byte.
    """
    name = file_name(url)
    target, part = into / name, into / f"{name}.part"
    if target.exists() and _digest(target, checksum) == checksum:
        return target
    into.mkdir(parents=True, exist_ok=True)
    _fill(part, url, progress, timeout)
    if (found := _digest(part, checksum)) != checksum:
        _forget(part)
        raise InputError(
            f"{url} is not the file expected: its checksum is {found} instead of {checksum}. "
            "What was downloaded was deleted."
        )
    os.replace(part, target)
    _forget(part)
    return target


def file_name(url: str) -> str:
    """The last part of an address, if it is one of a file that can be downloaded."""
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
    """The same file below another address."""
    return f"{base.rstrip('/')}/{file_name(url)}"


def _fill(part: Path, url: str, progress: Progress, timeout: float) -> None:
    """Downloads to the end, from where `part` ends: the checksum tells if the halves fit."""
    have = part.stat().st_size if part.exists() else 0
    version = _seen_version(part, url)
    headers = {"Accept-Encoding": "identity"}  # so that bytes of the file are counted
    if have:
        headers["Range"] = f"bytes={have}-"
        if version:
            headers["If-Range"] = version
    try:
        response = _open(url, headers, timeout)
    except urllib.error.HTTPError as error:
        error.close()
        # 416, range not satisfiable: nothing is left to send, or the file has changed.
        if error.code != 416 or "Range" not in headers:
            raise _failed(url, f"the server answered {error.code} {error.reason}") from None
        if _range(error.headers)[1] == have:
            return
        _forget(part)
        return _fill(part, url, progress, timeout)
    with response:
        if response.status == 206:
            begin, total = _range(response.headers)
            if begin != have:
                if "Range" not in headers:
                    raise _failed(url, "the server sent a part of the file instead of all of it")
                _forget(part)
                return _fill(part, url, progress, timeout)
        else:
            length = response.headers.get("Content-Length", "")
            have, total = 0, int(length) if re.fullmatch(_NUMBER, length) else None
            part.write_bytes(b"")
            _remember_version(part, url, response.headers)
        with open(part, "ab") as file:
            progress(have, total)
            while data := _read(response, url, have):
                file.write(data)
                have += len(data)
                progress(have, total)
            file.flush()
            os.fsync(file.fileno())
    if total is not None and have != total:
        raise _failed(url, f"the connection ended after {have:,} of {total:,} bytes", have)


def _opener() -> urllib.request.OpenerDirector:
    """HTTP and its redirections; no other scheme, to which a server could send us."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler,
        urllib.request.UnknownHandler,
        urllib.request.HTTPHandler,
        urllib.request.HTTPSHandler,
        urllib.request.HTTPRedirectHandler,
        urllib.request.HTTPErrorProcessor,
        urllib.request.HTTPDefaultErrorHandler,
    ):
        opener.add_handler(handler())
    return opener


def _open(url: str, headers: dict[str, str], timeout: float) -> Any:
    try:
        return _opener().open(urllib.request.Request(url, headers=headers), timeout=timeout)
    except urllib.error.HTTPError:
        raise
    except urllib.error.URLError as error:
        raise _failed(url, error.reason) from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise _failed(url, error) from None


def _read(response: Any, url: str, have: int) -> bytes:
    try:
        return response.read(_CHUNK)
    except (OSError, http.client.HTTPException) as error:
        raise _failed(url, error, have) from None


def _failed(url: str, why: object, have: int = 0) -> InputError:
    kept = f" The first {have:,} bytes are kept: the same command goes on from there."
    reason = str(why).rstrip(".") or type(why).__name__
    return InputError(f"could not download {url}: {reason}.{kept if have else ''}")


def _range(headers: Any) -> tuple[int | None, int | None]:
    """Where a part begins and how long the whole is: `bytes 5-9/10`, or `bytes */10`."""
    found = re.fullmatch(
        rf"bytes (?:({_NUMBER})-{_NUMBER}|\*)/(?:({_NUMBER})|\*)",
        headers.get("Content-Range", "").strip(),
    )
    begin, total = found.groups() if found else (None, None)
    return int(begin) if begin else None, int(total) if total else None


def _version_file(part: Path) -> Path:
    return part.with_name(f"{part.name}.from")


def _remember_version(part: Path, url: str, headers: Any) -> None:
    tag = headers.get("ETag", "")
    version = tag if tag.startswith('"') else headers.get("Last-Modified", "")  # no weak tags
    _version_file(part).write_text(json.dumps([url, version]), encoding="utf-8")


def _seen_version(part: Path, url: str) -> str:
    """What the server called the file of which `part` is the beginning."""
    try:
        seen_url, version = json.loads(_version_file(part).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return ""
    return version if seen_url == url else ""


def _forget(part: Path) -> None:
    part.unlink(missing_ok=True)
    _version_file(part).unlink(missing_ok=True)


def _digest(path: Path, checksum: str) -> str:
    kind = checksum.partition(":")[0]
    with open(path, "rb") as file:
        return f"{kind}:{hashlib.file_digest(file, kind).hexdigest()}"
