"""`dedup`: find copies of texts; of each set the lowest (path, line) survives.

First each unit's texts are hashed and written in order of the hash: 128 bits of the text, or with
`--near` 64 bits for each band of its MinHash signature. Then, band by band and bucket by bucket of
the hashes' range, the records of all units are sorted together, and of those with equal hashes all
but the lowest are marked. A bucket is as large as memory allows and the marks lie in a file, one
byte a record, so memory does not grow with the input. The result depends on neither timing,
workers, nor the size of units.
"""

import hashlib
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep import files
from data_prep.errors import UsageError
from data_prep.executor import Task, executor
from data_prep.plan import Plan, Unit
from data_prep.progress import Reporter
from data_prep.reading import Item
from data_prep.skiplist import INDEX
from data_prep.work import WorkFolder
from data_prep.worker import Step

_BUCKET_BYTES = 256 << 20
_EXACT_KEYS, _NEAR_KEYS = ("high", "low"), ("high",)


def hashed(items: Iterable[Item], near: bool) -> np.ndarray:
    """`[bands, texts]` rows of keys and record number, each band in order of its first key.

    Exact hashes make one band.
    """
    width = 1 + (_bands(near) if near else len(_EXACT_KEYS))
    keys_of = _near_keys if near else _exact_keys
    made = ((item.number, *keys_of(item.text)) for item in items if item.text is not None)
    table = np.fromiter(made, dtype=np.dtype(("<u8", width)))
    rows = np.empty((_bands(near), len(table)), dtype=_dtype(near))
    for band, found in enumerate(rows):
        columns = table[:, 1 + band : 2 + band] if near else table[:, 1:]
        order = np.argsort(columns[:, 0], kind="stable")
        found["number"] = table[order, 0]
        for place, name in enumerate(_keys(near)):
            found[name] = columns[order, place]
    return rows


def _exact_keys(text: str) -> tuple[int, int]:
    digest = hashlib.blake2b(text.encode(), digest_size=16, person=b"dedup").digest()
    return int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:], "little")


def _near_keys(text: str) -> Iterable[int]:
    from data_prep.near import band_keys

    return band_keys(text)


def _bands(near: bool) -> int:
    if not near:
        return 1
    from data_prep.near import BANDS

    return BANDS


def _keys(near: bool) -> tuple[str, ...]:
    return _NEAR_KEYS if near else _EXACT_KEYS


def _dtype(near: bool) -> np.dtype:
    return np.dtype([(name, "<u8") for name in (*_keys(near), "number")])


@dataclass(frozen=True)
class Found:
    """How many records gave texts, and how many of them are copies of an earlier one."""

    texts: int
    duplicates: int


def dedup(plan: Plan, out: Path, workers: int, reporter: Reporter) -> Found:
    """Write the skip list of the plan's inputs to `out`; near copies too if its options say so.

    Raises:
        UsageError: `out` holds something else. DataError: an input is damaged.
    """
    work = WorkFolder(out)
    if (out / INDEX).exists():
        found = _finished(plan, out)
        work.clear_leftovers()
        return found
    with work.held():
        work.begin(plan)
        with executor(plan, work, workers) as run:
            found = _Dedup(plan, work, reporter, run).execute()
        work.remove()
        return found


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
        self.near = plan.options.near

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
        firsts = np.cumsum([0, *(scan.records for scan in self.scans.values())])
        fresh = self.work.path / "fresh"
        marks = _marks(fresh / "marks", max(int(firsts[-1]), 1))
        self._mark(units, texts, firsts, marks)
        rows = [
            self._write(index, np.flatnonzero(marks[firsts[index] : firsts[index + 1]]))
            for index in self.scans
        ]
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
        return Found(texts, sum(row["duplicates"] for row in rows))

    def _mark(self, units: list[Unit], texts: int, firsts: np.ndarray, marks: np.ndarray) -> None:
        """Mark the records that copy a lower one; `firsts` are the places of the inputs' first."""
        bands = _bands(self.near)
        buckets = max(1, -(-texts * (_dtype(self.near).itemsize + 4) // _BUCKET_BYTES))
        self.reporter.phase("sort", texts * bands)
        for band in range(bands):
            for bucket in range(buckets):
                edges = [2**64 * edge // buckets for edge in (bucket, bucket + 1)]
                rows = self._bucket(units, band, *edges)
                copies = _copies(rows, _keys(self.near))
                marks[firsts[copies["input"]] + copies["number"].astype(np.int64)] = True
                self.reporter.advance(len(rows))

    def _bucket(self, units: list[Unit], band: int, first: int, last: int) -> np.ndarray:
        """The records of all units whose first key in a band lies in `[first, last)`."""
        placed = np.dtype([*_dtype(self.near).descr, ("input", "<u4")])
        found = [np.empty(0, dtype=placed)]
        for unit in units:
            rows = np.load(self.work.unit_folder(unit) / "hashes.npy", mmap_mode="r")[band]
            low = np.searchsorted(rows["high"], np.uint64(first))
            high = len(rows) if last == 2**64 else np.searchsorted(rows["high"], np.uint64(last))
            part = np.empty(high - low, dtype=placed)
            for name in rows.dtype.names:
                part[name] = rows[name][low:high]
            part["input"] = unit.input
            found.append(part)
        return np.concatenate(found)

    def _write(self, index: int, numbers: np.ndarray) -> dict:
        """One input's file."""
        fresh = self.work.path / "fresh" / f"{index:06d}.npy"
        np.save(fresh, numbers.astype("<u8"))
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


def _marks(path: Path, records: int) -> np.ndarray:
    """A mapped file of one byte a record, all 0.

    Its room is taken first: a mapping that meets a full disk kills the process.
    """
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, records)
    return np.memmap(path, dtype=bool, mode="r+")


def _copies(rows: np.ndarray, keys: tuple[str, ...]) -> np.ndarray:
    """Of records with equal keys, all but the first by (input, number)."""
    order = np.lexsort((rows["number"], rows["input"], *(rows[key] for key in reversed(keys))))
    rows = rows[order]
    same = np.logical_and.reduce([rows[key][1:] == rows[key][:-1] for key in keys])
    return rows[1:][same]
