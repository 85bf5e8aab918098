"""Join the finished units into the output files, in plan order, without needing room for both.

A unit's part is deleted once it stands in the output, so at no time is more than one part on disk
twice. The parts that are gone say how far an interrupted run had come.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

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
    base = work.path / "assembled" / target.prefix
    done = base.with_name(base.name + ".json")
    if done.exists():
        return Output(**files.read_json(done))
    base.parent.mkdir(parents=True, exist_ok=True)
    bin_path, idx_path = (base.with_name(base.name + suffix) for suffix in (".bin", ".idx"))
    sha256 = _append(work, target, bin_path, advance)

    def lengths() -> Iterator[np.ndarray]:
        for piece in target.pieces:
            folder = work.unit_folder(piece.unit)
            found = sampling.lengths_of(folder, target.split)
            if piece.below < sampling.ALL:
                found = found[sampling.kept_of(folder, target.split, piece.below)]
            yield found

    indexed.write_index(idx_path, dtype, lengths, target.documents)
    for path in (bin_path, idx_path):
        files.sync_file(path)
    output = Output(
        prefix=target.prefix,
        split=target.split,
        documents=target.documents,
        tokens=target.tokens,
        dtype=dtype.name,
        bytes=bin_path.stat().st_size,
        sha256=sha256,
        index_bytes=idx_path.stat().st_size,
        index_sha256=files.sha256_of(idx_path),
    )
    files.write_json(done, asdict(output))
    return output


def _append(work: WorkFolder, target: Target, path: Path, advance: Callable[[int], None]) -> str:
    """Append each part to `path` and delete it. Returns the hash of the whole."""
    parts = [work.unit_folder(piece.unit) / f"{target.split}.bin" for piece in target.pieces]
    moved = next((i for i, part in enumerate(parts) if part.exists()), len(parts))
    moved_bytes = sum(piece.bytes for piece in target.pieces[:moved])
    digest = hashlib.sha256()
    with path.open("r+b" if path.exists() else "w+b") as file:
        _take_up(file, digest, moved_bytes, path)
        advance(moved_bytes)
        for piece, part in zip(target.pieces[moved:], parts[moved:], strict=True):
            _copy(part, piece, file, digest)
            file.flush()
            os.fsync(file.fileno())
            part.unlink()
            advance(piece.bytes)
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


def _copy(part: Path, piece: Piece, file: BinaryIO, digest: "hashlib._Hash") -> None:
    own = hashlib.sha256()
    with part.open("rb") as source:
        while chunk := source.read(_CHUNK_BYTES):
            own.update(chunk)
            if piece.below == sampling.ALL:
                digest.update(chunk)
                file.write(chunk)
    if own.hexdigest() != piece.sha256:
        raise DataError(
            f"{part}: is not what was written (its hash differs); the disk damaged it: delete "
            f"{part.parent} and run the same command again"
        )
    if piece.below < sampling.ALL:
        kept = sampling.kept_of(part.parent, part.stem, piece.below)
        lengths = sampling.lengths_of(part.parent, part.stem)
        dtype = f"u{piece.bytes // max(piece.tokens, 1)}"
        data = np.fromfile(part, dtype=dtype)[np.repeat(kept, lengths)].tobytes()
        digest.update(data)
        file.write(data)
