"""Parquet inputs: one text column, read in small batches whatever the size of the row groups."""

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq

from data_prep import records
from data_prep.errors import DataError, UsageError

_BATCH_ROWS = 1024


@contextmanager
def _opened(path: str) -> Iterator[pq.ParquetFile]:
    try:
        with pq.ParquetFile(path, memory_map=False, buffer_size=1 << 20) as file:
            yield file
    except (pa.ArrowException, OSError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DataError(f"{path}: cannot be read as parquet ({first}); fetch it again") from error


def measure(path: str, column: str) -> tuple[int, int]:
    """Rows of a file, and the uncompressed bytes of its text column.

    Raises:
        UsageError: no such column, or it holds no strings. DataError: the file is damaged.
    """
    with _opened(path) as file:
        names = file.schema_arrow.names
        if column not in names:
            raise UsageError(
                f"{path}: has no column {column!r} but {', '.join(names)}; choose by --text-column"
            )
        kind = file.schema_arrow.field(column).type
        if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
            raise UsageError(f"{path}: column {column!r} is {kind}, not string")
        groups = range(file.metadata.num_row_groups)
        size = sum(_chunk_of(file, group, column).total_uncompressed_size for group in groups)
        return file.metadata.num_rows, size


def rows(path: str) -> int:
    """Rows of a file."""
    with _opened(path) as file:
        return file.metadata.num_rows


def _chunk_of(file: pq.ParquetFile, group: int, column: str) -> pq.ColumnChunkMetaData:
    row_group = file.metadata.row_group(group)
    chunks = (row_group.column(number) for number in range(row_group.num_columns))
    return next(chunk for chunk in chunks if chunk.path_in_schema == column)


def texts(
    path: str, column: str, start: int, end: int, limit: int
) -> Iterator[tuple[int, str | records.Skipped]]:
    """`(row, text or why not)` of the rows in `[start, end)`; `limit` bounds a text's bytes."""
    with _opened(path) as file:
        first = 0
        for group in range(file.metadata.num_row_groups):
            after = first + file.metadata.row_group(group).num_rows
            if first < end and after > start:
                yield from _group_texts(file, group, first, (column, start, end, limit))
            first = after


def _group_texts(
    file: pq.ParquetFile, group: int, row: int, wanted: tuple[str, int, int, int]
) -> Iterator[tuple[int, str | records.Skipped]]:
    column, start, end, limit = wanted
    for batch in file.iter_batches(_BATCH_ROWS, row_groups=[group], columns=[column]):
        after = row + batch.num_rows
        if after > start:
            # As bytes, because arrow does not check that strings are UTF-8.
            kind = pa.large_binary() if pa.types.is_large_string(batch.schema[0].type) else None
            values = batch.column(0).cast(kind or pa.binary()).to_pylist()
            for number, value in enumerate(values, row):
                if start <= number < end:
                    yield number, _text_of(value, column, limit)
        row = after
        if row >= end:
            return


def _text_of(value: bytes | None, column: str, limit: int) -> str | records.Skipped:
    try:
        if value is not None and len(value) > limit:
            raise records.Skipped(records.OVER_LONG, "longer than --max-record-bytes")
        return records.checked(None if value is None else value.decode(), column)
    except UnicodeDecodeError as error:
        return records.Skipped(records.INVALID_UTF8, f"byte {error.start}: {error.reason}")
    except records.Skipped as skipped:
        return skipped
