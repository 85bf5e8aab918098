"""Join the finished units into the output files, in plan order, without needing room for both.

A unit's part is deleted once it stands in the output, so at no time is more than one part on disk
twice. The parts that are gone say how far an interrupted run had come.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from data_prep import files, indexed, sampling
from data_prep.errors import DataError
from data_prep.plan import Plan, Unit
from data_prep.selection import SPLITS
from data_prep.work import WorkFolder

_CHUNK_BYTES = 1 << 22


@dataclass(frozen=True)
class Output:
    """One finished pair of files, below `.work/assembled` until it is published."""

    prefix: str
    split: str
    documents: int
    tokens: int
    dtype: str
    bytes: int
    sha256: str
    index_bytes: int
    index_sha256: str


@dataclass(frozen=True)
class Piece:
    """The documents that one unit gives to one output.

    `sha256` is that of the unit's whole part, of which only hashes under `below` are taken.
    """

    unit: Unit
    below: int
    documents: int
    tokens: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Target:
    """An output and the pieces it is made of, in order."""

    prefix: str
    split: str
    pieces: tuple[Piece, ...]

    @property
    def documents(self) -> int:
        return sum(piece.documents for piece in self.pieces)

    @property
    def tokens(self) -> int:
        return sum(piece.tokens for piece in self.pieces)


def targets(plan: Plan, done: list[tuple[Unit, dict]], below: int) -> list[Target]:
    """The outputs of finished units (with their trimmed receipts), training before validation.

    A partition is cut into numbered outputs where it would exceed `documents_per_output`.
    """
    found = []
    for split in SPLITS:
        pieces: dict[str, list[Piece]] = {}
        for unit, receipt in done:
            if receipt["parts"][split]["documents"]:
                part = Piece(unit, below, **receipt["parts"][split])
                pieces.setdefault(plan.inputs[unit.input].partition, []).append(part)
        for partition in sorted(pieces, key=os.fsencode):
            name = partition if split == "train" else f"{partition}.{split}"
            groups = list(grouped(pieces[partition], plan.options.documents_per_output))
            for number, group in enumerate(groups):
                prefix = name if len(groups) == 1 else f"{name}-{number:05d}"
                found.append(Target(prefix, split, tuple(group)))
    return found


def grouped(pieces: list[Piece], max_documents: int) -> Iterator[list[Piece]]:
    """Consecutive pieces that stay within `max_documents` together."""
    group: list[Piece] = []
    documents = 0
    for piece in pieces:
        if piece.documents > max_documents:
            raise DataError(
                f"a unit holds {piece.documents} documents, more than one output may "
                f"({max_documents}); use a smaller --unit-bytes"
            )
        if documents + piece.documents > max_documents:
            yield group
            group, documents = [], 0
        group.append(piece)
        documents += piece.documents
    if group:
        yield group


def assemble(
    work: WorkFolder, target: Target, dtype: np.dtype, advance: Callable[[int], None]
) -> Output:
    """Make one output below `.work/assembled`, or go on with making it.

    `advance` is told the bytes written. Raises DataError where a part is not what its receipt says.
    """
    if output := begin(work, target.prefix):
        return output
    folders = [work.unit_folder(piece.unit) for piece in target.pieces]
    parts = [
        Part(folder / f"{target.split}.bin", p.bytes, p.tokens, p.sha256, p.below)
        for folder, p in zip(folders, target.pieces, strict=True)
    ]
    remedy = "delete its folder and run the same command again"
    sha256 = append(parts, path_of(work, target.prefix, ".bin"), advance, remedy)

    def lengths() -> Iterator[np.ndarray]:
        for piece, folder in zip(target.pieces, folders, strict=True):
            found = sampling.lengths_of(folder, target.split)
            if piece.below < sampling.ALL:
                found = found[sampling.kept_of(folder, target.split, piece.below)]
            yield found

    return finish(work, target.prefix, target.split, dtype, lengths, target.documents, sha256)


def path_of(work: WorkFolder, prefix: str, suffix: str) -> Path:
    """Where a file of the output `prefix` lies until it is published."""
    return work.path / "assembled" / f"{prefix}{suffix}"


def begin(work: WorkFolder, prefix: str) -> Output | None:
    """The output, if it is made already; else its folder is there afterwards."""
    done = path_of(work, prefix, ".json")
    if done.exists():
        return Output(**files.read_json(done))
    done.parent.mkdir(parents=True, exist_ok=True)
    return None


def finish(
    work: WorkFolder,
    prefix: str,
    split: str,
    dtype: np.dtype,
    lengths: Callable[[], Iterator[np.ndarray]],
    documents: int,
    sha256: str,
) -> Output:
    """Write the index of a binary whose tokens are there, and note that the output is made.

    `lengths` gives those of its `documents`, `sha256` is the binary's.
    """
    bin_path, idx_path = (path_of(work, prefix, suffix) for suffix in (".bin", ".idx"))
    indexed.write_index(idx_path, dtype, lengths, documents)
    for path in (bin_path, idx_path):
        files.sync_file(path)
    output = Output(
        prefix=prefix,
        split=split,
        documents=documents,
        tokens=bin_path.stat().st_size // dtype.itemsize,
        dtype=dtype.name,
        bytes=bin_path.stat().st_size,
        sha256=sha256,
        index_bytes=idx_path.stat().st_size,
        index_sha256=files.sha256_of(idx_path),
    )
    files.write_json(path_of(work, prefix, ".json"), asdict(output))
    return output


class Part(NamedTuple):
    """A file of tokens that is moved into another; of it, the hashes under `below` are taken.

    `bytes` and `tokens` count what is taken; `sha256` is that of the whole file.
    """

    path: Path
    bytes: int
    tokens: int
    sha256: str
    below: int = sampling.ALL


def append(parts: list[Part], path: Path, advance: Callable[[int], None], remedy: str = "") -> str:
    """Append each part to `path` and delete it; go on where an earlier call broke off.

    Returns the hash of the whole. Raises DataError, with `remedy`, for a part that is damaged.
    """
    moved = next((i for i, part in enumerate(parts) if part.path.exists()), len(parts))
    moved_bytes = sum(part.bytes for part in parts[:moved])
    digest = hashlib.sha256()
    with path.open("r+b" if path.exists() else "w+b") as file:
        _take_up(file, digest, moved_bytes, path)
        advance(moved_bytes)
        for part in parts[moved:]:
            _copy(part, file, digest, remedy)
            file.flush()
            os.fsync(file.fileno())
            part.path.unlink()
            advance(part.bytes)
    return digest.hexdigest()


def _take_up(file: BinaryIO, digest: "hashlib._Hash", size: int, path: Path) -> None:
    """Leave exactly the first `size` bytes of `file`, hashed into `digest`."""
    remaining = size
    while remaining:
        chunk = file.read(min(_CHUNK_BYTES, remaining))
        if not chunk:
            raise DataError(
                f"{path}: ends {remaining} bytes before what was moved into it; the work in "
                "progress is damaged: delete the output folder and start over"
            )
        digest.update(chunk)
        remaining -= len(chunk)
    file.truncate(size)
    file.seek(size)


def _copy(part: Part, file: BinaryIO, digest: "hashlib._Hash", remedy: str) -> None:
    own = hashlib.sha256()
    with part.path.open("rb") as source:
        while chunk := source.read(_CHUNK_BYTES):
            own.update(chunk)
            if part.below == sampling.ALL:
                digest.update(chunk)
                file.write(chunk)
    if own.hexdigest() != part.sha256:
        raise DataError(
            f"{part.path}: is not what was written (its hash differs); the disk damaged it: "
            f"{remedy}"
        )
    if part.below < sampling.ALL:
        folder, split = part.path.parent, part.path.stem
        kept = sampling.kept_of(folder, split, part.below)
        lengths = sampling.lengths_of(folder, split)
        dtype = f"u{part.bytes // max(part.tokens, 1)}"
        data = np.fromfile(part.path, dtype=dtype)[np.repeat(kept, lengths)].tobytes()
        digest.update(data)
        file.write(data)
