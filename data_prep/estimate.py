"""How much a run will read and write, from a small sample of its inputs."""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from data_prep import indexed, reading, sampling, streams
from data_prep.cleaning import Cleaner
from data_prep.errors import DataPrepError
from data_prep.plan import Input, Plan, Scan, Unit
from data_prep.reading import Item
from data_prep.selection import selected
from data_prep.tokenizers.encoder import Encoder
from data_prep.work import WorkFolder

_SAMPLED_INPUTS = 16
_SAMPLED_BYTES = 1 << 18  # of lines, from each of them
_SAMPLED_RECORDS = 256
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


def from_sample(
    plan: Plan, scans: dict[int, Scan], units: list[Unit], encoder: Encoder
) -> Estimate:
    """Tokenise the first records of a few units spread over all, and scale by records."""
    records = documents = tokens = 0
    for unit in units[:: max(1, len(units) // _SAMPLED_INPUTS)]:
        head = _head(plan, plan.inputs[unit.input], scans[unit.input].kind, unit)
        texts = [item.text for item in head if item.text is not None]
        records += len(head)
        documents += len(texts)
        tokens += sum(map(len, encoder.encode(texts)))
    scale = sum(_records_of(unit, scans[unit.input]) for unit in units) / max(records, 1)
    return Estimate.of(documents * scale, tokens * scale, encoder)


def _head(plan: Plan, source: Input, kind: str, unit: Unit) -> list[Item]:
    """The first records of a unit, cleaned."""
    found = reading.items(source, kind, unit, plan.options)
    head: list[Item] = []
    for item in selected(found, Cleaner(plan.options, source.partition)):
        head.append(item)
        if item.offset - head[0].offset >= _SAMPLED_BYTES or len(head) >= _SAMPLED_RECORDS:
            break
    return head


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
    free = shutil.disk_usage(work.out).free
    if needed > free:
        raise DataPrepError(
            f"{work.out}: about {needed / 1e9:.3g} GB are needed and {free / 1e9:.3g} GB are free; "
            "make room, or spread the run over several disks with --shard"
        )


def dry_run(plan: Plan, encoder: Encoder, workers: int) -> dict:
    """What a run would give and take, without reading more than the heads of a few inputs.

    Keys: inputs, input_bytes, documents, tokens, output_bytes, seconds, hours.
    """
    encoder.encode(["The first call of a library may take longer."])
    chosen = plan.inputs[:: max(1, len(plan.inputs) // _SAMPLED_INPUTS)]
    sampled_bytes = documents = tokens = seconds = 0.0
    for source in chosen:
        kind = streams.file_kind(source.path)
        began = time.perf_counter()
        head = _head(plan, source, kind, Unit(0, 0, 0, 1 << 62, 0))
        texts = [item.text for item in head if item.text is not None]
        tokens += sum(map(len, encoder.encode(texts)))
        seconds += time.perf_counter() - began
        documents += len(texts)
        sampled_bytes += _bytes_on_disk(source, kind, head)
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


def _bytes_on_disk(source: Input, kind: str, head: list[Item]) -> float:
    """How much of the file the head took up, by the ratio of what was decompressed so far."""
    if not head:
        return source.bytes
    if kind == "parquet":
        from data_prep import parquet

        return source.bytes * len(head) / parquet.rows(source.path)
    last = head[-1]
    read = last.offset + (len(last.text.encode()) if last.text else 0)
    if kind == "plain":
        return min(read, source.bytes)
    with Path(source.path).open("rb") as file:
        inflated = 0
        for chunk in streams.decompressed(file, kind, source.path):
            inflated += len(chunk)
            if inflated > max(read, 1 << 22):
                return read * file.tell() / inflated
        return source.bytes * min(1.0, read / max(inflated, 1))
