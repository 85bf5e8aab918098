"""The list of a checkpoint's files with their SHA-256, which carries its own digest."""

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_ext.errors import DataError

NAME = "manifest.json"
FORMAT = 2


@dataclass(frozen=True)
class FileRecord:
    """What a file must be."""

    bytes: int
    sha256: str  # hexadecimal


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is, and every file in it."""

    about: dict[str, Any]
    """Plain data: step, layout, …"""
    files: dict[str, FileRecord]
    """By path relative to the checkpoint's folder, with forward slashes."""

    @property
    def total_bytes(self) -> int:
        """Size of all files."""
        return sum(record.bytes for record in self.files.values())


def record(path: Path) -> FileRecord:
    """Size and SHA-256 of a file, in one pass over it."""
    with path.open("rb", buffering=0) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileRecord(file.tell(), digest)


def write(folder: Path, manifest: Manifest) -> None:
    """Write the manifest and force it to the disk."""
    write_durably(folder / NAME, _render(manifest))


def read(folder: Path) -> Manifest:
    """Read and check the manifest of a checkpoint.

    Raises DataError if it is missing or differs by as much as one bit from what was written.
    """
    path = folder / NAME
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{folder} is no complete checkpoint: {NAME} is missing") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    try:
        content = json.loads(raw)
        manifest = Manifest(
            about=content["about"],
            files={name: FileRecord(**entry) for name, entry in content["files"].items()},
        )
        found = content["format"]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise DataError(f"{path} is damaged: it cannot be read as a manifest") from None
    # Compared as bytes, so that damage which JSON reads over is seen too.
    if raw != _render(manifest, found):
        raise DataError(f"{path} is damaged: its content does not match its own digest")
    if found != FORMAT:
        raise DataError(f"{path} has format {found}; this version reads format {FORMAT}")
    return manifest


def share(manifest: Manifest, index: int, count: int) -> list[str]:
    """The files that checker `index` of `count` checks: each file once, bytes spread evenly."""
    loads = [0] * count
    mine = []
    by_size = sorted(manifest.files.items(), key=lambda item: (-item[1].bytes, item[0]))
    for name, file in by_size:
        checker = loads.index(min(loads))
        loads[checker] += file.bytes
        if checker == index:
            mine.append(name)
    return mine


def damages(folder: Path, manifest: Manifest, names: Iterable[str]) -> list[str]:
    """For each damaged file of `names` one line that says which and why; reads each file once."""
    return [
        f"{name}: {damage}"
        for name in names
        if (damage := _damage(folder / name, manifest.files[name]))
    ]


def unknown_files(folder: Path, manifest: Manifest) -> list[str]:
    """Files in the checkpoint's folder that the manifest does not list."""
    present = {
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir()
    }
    return sorted(present - manifest.files.keys() - {NAME})


def write_durably(path: Path, content: bytes) -> None:
    """Write a file and force it to the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _damage(path: Path, expected: FileRecord) -> str | None:
    try:
        size_bytes = path.stat().st_size
        if size_bytes != expected.bytes:
            return f"has {size_bytes} bytes instead of {expected.bytes}"
        if record(path).sha256 != expected.sha256:
            return "its content changed since it was written (SHA-256 differs)"
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        return f"cannot be read: {error.strerror}"
    return None


def _render(manifest: Manifest, format_number: int = FORMAT) -> bytes:
    content = {
        "format": format_number,
        "about": manifest.about,
        "files": {name: vars(manifest.files[name]) for name in sorted(manifest.files)},
    }
    content["digest"] = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    return (json.dumps(content, indent=1) + "\n").encode()
