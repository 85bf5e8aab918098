"""`download`: fetch a list of files so that each is there whole, or is named as missing.

A file is written to `<name>.part`, taken up with a Range request after a break, checked against the
server's length (and MD5, where its ETag is one), and only then given its name.
"""

import concurrent.futures
import hashlib
import http.client
import re
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

from data_prep import files
from data_prep.errors import DataError
from data_prep.lock import Lock
from data_prep.progress import Reporter

_CHUNK_BYTES = 1 << 18
_TIMEOUT_SECONDS = 60
_RETRIED = {408, 425, 429, 500, 502, 503, 504}
_MD5 = re.compile(r'"([0-9a-f]{32})"')


@dataclass(frozen=True)
class Server:
    """Where the files are, and how patient to be with it."""

    base: str  # address that the list's paths are relative to
    attempts: int = 8  # in a row without a single new byte
    pause_seconds: float = 1.0  # doubles with each such attempt

    def address(self, name: str) -> str:
        return f"{self.base.rstrip('/')}/{urllib.parse.quote(name)}"


class _Broken(Exception):
    """A try that may be repeated."""


@dataclass
class _Fetched:
    lock: threading.Lock = field(default_factory=threading.Lock)
    missing: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


def fetch_all(
    names: list[str], server: Server, folder: Path, reporter: Reporter, connections: int = 4
) -> int:
    """Fetch all `names` below `folder`; returns how many were not there before.

    Raises:
        UsageError: another process fetches into `folder`. DataPrepError: the disk is full.
        DataError: names what is missing on the server, or could not be fetched whole.
    """
    lock = folder / ".download.lock"
    with Lock(lock, folder), files.telling_a_full_disk(folder):
        try:
            return _fetch_all(names, server, folder, reporter, connections)
        finally:
            lock.unlink()


def _fetch_all(
    names: list[str], server: Server, folder: Path, reporter: Reporter, connections: int
) -> int:
    wanted = [name for name in names if not (folder / name).is_file()]
    reporter.phase("download", max(len(wanted), 1))
    found = _Fetched()

    def one(name: str) -> None:
        try:
            fetch(name, server, folder)
        except FileNotFoundError:
            found.missing.append(name)
        except DataError as error:
            found.failed.append(str(error))
        with found.lock:
            reporter.advance(1)

    with concurrent.futures.ThreadPoolExecutor(connections) as pool:
        list(pool.map(one, wanted))
    if found.missing:
        shown = ", ".join(sorted(found.missing)[:3])
        raise DataError(
            f"{len(found.missing)} of {len(names)} listed files are not at {server.base}: {shown}"
        )
    if found.failed:
        raise DataError(
            f"{len(found.failed)} files could not be fetched: {sorted(found.failed)[0]}"
        )
    return len(wanted)


def fetch(name: str, server: Server, folder: Path) -> None:
    """Fetch one file, taking up what an earlier try left.

    Raises:
        FileNotFoundError: the server has no such file. DataError: it could not be fetched whole.
    """
    target = folder / name
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(target.name + ".part")
    idle = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            tag = _go_on(server.address(name), part, before)
            break
        except _Broken as error:
            grown = part.exists() and part.stat().st_size > before
            idle = 0 if grown else idle + 1
            if idle >= server.attempts:
                raise DataError(
                    f"{name}: gave up after {idle} tries without a byte: {error}"
                ) from error
            time.sleep(server.pause_seconds * (2**idle - 1))
    if tag and (md5 := _MD5.fullmatch(tag)) and _md5_of(part) != md5.group(1):
        part.unlink()
        raise DataError(f"{name}: what was fetched is not what the server has (MD5 differs)")
    files.sync_file(part)
    part.replace(target)
    files.sync_folder(target.parent)


def _go_on(address: str, part: Path, before: int) -> str | None:
    """One request; appends to `part` until the file is whole. Returns its ETag.

    The ETag is kept beside the part: bytes of two versions of a file must not be joined.
    """
    tag_path = part.with_name(part.name + ".etag")
    tag = tag_path.read_text() if tag_path.exists() else ""
    headers = {"Range": f"bytes={before}-", "If-Range": tag} if before and tag else {}
    with _opened(urllib.request.Request(address, headers=headers), part) as response:
        taken_up = response.status == 206
        tag = response.headers.get("ETag") or ""
        tag_path.write_text(tag)
        size = _whole_size(response, taken_up)
        with part.open("ab" if taken_up else "wb") as file:
            while chunk := _read(response):
                file.write(chunk)
    if size is not None and part.stat().st_size != size:
        raise _Broken(f"{part.stat().st_size} of {size} bytes came")
    tag_path.unlink()
    return tag


def _opened(request: urllib.request.Request, part: Path) -> http.client.HTTPResponse:
    """The server's answer. A `part` that is longer than the file is deleted."""
    address = request.full_url
    try:
        return urllib.request.urlopen(request, timeout=_TIMEOUT_SECONDS)
    except urllib.error.HTTPError as error:
        if error.code in (403, 404, 410):  # object stores say 403 for what is not there
            raise FileNotFoundError(address) from error
        if error.code == 416:
            part.unlink()
        elif error.code not in _RETRIED:
            raise DataError(f"{address}: the server answers {error.code} {error.reason}") from error
        raise _Broken(f"{error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise _Broken(str(error) or type(error).__name__) from error


def _read(response: http.client.HTTPResponse) -> bytes:
    """The next bytes; what breaks here is the network, and what breaks elsewhere the disk."""
    try:
        return response.read(_CHUNK_BYTES)
    except (OSError, http.client.HTTPException) as error:
        raise _Broken(str(error) or type(error).__name__) from error


def _whole_size(response: http.client.HTTPResponse, taken_up: bool) -> int | None:
    if taken_up:
        whole = response.headers.get("Content-Range", "").rpartition("/")[2]
        return int(whole) if whole.isdecimal() else None
    length = response.headers.get("Content-Length")
    return int(length) if length else None


def _md5_of(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()
