"""SHA-256 of a file while it is written, so that no byte is read back for it."""

import hashlib
from collections.abc import Buffer, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

import numpy as np
from torch import Tensor

from megatron_ext.checkpoint.manifest import FileRecord

# Smaller pieces, the frames around tensors, are copied and hashed together.
_LARGE_BYTES = 2**16


class HashingTransform:
    """Stands in for torch's stream transforms: what goes through it is hashed, and unchanged.

    One for each file; its items must be written one after the other. Hashing runs on a thread of
    its own behind the writing, and may still run while the file is forced to the disk.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        """`tensors`: what will be written; they must stay alive and unchanged until `finish`."""
        self.error: OSError | None = None
        """What kept the file from being written; torch reports only that something did."""
        storages = [tensor.untyped_storage() for tensor in tensors]
        self._alive = [range(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages]
        self._hash = hashlib.sha256()
        self._bytes = 0
        self._small = bytearray()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sha256")

    def transform_save_stream(self, write_item: Any, raw: BinaryIO) -> tuple["_Stream", list[str]]:
        """The stream to write an item to, and the (empty) list of what must be undone to read."""
        return _Stream(raw, self), []

    def finish(self) -> FileRecord:
        """What the file must be. Nothing can be written after it."""
        self._hash_small()
        self._thread.shutdown()
        return FileRecord(self._bytes, self._hash.hexdigest())

    def write(self, raw: BinaryIO, piece: Buffer) -> int:
        """Write a piece, and hash it."""
        content = memoryview(piece)
        self._bytes += content.nbytes
        if content.nbytes >= _LARGE_BYTES and self._stays_alive(content):
            self._hash_small()
            self._thread.submit(self._hash.update, content)
        else:
            self._small += content
        try:
            return raw.write(content)
        except OSError as error:
            self.error = error
            raise

    def _stays_alive(self, content: memoryview) -> bool:
        """Whether it lies in a tensor; other memory is only lent to `write`."""
        address = np.frombuffer(content, dtype=np.uint8).ctypes.data
        return any(address in memory for memory in self._alive)

    def _hash_small(self) -> None:
        self._thread.submit(self._hash.update, bytes(self._small))
        self._small.clear()


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
