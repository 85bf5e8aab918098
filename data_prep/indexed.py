"""megatron-core's IndexedDataset format: `<prefix>.bin` and `<prefix>.idx`, little-endian.

Index: 9 bytes `MMIDIDX\\0\\0`; u64 version 1; u8 code of the token dtype; u64 sequences S;
u64 S + 1; i32[S] lengths in tokens; i64[S] byte offsets into `.bin`; i64[S + 1] first sequence of
each document. One sequence is one document here, so the last array counts up from 0.
"""

import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from data_prep.errors import DataError

_HEADER = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\0\0"
_DTYPES = {4: np.dtype("<i4"), 8: np.dtype("<u2")}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}
_COUNT_CHUNK = 1 << 20


def dtype_for(vocab_size: int) -> np.dtype:
    """megatron-core's rule: uint16 below 65,500 entries, else int32."""
    return np.dtype("<u2") if vocab_size < 65_500 else np.dtype("<i4")


def packed(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """`ids` in the dtype of the files; numpy alone would wrap an id that does not fit.

    Raises:
        DataError: an id outside `[0, vocab_size)`.
    """
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < vocab_size:
        worst = int(ids.min()) if ids.min() < 0 else int(ids.max())
        raise DataError(f"the tokenizer gave id {worst}, outside its vocabulary of {vocab_size}")
    return ids.astype(dtype_for(vocab_size))


def index_bytes(documents: int) -> int:
    """Size of the index of `documents` documents."""
    return _HEADER.size + 20 * documents + 8


def write_index(
    path: Path, dtype: np.dtype, lengths: Callable[[], Iterator[np.ndarray]], documents: int
) -> None:
    """Write `path` in one pass per array, so that memory does not grow with `documents`.

    `lengths()` gives the documents' lengths in tokens, in order, as int32 arrays of any size.
    """
    with path.open("wb") as file:
        file.write(_HEADER.pack(_MAGIC, 1, _CODES[dtype], documents, documents + 1))
        written = 0
        for part in lengths():
            file.write(part.astype("<i4").tobytes())
            written += len(part)
        if written != documents:
            raise DataError(f"{path}: {written} lengths for {documents} documents")
        position = 0
        for part in lengths():
            ends = position + np.cumsum(part.astype("<i8") * dtype.itemsize, dtype="<i8")
            file.write((ends - part.astype("<i8") * dtype.itemsize).tobytes())
            position = int(ends[-1]) if len(ends) else position
        for first in range(0, documents + 1, _COUNT_CHUNK):
            last = min(first + _COUNT_CHUNK, documents + 1)
            file.write(np.arange(first, last, dtype="<i8").tobytes())


class IndexedFile:
    """A pair `<prefix>.bin/.idx`, memory-mapped and checked against each other.

    `with_tokens=False` opens the index alone, where the binary may be gone.

    Raises:
        DataError: either file is damaged; names it.
    """

    def __init__(self, prefix: Path, with_tokens: bool = True):
        self.bin_path = prefix.with_name(prefix.name + ".bin")
        self.idx_path = prefix.with_name(prefix.name + ".idx")
        for path in (self.bin_path, self.idx_path) if with_tokens else (self.idx_path,):
            if not path.is_file():
                raise DataError(f"{path}: is missing")
        self._read_header()
        if not with_tokens:
            return
        self.tokens = np.memmap(self.bin_path, dtype=self.dtype, mode="r")
        ends = int(self.lengths.sum(dtype=np.int64))
        if ends != len(self.tokens):
            raise DataError(
                f"{self.bin_path}: holds {len(self.tokens)} tokens where its index counts {ends}"
            )

    def _read_header(self) -> None:
        size = self.idx_path.stat().st_size
        with self.idx_path.open("rb") as file:
            head = file.read(_HEADER.size)
        if len(head) < _HEADER.size:
            raise DataError(f"{self.idx_path}: {size} bytes are too few for an index")
        magic, version, code, self.documents, boundaries = _HEADER.unpack(head)
        if magic != _MAGIC or version != 1 or code not in _DTYPES:
            raise DataError(f"{self.idx_path}: is not an index that data_prep wrote")
        self.dtype = _DTYPES[code]
        expected = index_bytes(self.documents)
        if boundaries != self.documents + 1 or size != expected:
            raise DataError(
                f"{self.idx_path}: is {size} bytes where {self.documents} documents take {expected}"
            )
        data = np.memmap(self.idx_path, dtype=np.uint8, mode="r", offset=_HEADER.size)
        lengths_end, offsets_end = 4 * self.documents, 12 * self.documents
        self.lengths = data[:lengths_end].view("<i4")
        self.offsets = data[lengths_end:offsets_end].view("<i8")
        self.boundaries = data[offsets_end:].view("<i8")

    def __len__(self) -> int:
        return self.documents

    def __getitem__(self, document: int) -> np.ndarray:
        first = int(self.offsets[document]) // self.dtype.itemsize
        return self.tokens[first : first + int(self.lengths[document])]
