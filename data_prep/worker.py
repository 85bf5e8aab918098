"""The two kinds of task: scan an input, tokenise a unit. The same code for every executor."""

import hashlib
import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import BinaryIO

import numpy as np

from data_prep import files, reading, records
from data_prep.cleaning import Cleaner
from data_prep.errors import DataError
from data_prep.plan import Plan, Unit
from data_prep.reading import Item
from data_prep.selection import SPLITS, sampling_hash, selected, skipped_numbers, split_of
from data_prep.tokenizers.encoder import Encoder
from data_prep.tokenizers.load import load_encoder
from data_prep.work import WorkFolder

_BATCH_CHARACTERS = 1 << 19
_BATCH_DOCUMENTS = 512


@dataclass(frozen=True)
class Step:
    """What a worker did since its last report."""

    read_bytes: int = 0  # of input, decompressed; of the file as it lies while scanning
    documents: int = 0
    tokens: int = 0
    bad: int = 0


Report = Callable[[Step], None]


class Worker:
    """Does tasks of one plan. Opens the tokenizer when it first needs it."""

    def __init__(self, plan: Plan, work: WorkFolder):
        self.plan = plan
        self.work = work

    @cached_property
    def encoder(self) -> Encoder:
        settings = self.plan.tokenizer
        bos = None if settings["bos"] is None else str(settings["bos"])
        path = Path(self.plan.tokenizer_path)
        return load_encoder(path, bos, str(settings["eod"]), self.plan.backend)

    def scan(self, index: int, report: Report) -> None:
        source = self.plan.inputs[index]
        found = reading.scan(source, self.plan.options, lambda size: report(Step(read_bytes=size)))
        self.work.commit_scan(index, found)

    def tokenize(self, unit: Unit, report: Report) -> None:
        if self.work.receipt(unit) is not None:
            return
        fresh = self.work.fresh_folder(unit)
        scan = self.work.scan(unit.input)
        source = self.plan.inputs[unit.input]
        writer = _UnitWriter(fresh, self.encoder, self.plan, source.name, report)
        found = reading.items(source, scan.kind, unit, self.plan.options)
        skip = skipped_numbers(self.plan.skip_path, source.name, scan.sha256)
        cleaner = Cleaner(self.plan.options, source.partition)
        for item in selected(found, cleaner, self.work.sampling(), skip):
            writer.add(item)
        receipt = {"unit": unit.name, "repaired": cleaner.repaired, **writer.close(unit.end)}
        self.work.commit_unit(unit, fresh, receipt)

    def hash(self, unit: Unit, report: Report) -> None:
        """The hashes of every text of a unit (see dedup)."""
        from data_prep.dedup import hashed

        scan = self.work.scan(unit.input)
        found = reading.items(self.plan.inputs[unit.input], scan.kind, unit, self.plan.options)
        rows = hashed(found, self.plan.options.near)
        fresh = self.work.fresh_folder(unit)
        np.save(fresh / "hashes.npy", rows)
        files.sync_file(fresh / "hashes.npy")
        texts = rows.shape[1]
        self.work.commit_unit(unit, fresh, {"unit": unit.name, "texts": texts})
        report(Step(read_bytes=unit.end - unit.start, documents=texts))


class _Part:
    """The documents of one split of a unit: `<split>.bin`, int32 `.lengths`, uint64 `.hashes`.

    The files are there only where documents are; the hashes only where they will be needed.
    """

    def __init__(self, folder: Path, split: str, with_hashes: bool):
        suffixes = ("bin", "lengths", "hashes") if with_hashes else ("bin", "lengths")
        self._paths = [folder / f"{split}.{suffix}" for suffix in suffixes]
        self._files: list[BinaryIO] = []
        self._sha256 = hashlib.sha256()
        self.documents = self.tokens = self.bytes = 0

    def add(self, documents: list[np.ndarray], texts: list[str]) -> None:
        if not documents:
            return
        if not self._files:
            self._files = [path.open("wb") for path in self._paths]
        tokens = np.concatenate(documents)
        lengths = np.array([len(ids) for ids in documents], dtype="<i4")
        columns = [tokens, lengths]
        if len(self._files) > len(columns):
            columns.append(np.array([sampling_hash(text) for text in texts], dtype="<u8"))
        for file, values in zip(self._files, columns, strict=True):
            file.write(values.data)
        self._sha256.update(tokens.data)
        self.documents += len(documents)
        self.tokens += len(tokens)
        self.bytes += tokens.nbytes

    def close(self) -> dict:
        for file in self._files:
            file.flush()
            os.fsync(file.fileno())
            file.close()
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "bytes": self.bytes,
            "sha256": self._sha256.hexdigest(),
        }


