"""What becomes of a document, decided by the document alone: order and sharding move nothing."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from data_prep import records
from data_prep.plan import Options
from data_prep.reading import Item
from data_prep.skiplist import SkipList

SPLITS = ("train", "validation")
_HASHES = 2**64


def hash_of(text: str, purpose: bytes) -> int:
    """64 uniform bits; `purpose` (at most 16 bytes) makes the choices of two uses independent."""
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=purpose).digest()
    return int.from_bytes(digest, "little")


def split_of(text: str, options: Options) -> str:
    """`train` or `validation`."""
    held_out = options.validation and hash_of(text, b"validation") < options.validation * _HASHES
    return SPLITS[bool(held_out)]


def sampling_hash(text: str) -> int:
    return hash_of(text, b"max-tokens")


def selected(found: Iterator[Item], below: int, skip: frozenset[int]) -> Iterator[Item]:
    """Turn some texts into skipped records.

    `below`: the sampling hashes that are taken (2^64: all). `skip`: records to leave out.
    """
    for item in found:
        if item.text is None:
            yield item
        elif item.number in skip:
            yield item.skip(records.DUPLICATE)
        elif below < _HASHES and sampling_hash(item.text) >= below:
            yield item.skip(records.NOT_SAMPLED)
        else:
            yield item


def skipped_numbers(folder: str, name: str, sha256: str) -> frozenset[int]:
    """What the skip list in `folder` (if any) says of an input."""
    return frozenset(SkipList(Path(folder)).of(name, sha256).tolist()) if folder else frozenset()
