"""How much a run will write, from a small sample of its inputs."""

import itertools
import shutil
from dataclasses import dataclass

import numpy as np

from data_prep import reading
from data_prep.errors import DataPrepError
from data_prep.plan import Plan, Scan, Unit
from data_prep.tokenizers.encoder import Encoder
from data_prep.work import WorkFolder

_SAMPLED_INPUTS = 8
_SAMPLED_RECORDS = 16
_INDEX_BYTES_PER_DOCUMENT = 20
# Peak use over the final size: the part that is being moved is on disk twice.
_PEAK = 1.05


@dataclass(frozen=True)
class Estimate:
    """Documents, tokens and bytes that the sampled units will give."""

    documents: int
    tokens: int
    output_bytes: int


def from_sample(
    plan: Plan, scans: dict[int, Scan], units: list[Unit], encoder: Encoder
) -> Estimate:
    """Tokenise the first records of a few units spread over all, and scale by records."""
    step = max(1, len(units) // _SAMPLED_INPUTS)
    records = documents = tokens = 0
    for unit in units[::step]:
        found = reading.items(plan.inputs[unit.input], scans[unit.input].kind, unit, plan.options)
        head = list(itertools.islice(found, _SAMPLED_RECORDS))
        texts = [item.text for item in head if item.text is not None]
        records += len(head)
        documents += len(texts)
        tokens += sum(map(len, encoder.encode(texts))) if texts else 0
    in_all = sum(_records_of(unit, scans[unit.input]) for unit in units)
    scale = in_all / max(records, 1)
    documents, tokens = int(documents * scale), int(tokens * scale)
    size = np.dtype(encoder.dtype).itemsize
    return Estimate(documents, tokens, tokens * size + documents * _INDEX_BYTES_PER_DOCUMENT)


def _records_of(unit: Unit, scan: Scan) -> int:
    following = unit.number + 1
    last = scan.first_records[following] if following < len(scan.first_records) else scan.records
    return last - unit.first_record


def check_space(
    work: WorkFolder, plan: Plan, scans: dict[int, Scan], units: list[Unit], encoder: Encoder
) -> None:
    """Raise DataPrepError where the units that are still to do will clearly not fit the disk."""
    waiting = [unit for unit in units if work.receipt(unit) is None]
    if not waiting:
        return
    needed = int(from_sample(plan, scans, waiting, encoder).output_bytes * _PEAK)
    free = shutil.disk_usage(work.out).free
    if needed > free:
        raise DataPrepError(
            f"{work.out}: about {needed / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB are free; "
            "make room, or spread the run over several disks with --shard"
        )
