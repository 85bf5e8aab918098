"""SHA-256 of a file while it is written, so that no byte is read back for it."""

import hashlib
from collections.abc import Buffer
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

from megatron_ext.checkpoint.manifest import FileRecord

# Below this, handing a piece to the other thread costs more than hashing it.
_PARALLEL_BYTES = 2**20


class HashingTransform:
    """Stands in for torch's stream transforms: what goes through it is hashed, and unchanged.

    One for each file; its items must be written one after the other. Large pieces are hashed on
    another thread while they are written.
    """

    def __init__(self) -> None:
        self.error: OSError | None = None
        """What kept the file from being written; torch reports only that something did."""
        self._hash = hashlib.sha256()
        self._bytes = 0
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sha256")

    def transform_save_stream(self, write_item: Any, raw: BinaryIO) -> tuple["_Stream", list[str]]:
        """The stream to write an item to, and the (empty) list of what must be undone to read."""
        return _Stream(raw, self), []

    def finish(self) -> FileRecord:
        """What the file must be. Nothing can be written after it."""
        self._thread.shutdown()
        return FileRecord(self._bytes, self._hash.hexdigest())

    def write(self, raw: BinaryIO, piece: Buffer) -> int:
        """Write a piece, and hash it."""
        try:
            return self._write(raw, piece)
        except OSError as error:
            self.error = error
            raise

    def _write(self, raw: BinaryIO, piece: Buffer) -> int:
        size_bytes = memoryview(piece).nbytes
        self._bytes += size_bytes
        if size_bytes < _PARALLEL_BYTES:
            self._hash.update(piece)
            return raw.write(piece)
        # The piece is only borrowed, so the hash must be done before this returns.
        hashed = self._thread.submit(self._hash.update, piece)
        try:
            return raw.write(piece)
        finally:
            hashed.result()


class _Stream:
    """What torch.save needs of a file."""

    def __init__(self, raw: BinaryIO, transform: HashingTransform):
        self._raw = raw
        self._transform = transform

    def write(self, piece: Buffer) -> int:
        return self._transform.write(self._raw, piece)

    def flush(self) -> None:
        self._raw.flush()

    def close(self) -> None:
        """The file stays open for its next item."""
