"""Writing files so that a crash leaves either the old one or the whole new one."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from data_prep.errors import DataPrepError

_CHUNK_BYTES = 1 << 22


def sync_folder(folder: Path) -> None:
    """Make renames inside `folder` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


@contextlib.contextmanager
def telling_a_full_disk(folder: Path) -> Iterator[None]:
    """Raise DataPrepError, which says what to do, where the disk of `folder` fills up."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DataPrepError(
            f"{folder}: the disk is full; what is finished is kept: make room and run the same "
            "command again"
        ) from error


def check_room(folder: Path, needed_bytes: int, advice: str) -> None:
    """Raise DataPrepError, with advice, where the disk of `folder` has less room than is needed."""
    free = shutil.disk_usage(folder).free
    if needed_bytes > free:
        raise DataPrepError(
            f"{folder}: about {needed_bytes / 1e9:.3g} GB are needed and {free / 1e9:.3g} GB are "
            f"free; make room, or {advice}"
        )


def write_text(path: Path, text: str, scratch: Path | None = None) -> None:
    """Replace `path` atomically, by way of a file in `scratch` (default: beside it)."""
    fresh = (scratch or path.parent) / f"{path.name}.{os.getpid()}.tmp"
    with fresh.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    sync_folder(path.parent)


def write_json(path: Path, value: object, scratch: Path | None = None) -> None:
    write_text(path, json.dumps(value, indent=1, ensure_ascii=False) + "\n", scratch)


def read_json(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def sha256_of(path: Path, advance: Callable[[int], None] = lambda _: None) -> str:
    """Hash of a file; `advance` is told the bytes of each piece."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            advance(len(chunk))
    return digest.hexdigest()


def json_line(value: object) -> str:
    return json.dumps(value, ensure_ascii=False) + "\n"
