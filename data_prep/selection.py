"""What becomes of a document, decided by the document alone: order and sharding move nothing."""

import hashlib
from collections.abc import Iterator

from data_prep import records
from data_prep.plan import Options
from data_prep.reading import Item

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


def sampled(found: Iterator[Item], below: int) -> Iterator[Item]:
    """Skip the texts whose sampling hash is not below `below` (2^64 keeps all)."""
    for item in found:
        if below < _HASHES and item.text is not None and sampling_hash(item.text) >= below:
            yield item.skip(records.NOT_SAMPLED)
        else:
            yield item
