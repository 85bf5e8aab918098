"""`dedup`: find exact duplicates of texts; of each set the lowest (path, line) survives.

First each unit's texts are hashed (128 bits) and written in order of the hash; then, bucket by
bucket of the hashes' range, the records of all units are sorted together. A bucket is as large as
memory allows, so memory does not grow with the input. The result depends on neither timing,
workers, nor the size of units.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep import files
from data_prep.errors import UsageError
from data_prep.executor import Task, executor
from data_prep.plan import Plan, Unit
from data_prep.progress import Reporter
from data_prep.skiplist import INDEX
from data_prep.work import WorkFolder
from data_prep.worker import Step

_BUCKET_BYTES = 256 << 20
HASHED = np.dtype([("high", "<u8"), ("low", "<u8"), ("number", "<u8")])
_PLACED = np.dtype([*HASHED.descr, ("input", "<u4")])


def hashed(text: str, number: int) -> tuple[int, int, int]:
    """A row of HASHED."""
    digest = hashlib.blake2b(text.encode(), digest_size=16, person=b"dedup").digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little"), number


@dataclass(frozen=True)
class Found:
    """How many records gave texts, and how many of them are copies of an earlier one."""

    texts: int
    duplicates: int


def dedup(plan: Plan, out: Path, workers: int, reporter: Reporter) -> Found:
    """Write the skip list of the plan's inputs to `out`.

    Raises:
        UsageError: `out` holds something else. DataError: an input is damaged.
    """
    work = WorkFolder(out)
    if (out / INDEX).exists():
        found = _finished(plan, out)
        work.clear_leftovers()
        return found
    work.lock()
    try:
        work.begin(plan)
        with executor(plan, work, workers) as run:
            found = _Dedup(plan, work, reporter, run).execute()
        work.remove()
        return found
    finally:
        work.unlock()


def _finished(plan: Plan, out: Path) -> Found:
    """What the list that `out` holds already says, if it is that of this plan."""
    index = files.read_json(out / INDEX)
    same = index["options"] == plan.options.as_dict() and {
        row["path"]: row["sha256"] for row in index["inputs"]
    } == {item.name: files.sha256_of(Path(item.path)) for item in plan.inputs}
    if not same:
        raise UsageError(f"--output {out}: holds another skip list; choose another folder")
    return Found(index["texts"], sum(row["duplicates"] for row in index["inputs"]))


class _Dedup:
    def __init__(self, plan: Plan, work: WorkFolder, reporter: Reporter, run: Callable) -> None:
        self.plan = plan
        self.work = work
        self.reporter = reporter
        self.run = run

    def execute(self) -> Found:
        inputs = self.plan.inputs
        missing = [index for index in range(len(inputs)) if self.work.scan(index) is None]
        self.reporter.phase("scan", sum(inputs[index].bytes for index in missing))
        self.run([Task("scan", index, inputs[index].name) for index in missing], self._listen)
        self.scans = {index: self.work.scan(index) for index in range(len(inputs))}
        units = list(self.plan.units(self.scans))
        waiting = [unit for unit in units if self.work.receipt(unit) is None]
        self.reporter.phase("hash", sum(unit.end - unit.start for unit in waiting))
        self.run([Task("hash", unit, inputs[unit.input].name) for unit in waiting], self._listen)
        return self._publish(units)

    def _listen(self, worker: int, label: str, step: Step, finished: bool) -> None:
        self.reporter.worker(worker, "" if finished else label)
        self.reporter.advance(step.read_bytes, step.documents, step.tokens)

    def _publish(self, units: list[Unit]) -> Found:
        texts = sum(self.work.receipt(unit)["texts"] for unit in units)
        buckets = max(1, -(-texts * _PLACED.itemsize // _BUCKET_BYTES))
        self.reporter.phase("sort", texts)
        fresh = self.work.path / "fresh"
        with (fresh / "duplicates").open("wb") as spill:
            for bucket in range(buckets):
                rows = self._bucket(units, bucket, buckets)
                _copies(rows).tofile(spill)
                self.reporter.advance(len(rows))
        copies = np.memmap(fresh / "duplicates", dtype=_COPY, mode="r") if _size(fresh) else ()
        rows = [self._write(index, copies) for index in self.scans]
        files.write_json(
            self.work.out / INDEX,
            {
                "format": 1,
                "options": self.plan.options.as_dict(),
                "texts": texts,
                "inputs": rows,
            },
            fresh,
        )
        return Found(texts, len(copies))

    def _bucket(self, units: list[Unit], bucket: int, buckets: int) -> np.ndarray:
        """The records of all units whose hash lies in one equal part of the hashes' range."""
        first, last = (2**64 * edge // buckets for edge in (bucket, bucket + 1))
        found = []
        for unit in units:
            path = self.work.unit_folder(unit) / "hashes.npy"
            rows = np.load(path, mmap_mode="r")
            low = np.searchsorted(rows["high"], np.uint64(first))
            high = len(rows) if last == 2**64 else np.searchsorted(rows["high"], np.uint64(last))
            placed = np.empty(high - low, dtype=_PLACED)
            for name in HASHED.names:
                placed[name] = rows[name][low:high]
            placed["input"] = unit.input
            found.append(placed)
        return np.concatenate(found) if found else np.empty(0, dtype=_PLACED)

    def _write(self, index: int, copies: np.ndarray) -> dict:
        """One input's file. `copies` is scanned once per input, from the page cache."""
        numbers = (
            np.sort(copies["number"][copies["input"] == index])
            if len(copies)
            else np.empty(0, dtype="<u8")
        )
        fresh = self.work.path / "fresh" / f"{index:06d}.npy"
        np.save(fresh, numbers)
        files.sync_file(fresh)
        path = fresh.replace(self.work.out / fresh.name)
        scan = self.scans[index]
        return {
            "path": self.plan.inputs[index].name,
            "sha256": scan.sha256,
            "records": scan.records,
            "duplicates": len(numbers),
            "file": path.name,
            "file_sha256": files.sha256_of(path),
        }


_COPY = np.dtype([("number", "<u8"), ("input", "<u4")])


def _copies(rows: np.ndarray) -> np.ndarray:
    """Of records with equal hashes, all but the first by (input, number)."""
    order = np.lexsort((rows["number"], rows["input"], rows["low"], rows["high"]))
    rows = rows[order]
    same = (rows["high"][1:] == rows["high"][:-1]) & (rows["low"][1:] == rows["low"][:-1])
    chosen = rows[1:][same]
    copies = np.empty(len(chosen), dtype=_COPY)
    for name in _COPY.names:
        copies[name] = chosen[name]
    return copies


def _size(fresh: Path) -> int:
    return (fresh / "duplicates").stat().st_size
