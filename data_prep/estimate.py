"""How much a run will read and write, from a small sample of its inputs."""

import time
from dataclasses import dataclass
from pathlib import Path

from data_prep import files, indexed, reading, sampling, streams
from data_prep.cleaning import Cleaner
from data_prep.plan import Input, Plan, Scan, Unit
from data_prep.reading import Item
from data_prep.selection import selected
from data_prep.tokenizers.encoder import Encoder
from data_prep.work import WorkFolder

_SAMPLED_PLACES = 16  # inputs or units, spread over all
_READ_CHARACTERS = 1 << 22  # of texts, from each of them
_ENCODED_CHARACTERS = 1 << 18  # of these, spread evenly
_INDEX_BYTES_PER_DOCUMENT = indexed.index_bytes(1) - indexed.index_bytes(0)
# Peak use over the final size: the part that is being moved is on disk twice.
_PEAK = 1.05


@dataclass(frozen=True)
class Estimate:
    """Documents, tokens and bytes that some units, or whole inputs, will give."""

    documents: int
    tokens: int
    output_bytes: int

    @staticmethod
    def of(documents: float, tokens: float, encoder: Encoder) -> "Estimate":
        size = tokens * encoder.dtype.itemsize + documents * _INDEX_BYTES_PER_DOCUMENT
        return Estimate(int(documents), int(tokens), int(size))


@dataclass(frozen=True)
class _Head:
    """What the first records of a place give, on average a record."""

    records: int
    end: int | None  # offset of the first that was not read; None where all were
    documents: float
    tokens: float
    seconds: float


def _head(plan: Plan, source: Input, kind: str, unit: Unit, encoder: Encoder) -> _Head:
    began = time.perf_counter()
    found: list[Item] = []
    characters, end = 0, None
    for item in reading.items(source, kind, unit, plan.options):
        if characters >= _READ_CHARACTERS:
            end = item.offset
            break
        found.append(item)
        characters += len(item.text or "")
    read = time.perf_counter()
    taken = found[:: max(1, characters // _ENCODED_CHARACTERS)]
    cleaned = selected(iter(taken), Cleaner(plan.options, source.partition))
    texts = [item.text for item in cleaned if item.text is not None]
    tokens = sum(map(len, encoder.encode(texts)))
    encoded = time.perf_counter()
    records, sampled = max(len(found), 1), max(len(taken), 1)
    return _Head(
        records=len(found),
        end=end,
        documents=len(texts) / sampled,
        tokens=tokens / sampled,
        seconds=(read - began) / records + (encoded - read) / sampled,
    )


def from_sample(
    plan: Plan, scans: dict[int, Scan], units: list[Unit], encoder: Encoder
) -> Estimate:
    """Tokenise some records of a few units spread over all; each stands for its own share."""
    records = documents = tokens = 0.0
    for unit in units[:: max(1, len(units) // _SAMPLED_PLACES)]:
        scan = scans[unit.input]
        head = _head(plan, plan.inputs[unit.input], scan.kind, unit, encoder)
        held = _records_of(unit, scan)
        records += held
        documents += held * head.documents
        tokens += held * head.tokens
    scale = sum(_records_of(unit, scans[unit.input]) for unit in units) / max(records, 1)
    return Estimate.of(documents * scale, tokens * scale, encoder)


def _records_of(unit: Unit, scan: Scan) -> int:
    following = unit.number + 1
    last = scan.first_records[following] if following < len(scan.first_records) else scan.records
    return last - unit.first_record


def check_space(
    work: WorkFolder, plan: Plan, scans: dict[int, Scan], units: list[Unit], encoder: Encoder
) -> None:
    """Raise DataPrepError where the units that are still to do will clearly not fit the disk."""
    waiting = [unit for unit in units if work.receipt(unit) is None]
    expected = from_sample(plan, scans, waiting, encoder)
    if limit := plan.options.max_tokens:
        share = min(1.0, sampling.MARGIN * limit / max(expected.tokens, 1))
        expected = Estimate.of(expected.documents * share, expected.tokens * share, encoder)
    needed = int(expected.output_bytes * _PEAK)
    files.check_room(work.out, needed, "spread the run over several disks with --shard")


def dry_run(plan: Plan, encoder: Encoder, workers: int) -> dict:
    """What a run would give and take, without reading more than the heads of a few inputs.

    Keys: inputs, input_bytes, documents, tokens, output_bytes, seconds, hours.
    """
    encoder.encode(["The first call of a library may take longer."])
    sampled_bytes = documents = tokens = seconds = 0.0
    for source in plan.inputs[:: max(1, len(plan.inputs) // _SAMPLED_PLACES)]:
        kind = streams.file_kind(source.path)
        head = _head(plan, source, kind, Unit(0, 0, 0, 1 << 62, 0), encoder)
        held = head.records / _share_read(source, kind, head.end)
        sampled_bytes += source.bytes
        documents += held * head.documents
        tokens += held * head.tokens
        seconds += held * head.seconds
    in_all = sum(source.bytes for source in plan.inputs)
    scale = in_all / max(sampled_bytes, 1)
    whole = Estimate.of(documents * scale, tokens * scale, encoder)
    if limit := plan.options.max_tokens:
        share = min(1.0, limit / max(whole.tokens, 1))
        whole = Estimate.of(whole.documents * share, whole.tokens * share, encoder)
    return {
        "inputs": len(plan.inputs),
        "input_bytes": in_all,
        "documents": whole.documents,
        "tokens": whole.tokens,
        "output_bytes": whole.output_bytes,
        "seconds": seconds * scale / workers,
        "hours": seconds * scale / workers / 3600,
    }


def _share_read(source: Input, kind: str, end: int | None) -> float:
    """The part of a file before the offset `end`, by the ratio of what was decompressed so far."""
    if end is None:
        return 1.0
    if kind == "parquet":
        from data_prep import parquet

        return end / parquet.rows(source.path)
    if kind == "plain":
        return end / source.bytes
    with Path(source.path).open("rb") as file:
        inflated = 0
        for chunk in streams.decompressed(file, kind, source.path):
            inflated += len(chunk)
            if inflated >= end:
                break
        return end / inflated * file.tell() / source.bytes
