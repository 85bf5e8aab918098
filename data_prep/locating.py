"""`locate`: from a document of an output to the line it came from, and back."""

import itertools
import random
from collections.abc import Iterator
from pathlib import Path

from data_prep import outputs, reading, streams
from data_prep.cleaning import Cleaner
from data_prep.errors import DataError, UsageError
from data_prep.indexed import IndexedFile
from data_prep.inspection import encoder_of
from data_prep.plan import Input, Options, Unit
from data_prep.reading import Item
from data_prep.selection import selected, skipped_numbers, split_of


class Provenance:
    """A finished output together with the inputs that it was made from.

    `root`: where the inputs lie now (default: where they lay).
    """

    def __init__(self, out: Path, root: Path | None = None):
        self.out = out
        self.manifest = outputs.read_manifest(out)
        self.rows = outputs.read_provenance(out)
        self.root = root or Path(self.manifest["root"])
        if "merged" in self.manifest["options"]:
            raise UsageError(
                f"{out}: was merged from different runs; ask the output of the run in question"
            )
        self.options = Options.from_dict(self.manifest["options"])
        self.encoder = encoder_of(out, self.manifest)
        self.splits = {row["prefix"]: row["split"] for row in self.manifest["outputs"]}

    def documents_of(self, row: dict) -> Iterator[Item]:
        """The records that gave the documents of one row of provenance, in order."""
        source = self._input(row["input"])
        split = self.splits[row["prefix"]]
        for item in self._items(row, source):
            if item.text is not None and split_of(item.text, self.options) == split:
                yield item

    def _items(self, row: dict, source: Input) -> Iterator[Item]:
        unit = Unit(row["input"], 0, row["start"], row["end"], row["first_record"])
        found = reading.items(source, streams.file_kind(source.path), unit, self.options)
        skip = skipped_numbers(
            self.manifest["skip_path"], source.name, self.manifest["inputs"][row["input"]]["sha256"]
        )
        cleaner = Cleaner(self.options, source.partition)
        return selected(found, cleaner, self.manifest["sampled_below"], skip)

    def _input(self, number: int) -> Input:
        row = self.manifest["inputs"][number]
        path = self.root / row["path"]
        if not path.is_file():
            raise UsageError(f"{path}: is not there; say with --root where the inputs lie now")
        status = path.stat()
        if status.st_size != row["bytes"]:
            raise DataError(f"{path}: is not the file that was tokenised (its size differs)")
        return Input(row["path"], str(path), row["partition"], status.st_size, status.st_mtime_ns)

    def line_of(self, prefix: str, document: int) -> dict:
        """The file and line that gave a document, checked by tokenising it again."""
        if prefix not in self.splits:
            raise UsageError(f"{self.out}: has no output {prefix!r}, but {', '.join(self.splits)}")
        for row in self.rows:
            place = document - row["first_document"]
            if row["prefix"] == prefix and 0 <= place < row["documents"]:
                for number, item in enumerate(self.documents_of(row)):
                    if number == place:
                        return self._described(row, document, item)
        raise UsageError(f"{prefix}: has no document {document}")

    def document_of(self, name: str, line: int) -> dict:
        """The document that a line (from 1) of an input gave."""
        names = [row["path"] for row in self.manifest["inputs"]]
        if name not in names:
            raise UsageError(f"{self.out}: no input is called {name!r} (as {names[0]!r} is)")
        number = names.index(name)
        before = [r for r in self.rows if r["input"] == number and r["first_record"] < line]
        start = max((row["start"] for row in before), default=0)
        for row in (row for row in before if row["start"] == start):
            for place, item in enumerate(self.documents_of(row)):
                if item.number == line - 1:
                    return self._described(row, row["first_document"] + place, item)
        raise UsageError(f"{name}: line {line} gave no document (see rejects.jsonl for the reason)")

    def spot_check(self, units: int = 4, documents: int = 8) -> int:
        """Tokenise the first documents of a few units again; returns how many were compared.

        Raises:
            DataError: names the document that the input does not give.
        """
        compared = 0
        for row in random.Random(0).sample(self.rows, min(units, len(self.rows))):
            found = itertools.islice(self.documents_of(row), documents)
            for place, item in enumerate(found):
                self._described(row, row["first_document"] + place, item)
                compared += 1
        return compared

    def _described(self, row: dict, document: int, item: Item) -> dict:
        stored = IndexedFile(self.out / row["prefix"])[document].tolist()
        if self.encoder.encode([item.text])[0].tolist() != stored:
            raise DataError(
                f"{self.out / row['prefix']}.bin: document {document} is not what line "
                f"{item.number + 1} of {self.manifest['inputs'][row['input']]['path']} gives"
            )
        return {
            "prefix": row["prefix"],
            "document": document,
            "input": self.manifest["inputs"][row["input"]]["path"],
            "line": item.number + 1,
            "offset": item.offset,
            "tokens": len(stored),
            "text": item.text[:200],
        }
