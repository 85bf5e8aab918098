"""What becomes of a document, decided by the document alone: order and sharding move nothing."""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from data_prep import records
from data_prep.cleaning import Cleaner
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


def selected(
    found: Iterator[Item],
    cleaner: Cleaner,
    below: int = _HASHES,
    skip: frozenset[int] = frozenset(),
) -> Iterator[Item]:
    """Repair texts, and turn some into skipped records.

    `below`: the sampling hashes that are taken (2^64: all). `skip`: records to leave out.
    """
    for item in found:
        if item.text is None:
            yield item
        elif item.number in skip:
            yield item.skip(records.Skipped(records.DUPLICATE))
        else:
            yield _cleaned(item, cleaner, below)


def _cleaned(item: Item, cleaner: Cleaner, below: int) -> Item:
    try:
        text = cleaner.clean(item.text)
    except records.Skipped as skipped:
        return item.skip(skipped)
    if below < _HASHES and sampling_hash(text) >= below:
        return item.skip(records.Skipped(records.NOT_SAMPLED))
    return item if text is item.text else item._replace(text=text)


def skipped_numbers(folder: str, name: str, sha256: str) -> frozenset[int]:
    """What the skip list in `folder` (if any) says of an input."""
    return frozenset(SkipList(Path(folder)).of(name, sha256).tolist()) if folder else frozenset()
