"""What a run will do: its inputs, the options its output depends on, and its units of work."""

import dataclasses
import functools
import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from fractions import Fraction
from pathlib import Path

from data_prep import streams
from data_prep.errors import UsageError
from data_prep.sources import Source

FORMAT = 1
_TEXT_PER_COMPRESSED = 4  # bytes, about, of a byte on disk


@dataclass(frozen=True)
class Options:
    """Everything, tokenizer and inputs aside, that the output depends on."""

    text_column: str = "text"
    where: str = ""
    validation: Fraction = Fraction(0)  # share of the documents that is held out
    unit_bytes: int = 128 << 20  # 0: see settled
    max_record_bytes: int = 64 << 20
    bad_records: str = "stop"  # or "skip"
    max_bad: Fraction = Fraction(1, 1000)  # share of the records, with bad_records="skip"
    max_tokens: int = 0  # 0: all
    skip: str = ""  # fingerprint of a list of records to leave out
    clean: str = ""  # rules of data_prep.cleaning, comma-separated
    language: str = "en"  # what the rule `language` keeps: a code of fastText's lid.176
    clean_except: str = "quality=high"  # partitions that `length` and `repetition` leave alone
    near: bool = False  # dedup: near copies too
    documents_per_output: int = 2**31 - 1  # GPTDataset's document index is int32

    def as_dict(self) -> dict:
        return {
            key: str(value) if isinstance(value, Fraction) else value
            for key, value in asdict(self).items()
        }

    @staticmethod
    def from_dict(values: dict) -> "Options":
        exact = {key: Fraction(values[key]) for key in ("validation", "max_bad")}
        return Options(**{**values, **exact})


@dataclass(frozen=True)
class Input:
    """One input file as it was when the run began. `mtime_ns` only saves re-reading it."""

    name: str
    path: str
    partition: str
    bytes: int
    mtime_ns: int

    @staticmethod
    def of(source: Source) -> "Input":
        status = Path(source.path).stat()
        return Input(source.name, source.path, source.partition, status.st_size, status.st_mtime_ns)

    def is_untouched(self) -> bool:
        status = Path(self.path).stat()
        return (status.st_size, status.st_mtime_ns) == (self.bytes, self.mtime_ns)


@dataclass(frozen=True)
class Scan:
    """What one reading of an input found, before any of it is tokenised.

    `size` and the units' bounds count decompressed bytes, or rows of a parquet file.
    `first_records[i]` is the number of the first record that starts in unit i.
    """

    kind: str
    sha256: str
    size: int
    text_bytes: int  # bytes that hold the texts: decompressed lines, or the parquet column
    records: int
    unit_size: int
    first_records: tuple[int, ...]

    def as_dict(self) -> dict:
        return asdict(self)

    @staticmethod
    def from_dict(values: dict) -> "Scan":
        return Scan(**{**values, "first_records": tuple(values["first_records"])})


@dataclass(frozen=True)
class Unit:
    """The records of one input that start in `[start, end)`: the grain of work and of restart."""

    input: int
    number: int
    start: int
    end: int
    first_record: int

    @property
    def name(self) -> str:
        return f"{self.input:06d}/{self.number:05d}"


@dataclass(frozen=True)
class Plan:
    """A run. Two runs with equal `identity()` write the same bytes."""

    options: Options
    inputs: tuple[Input, ...]
    tokenizer: dict  # encoder.Identity as a dict
    tokenizer_path: str
    root: str  # the folder that the inputs' names are relative to
    shard: tuple[int, int] = (0, 1)  # index and count
    skip_path: str = ""
    backend: str = "reference"  # gives the same ids as any other, so it is no part of the identity

    def identity(self) -> dict:
        """JSON-like; excludes where things lie, when they were touched, and how work is spread."""
        return {
            "format": FORMAT,
            "options": self.options.as_dict(),
            "tokenizer": tokenizer_identity(self.tokenizer),
            "inputs": {item.name: f"{item.bytes} bytes" for item in self.inputs},
            "shard": f"{self.shard[0]}/{self.shard[1]}",
        }

    def units(self, scans: dict[int, Scan]) -> Iterator[Unit]:
        """This shard's units in output order. `scans`: by input; absent ones give no unit."""
        for index in sorted(scans):
            scan = scans[index]
            for number, first in enumerate(scan.first_records):
                start = number * scan.unit_size
                end = min(start + scan.unit_size, scan.size)
                if self._shard_of(index, start, scan.size) == self.shard[0]:
                    yield Unit(index, number, start, end, first)

    def inputs_of_shard(self) -> list[int]:
        """The inputs that hold units of this shard, found without reading them."""
        return [
            index
            for index, item in enumerate(self.inputs)
            if self._shard_of(index, 0, 1) <= self.shard[0] <= self._shard_of(index, 1, 1)
        ]

    def _shard_of(self, index: int, position: int, size: int) -> int:
        """Shards are contiguous ranges of the inputs' bytes laid end to end."""
        before = self._bytes_before[index]
        place = before * size + self.inputs[index].bytes * position
        whole = max(self._bytes_before[-1], 1) * max(size, 1)
        return min(place * self.shard[1] // whole, self.shard[1] - 1)

    @functools.cached_property
    def _bytes_before(self) -> list[int]:
        return [0, *itertools.accumulate(item.bytes for item in self.inputs)]


def tokenizer_identity(described: dict) -> dict:
    """What of a tokenizer's description decides the ids."""
    keys = ("kind", "fingerprint", "vocab_size", "bos", "eod", "probe_ids")
    return {key: described.get(key) for key in keys}


def settled(options: Options, inputs: tuple[Input, ...]) -> Options:
    """Options whose `unit_bytes`, where it is 0, follows from the inputs: 16 units or more in all.

    Never from the number of workers, on which nothing that is written may depend. Larger units
    restart more coarsely; smaller ones decompress more often what lies before them.
    """
    if options.unit_bytes:
        return options
    plain = {item: streams.file_kind(item.path) == "plain" for item in inputs}
    text = sum(item.bytes * (1 if plain[item] else _TEXT_PER_COMPRESSED) for item in inputs)
    grain = 1 << max(text // 16, 1).bit_length() - 1
    return dataclasses.replace(options, unit_bytes=min(max(grain, 4 << 20), 128 << 20))


def fraction(text: str, option: str) -> Fraction:
    """`0.5%` or `0.005` exactly, so that no rounding decides what a document's hash decides."""
    try:
        value = Fraction(text[:-1]) / 100 if text.endswith("%") else Fraction(text)
    except (ValueError, ZeroDivisionError) as error:
        raise UsageError(f"{option} {text!r}: is no share; write 0.5% or 0.005") from error
    if not 0 <= value < 1:
        raise UsageError(f"{option} {text!r}: must be at least 0 and below 1 (0.5% or 0.005)")
    return value


def differences(old: dict, new: dict, prefix: str = "") -> list[str]:
    """One line for each leaf in which two identities differ."""
    lines = []
    for key in sorted({*old, *new}):
        name = f"{prefix}{key}"
        before, after = old.get(key), new.get(key)
        if isinstance(before, dict) and isinstance(after, dict):
            lines += differences(before, after, f"{name}.")
        elif before != after:
            shown = [
                "absent" if value is None else json.dumps(value, ensure_ascii=False)
                for value in (before, after)
            ]
            lines.append(f"{name}: was {shown[0][:70]}, now {shown[1][:70]}")
    return lines