class _UnitWriter:
    """Batches the texts of a unit, encodes them, and writes its parts and rejects."""

    def __init__(self, folder: Path, encoder: Encoder, plan: Plan, name: str, report: Report):
        self.encoder = encoder
        self.options = plan.options
        self.name = name
        self.report = report
        self.records = 0
        self.skipped: Counter[str] = Counter()
        self.batch: list[Item] = []
        self.batch_characters = 0
        self.position = 0
        self.bad_reported = 0
        self.folder = folder
        self.rejects: list[str] = []
        with_hashes = self.options.max_tokens > 0
        self.parts = {split: _Part(folder, split, with_hashes) for split in SPLITS}

    def add(self, item: Item) -> None:
        self.records += 1
        if self.records == 1:
            self.position = item.offset
        if item.text is None:
            self._skip(item)
            return
        self.batch.append(item)
        self.batch_characters += len(item.text)
        if self.batch_characters >= _BATCH_CHARACTERS or len(self.batch) >= _BATCH_DOCUMENTS:
            self._encode(item.offset)

    def _skip(self, item: Item) -> None:
        skipped = item.skipped
        self.skipped[skipped.reason] += 1
        if not skipped.is_bad:
            return
        place = f"{self.name}: line {item.number + 1}, offset {item.offset}"
        if self.options.bad_records == "stop":
            raise DataError(
                f"{place}: {skipped.reason} ({skipped.detail}); repair the file, or go on with "
                "--bad-records skip --max-bad 0.1%"
            )
        row = {
            "path": self.name,
            "line": item.number + 1,
            "offset": item.offset,
            "reason": skipped.reason,
            "detail": skipped.detail,
        }
        self.rejects.append(files.json_line(row))

    def _encode(self, position: int) -> None:
        """Encode what is batched; `position` is how far the unit has been read."""
        documents = self._encoded()
        splits = [split_of(item.text, self.options) for item in self.batch]
        for name, part in self.parts.items():
            chosen = [index for index, split in enumerate(splits) if split == name]
            texts = [self.batch[index].text for index in chosen]
            part.add([documents[index] for index in chosen], texts)
        bad = self.bad
        self.report(
            Step(
                read_bytes=position - self.position,
                documents=len(documents),
                tokens=sum(len(ids) for ids in documents),
                bad=bad - self.bad_reported,
            )
        )
        self.position, self.bad_reported = position, bad
        self.batch.clear()
        self.batch_characters = 0

    def _encoded(self) -> list[np.ndarray]:
        try:
            return self.encoder.encode([item.text for item in self.batch])
        except Exception as error:
            culprit = next((item for item in self.batch if not self._encodes(item)), self.batch[0])
            raise DataError(
                f"{self.name}: line {culprit.number + 1}, offset {culprit.offset}: the tokenizer "
                f"fails on this text ({error})"
            ) from error

    def _encodes(self, item: Item) -> bool:
        try:
            self.encoder.encode([item.text])
        except Exception:
            return False
        return True

    @property
    def bad(self) -> int:
        return sum(n for reason, n in self.skipped.items() if reason in records.BAD_REASONS)

    def close(self, end: int) -> dict:
        self._encode(end)
        if self.rejects:
            files.write_text(self.folder / "rejects.jsonl", "".join(self.rejects))
        return {
            "records": self.records,
            "skipped": dict(sorted(self.skipped.items())),
            "parts": {split: part.close() for split, part in self.parts.items()},
        }
