"""`--max-tokens`: the documents with the lowest hashes, as many as fit; an unbiased subset.

Units are tokenised with a share that is a little too large, keeping each document's hash; when all
are done, the exact bound is known and the rest is left out while the outputs are put together. So
what is taken depends on no estimate: one that was too high only costs another pass.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data_prep import records
from data_prep.plan import Unit
from data_prep.selection import SPLITS
from data_prep.work import WorkFolder

ALL = 2**64
# The estimate of the whole rests on a sample: leave room for its error.
MARGIN = 1.5
_BINS = 1 << 16


def first_bound(max_tokens: int, estimated_tokens: int) -> int:
    """The hash below which documents are tokenised, so that about 1.5 × `max_tokens` result."""
    if estimated_tokens <= MARGIN * max_tokens:
        return ALL
    return int(ALL * MARGIN * max_tokens / estimated_tokens)


def higher_bound(below: int, max_tokens: int, tokens: int) -> int:
    """The next bound to try where hashes under `below` gave only `tokens`."""
    return min(ALL, int(below * MARGIN * max_tokens / max(tokens, 1)))


def exact_bound(work: WorkFolder, units: list[Unit], max_tokens: int) -> int:
    """The highest bound that leaves at most `max_tokens` in finished units.

    Two passes over the units' hashes, so that memory does not grow with their number.
    """
    counted = np.zeros(_BINS)
    for hashes, lengths in _documents(work, units):
        counted += np.bincount(hashes >> np.uint64(48), weights=lengths, minlength=_BINS)
    before = np.concatenate(([0.0], np.cumsum(counted)))
    if before[-1] <= max_tokens:
        return ALL
    crossing = int(np.searchsorted(before, max_tokens, side="right")) - 1
    inside = [
        (hashes[chosen], lengths[chosen])
        for hashes, lengths in _documents(work, units)
        if (chosen := hashes >> np.uint64(48) == crossing).any()
    ]
    hashes, lengths = (np.concatenate(column) for column in zip(*inside, strict=True))
    order = np.argsort(hashes, kind="stable")
    tokens = before[crossing] + np.cumsum(lengths[order].astype(np.float64))
    return int(hashes[order][np.searchsorted(tokens, max_tokens, side="right")])


def trimmed(work: WorkFolder, unit: Unit, receipt: dict, below: int) -> dict:
    """The receipt of a unit as if only hashes under `below` had been taken."""
    parts, left_out = {}, 0
    for split, part in receipt["parts"].items():
        parts[split] = part
        if part["documents"] and below < ALL:
            folder = work.unit_folder(unit)
            kept = kept_of(folder, split, below)
            tokens = int(lengths_of(folder, split)[kept].sum(dtype=np.int64))
            size = part["bytes"] // part["tokens"] * tokens
            documents = int(kept.sum())
            left_out += part["documents"] - documents
            parts[split] = {**part, "documents": documents, "tokens": tokens, "bytes": size}
    skipped = dict(receipt["skipped"])
    if left_out:
        skipped[records.NOT_SAMPLED] = skipped.get(records.NOT_SAMPLED, 0) + left_out
    return {**receipt, "parts": parts, "skipped": skipped}


def lengths_of(folder: Path, split: str) -> np.ndarray:
    """int32 tokens of each document of a unit's part."""
    return np.fromfile(folder / f"{split}.lengths", dtype="<i4")


def kept_of(folder: Path, split: str, below: int) -> np.ndarray:
    """bool for each document of a unit's part."""
    return np.fromfile(folder / f"{split}.hashes", dtype="<u8") < np.uint64(below)


def _documents(work: WorkFolder, units: list[Unit]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    for unit in units:
        folder = work.unit_folder(unit)
        for split in SPLITS:
            if (folder / f"{split}.hashes").exists():
                yield (
                    np.fromfile(folder / f"{split}.hashes", dtype="<u8"),
                    lengths_of(folder, split),
                )
