"""`inspect` and `verify`: look at finished outputs, and check them."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data_prep import files, indexed, outputs
from data_prep.errors import DataError
from data_prep.indexed import IndexedFile
from data_prep.progress import Reporter
from data_prep.tokenizers.encoder import Encoder
from data_prep.tokenizers.load import load_encoder

_CHECKED_TOGETHER = 1 << 20  # documents


def encoder_of(out: Path, manifest: dict) -> Encoder:
    """The encoder that made an output, from the vocabulary that is kept in it.

    Raises:
        DataError: the kept vocabulary is not the one of the manifest.
    """
    settings = manifest["tokenizer"]
    path = out / settings["path"]
    if not path.is_file():
        raise DataError(f"{path}: is missing")
    if files.sha256_of(path) != settings["fingerprint"]:
        raise DataError(f"{path}: is not the tokenizer of this output (its hash differs)")
    bos = None if settings["bos"] is None else str(settings["bos"])
    return load_encoder(path, bos, str(settings["eod"]))


def inspect(out: Path, shown: int) -> dict:
    """Counts, a histogram of lengths, and the first `shown` documents of each output as text."""
    manifest = outputs.read_manifest(out)
    encoder = encoder_of(out, manifest)
    described = []
    for row in manifest["outputs"]:
        data = IndexedFile(out / row["prefix"])
        heads = [data[number].tolist() for number in range(min(shown, len(data)))]
        described.append(
            {
                "prefix": row["prefix"],
                "documents": row["documents"],
                "tokens": row["tokens"],
                "dtype": row["dtype"],
                "lengths": _histogram(data),
                "first": [encoder.tokenizer.decode(ids[:-1]) for ids in heads],
            }
        )
    return {"tokenizer": manifest["tokenizer"], "outputs": described}


def _histogram(data: IndexedFile) -> dict[str, int]:
    """Documents by length in tokens, in powers of two: `{"64-127": 12, …}`."""
    powers = np.zeros(32, dtype=np.int64)
    for _, _, lengths in _index_slices(data):
        powers += np.bincount(np.log2(lengths).astype(int), minlength=len(powers))
    return {
        f"{2**power}-{2 ** (power + 1) - 1}": int(count)
        for power, count in enumerate(powers)
        if count
    }


def verify(out: Path, reporter: Reporter) -> dict:
    """Check every byte of a finished output.

    Raises:
        DataError: names the first file that is damaged, and how.
    """
    manifest = outputs.read_manifest(out)
    encoder_of(out, manifest)
    rows = manifest["outputs"]
    reporter.phase("verify", sum(row["bytes"] + row["index"]["bytes"] for row in rows))
    for row in rows:
        for entry in (row, row["index"]):
            _check_hash(out / entry["path"], entry, reporter)
        _check_documents(out, row, manifest["tokenizer"])
    _check_blend(out, manifest)
    _check_provenance(out, manifest)
    totals = {key: sum(row[key] for row in rows) for key in ("documents", "tokens", "bytes")}
    of_inputs = sum(row["documents"] for row in manifest["inputs"])
    if totals["documents"] != of_inputs:
        raise DataError(
            f"{out / outputs.MANIFEST}: inputs gave {of_inputs} documents, outputs hold "
            f"{totals['documents']}"
        )
    return {"outputs": len(rows), **totals}


def _check_hash(path: Path, entry: dict, reporter: Reporter) -> None:
    if not path.is_file():
        raise DataError(f"{path}: is missing")
    if path.stat().st_size != entry["bytes"]:
        raise DataError(
            f"{path}: is {path.stat().st_size} bytes where the manifest says {entry['bytes']}"
        )
    if files.sha256_of(path, reporter.advance) != entry["sha256"]:
        raise DataError(f"{path}: was changed since it was written (its hash differs)")


def _check_documents(out: Path, row: dict, tokenizer: dict) -> None:
    """Index against binary, counts, ids inside the vocabulary, EOD at every end."""
    data = IndexedFile(out / row["prefix"])
    if (len(data), len(data.tokens)) != (row["documents"], row["tokens"]):
        raise DataError(f"{data.idx_path}: its counts are not those of the manifest")
    if data.dtype != indexed.dtype_for(tokenizer["vocab_size"]):
        raise DataError(f"{data.idx_path}: has token type {data.dtype}, not the tokenizer's")
    for first, offsets, lengths in _index_slices(data):
        expected = np.concatenate(([offsets[0]], offsets[0] + np.cumsum(lengths[:-1], dtype="i8")))
        if not np.array_equal(offsets, expected) or (lengths < 1).any():
            raise DataError(f"{data.idx_path}: offsets do not follow from lengths after {first}")
        ends = data.tokens[offsets + lengths - 1]
        if wrong := np.flatnonzero(ends != tokenizer["eod"]).tolist():
            raise DataError(
                f"{data.bin_path}: document {first + wrong[0]} does not end with the EOD "
                f"{tokenizer['eod']}"
            )
        inside = data.tokens[offsets[0] : offsets[-1] + lengths[-1]]
        if inside.min() < 0 or inside.max() >= tokenizer["vocab_size"]:
            raise DataError(f"{data.bin_path}: holds ids outside the vocabulary")


def _index_slices(data: IndexedFile) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """`(first document, offsets in tokens, lengths)` of a bounded number of documents each."""
    for first in range(0, len(data), _CHECKED_TOGETHER):
        last = min(first + _CHECKED_TOGETHER, len(data))
        lengths = data.lengths[first:last].astype("i8")
        yield first, data.offsets[first:last] // data.dtype.itemsize, lengths


def _check_blend(out: Path, manifest: dict) -> None:
    """Weights may have been edited; what they weigh must be there, and they must sum to 1."""
    path = out / outputs.BLEND
    if not path.is_file():
        raise DataError(f"{path}: is missing")
    made = outputs.read_blend(path)
    known = {row["prefix"]: row["tokens"] for row in manifest["outputs"]}
    for split in ("train", "validation"):
        rows = made.get(split) or []
        for row in rows:
            if known.get(row.get("prefix")) != row.get("tokens"):
                raise DataError(f"{path}: names {row.get('prefix')}, not as this output holds it")
        whole = sum(row.get("weight", 0) for row in rows)
        if (rows or split == "train") and abs(whole - 1) > 1e-6:
            raise DataError(f"{path}: the weights of {split} sum to {whole}, not to 1")


def _check_provenance(out: Path, manifest: dict) -> None:
    counted = dict.fromkeys((row["prefix"] for row in manifest["outputs"]), 0)
    for row in outputs.read_provenance(out):
        if counted.get(row["prefix"]) != row["first_document"]:
            raise DataError(f"{out / outputs.PROVENANCE}: does not follow {row['prefix']}")
        counted[row["prefix"]] += row["documents"]
    if counted != {row["prefix"]: row["documents"] for row in manifest["outputs"]}:
        raise DataError(f"{out / outputs.PROVENANCE}: does not account for all documents")
