"""Records of one input: the scan that precedes all work, and the items of one unit."""

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from data_prep import files, records, streams
from data_prep.errors import DataError
from data_prep.plan import Input, Options, Scan, Unit


class Item(NamedTuple):
    """One record: number in the file, offset (byte, or parquet row), text or why not."""

    number: int
    offset: int
    text: str | None
    skipped: records.Skipped | None

    def skip(self, skipped: records.Skipped) -> "Item":
        """The same record, giving no document."""
        return self._replace(text=None, skipped=skipped)


class _Hashed:
    """A file that hashes and reports what is read from it."""

    def __init__(self, file: BinaryIO, advance: Callable[[int], None]):
        self._file = file
        self._advance = advance
        self.sha256 = hashlib.sha256()

    def read(self, size: int) -> bytes:
        data = self._file.read(size)
        self.sha256.update(data)
        self._advance(len(data))
        return data

    def tell(self) -> int:
        return self._file.tell()


def scan(source: Input, options: Options, advance: Callable[[int], None]) -> Scan:
    """Read a whole input once: hash, integrity, number of records, where its units begin.

    It costs about a hundredth of tokenising, and finds a cut or corrupt file, and makes the number
    of records known, before anything is tokenised. `advance` is told the bytes read from disk.
    """
    kind = streams.file_kind(source.path)
    if kind == "parquet":
        return _scan_parquet(source, options, advance)
    with Path(source.path).open("rb") as opened:
        file = _Hashed(opened, advance)
        size = newlines = 0
        last = b"\n"
        first_records: list[int] = []
        for chunk in streams.decompressed(file, kind, source.path):
            # A record that starts exactly at a unit's first byte belongs to that unit, hence the
            # newline just before a boundary is not counted for it.
            while (boundary := len(first_records) * options.unit_bytes) <= size + len(chunk):
                before = chunk.count(b"\n", 0, max(boundary - 1 - size, 0))
                first_records.append(newlines + before + 1 if boundary else 0)
            size += len(chunk)
            newlines += chunk.count(b"\n")
            last = chunk[-1:]
    del first_records[-(-size // options.unit_bytes) :]
    return Scan(
        kind=kind,
        sha256=file.sha256.hexdigest(),
        size=size,
        text_bytes=size,
        records=newlines + (last != b"\n"),
        unit_size=options.unit_bytes,
        first_records=tuple(first_records),
    )


def _scan_parquet(source: Input, options: Options, advance: Callable[[int], None]) -> Scan:
    """Units of as many rows as make about `unit_bytes` of the text column."""
    from data_prep import parquet  # arrow is slow to import, and starts threads

    rows, text_bytes = parquet.measure(source.path, options.text_column)
    unit_rows = max(1, options.unit_bytes * rows // max(text_bytes, 1))
    return Scan(
        kind="parquet",
        sha256=files.sha256_of(Path(source.path), advance),
        size=rows,
        text_bytes=text_bytes,
        records=rows,
        unit_size=unit_rows,
        first_records=tuple(range(0, rows, unit_rows)),
    )


def items(source: Input, kind: str, unit: Unit, options: Options) -> Iterator[Item]:
    """The records of one unit, in order.

    Raises:
        DataError: the file is damaged, or was changed since the run began.
    """
    if not source.is_untouched():
        raise DataError(f"{source.path}: was changed while this run was reading it")
    if kind == "parquet":
        yield from _parquet_items(source, unit, options)
        return
    found = streams.lines_starting_in(
        source.path, kind, unit.start, unit.end, options.max_record_bytes
    )
    for number, (offset, line) in enumerate(found, unit.first_record):
        try:
            yield Item(number, offset, records.text_of_line(line, options.text_column), None)
        except records.Skipped as skipped:
            yield Item(number, offset, None, skipped)


def _parquet_items(source: Input, unit: Unit, options: Options) -> Iterator[Item]:
    from data_prep import parquet

    rows = parquet.texts(
        source.path, options.text_column, unit.start, unit.end, options.max_record_bytes
    )
    for row, text in rows:
        if isinstance(text, str):
            yield Item(row, row, text, None)
        else:
            yield Item(row, row, None, text)
