"""MinHash signatures of texts, cut into bands: near copies agree in at least one.

The settings are those with which Nemotron-CC was deduplicated (NeMo Curator's fuzzy workflow): sets
of 24-character pieces, 20 bands of 13 hashes. Two texts whose sets have Jaccard similarity s share
a band with probability 1 - (1 - s^13)^20: 0.2 % at s = 0.5, 18 % at 0.7, 68 % at 0.8, and 99.7 %
at 0.9.
"""

import hashlib
import itertools
from collections.abc import Iterator

import numpy as np
import rensa

BANDS = 20
_HASHES_PER_BAND = 13
_PIECE_CHARACTERS = 24
_SEED = 42
_BATCH_PIECES = 1 << 16  # bounds the memory of a long text


def band_keys(text: str) -> Iterator[int]:
    """64 bits for each band; the same on every machine."""
    signature = rensa.RMinHash(num_perm=BANDS * _HASHES_PER_BAND, seed=_SEED)
    starts = range(max(len(text) - _PIECE_CHARACTERS, 0) + 1)
    for batch in itertools.batched(starts, _BATCH_PIECES):
        signature.update([text[start : start + _PIECE_CHARACTERS] for start in batch])
    bands = np.array(signature.digest(), dtype="<u4").reshape(BANDS, _HASHES_PER_BAND)
    for band in bands:
        digest = hashlib.blake2b(band.tobytes(), digest_size=8, person=b"dedup-near").digest()
        yield int.from_bytes(digest, "little")
