"""A committed checkpoint as one process sees it, without launcher and process groups."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, FileSystemReader
from torch.distributed.checkpoint import load as load_tensors

from megatron_ext.checkpoint import folders, index, manifest
from megatron_ext.checkpoint.agreement import describe
from megatron_ext.checkpoint.saving import COUNTERS, SHARED, replica_folder
from megatron_ext.checkpoint.state import AVERAGE_KIND, MASTER_KIND, RANDOM_KIND
from megatron_ext.checkpoint.storage import each_rank_by_itself
from megatron_ext.errors import DataError

# So much is read at a time.
_BATCH_BYTES = 2**30


class Saved:
    """What one checkpoint holds.

    Raises DataError if its manifest is missing or damaged. Only `damages` looks at all the bytes.
    """

    def __init__(self, path: Path):
        self.path = path
        self.manifest = manifest.read(path)

    @property
    def step(self) -> int:
        """Inner steps that had been taken."""
        return self.manifest.about["step"]

    @property
    def layout(self) -> dict[str, int]:
        """How the run that saved was cut."""
        return self.manifest.about["layout"]

    @cached_property
    def folders(self) -> list[str]:
        """The parts of the checkpoint that hold tensors: "replica-0", …, "shared/anchor", …"""
        indices = [PurePosixPath(name) for name in self.manifest.files]
        return sorted(str(path.parent) for path in indices if path.name == index.NAME)

    @property
    def global_folder(self) -> tuple[str, str]:
        """Folder and kind of the global weights: the anchor, GPA's average, or the masters."""
        anchor = f"{SHARED}/anchor"
        if anchor in self.folders:
            return anchor, "anchor"
        folder = replica_folder(0)
        kinds = {key.split(".")[0] for key in self.entries(folder)}
        return folder, AVERAGE_KIND if AVERAGE_KIND in kinds else MASTER_KIND

    def counters(self, replica: int = 0) -> dict[str, Any]:
        """What a replica counted: step, position in the round, identity, …"""
        path = self.path / replica_folder(replica) / COUNTERS
        try:
            return json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise DataError(f"{path} cannot be read: {describe(error)}") from None

    def entries(self, folder: str) -> dict[str, index.Entry]:
        """The tensors of a folder by key, "kind.name"; random states left out."""
        return {
            key: entry
            for key, entry in index.read(self.path / folder).items()
            if not key.startswith(f"{RANDOM_KIND}.")
        }

    def read(self, folder: str, keys: list[str]) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors of a folder, one after another, in the order of `keys`."""
        entries = index.read(self.path / folder)
        for batch in _batches(keys, entries):
            tensors = {
                key: torch.empty(entries[key].shape, dtype=entries[key].dtype) for key in batch
            }
            try:
                with each_rank_by_itself():
                    reader = FileSystemReader(self.path / folder)
                    load_tensors(tensors, storage_reader=reader, no_dist=True)
            except (CheckpointException, Exception) as error:
                raise DataError(f"{self.path / folder} cannot be read: {describe(error)}") from None
            yield from tensors.items()

    @property
    def global_bytes(self) -> int:
        """Size of the global weights."""
        folder, kind = self.global_folder
        entries = self.entries(folder).items()
        return sum(entry.bytes for key, entry in entries if key.startswith(f"{kind}."))

    def global_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the global weights by logical name."""
        folder, kind = self.global_folder
        entries = self.entries(folder).items()
        return {
            key.removeprefix(f"{kind}."): entry.shape
            for key, entry in sorted(entries)
            if key.startswith(f"{kind}.")
        }

    def global_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The global weights by logical name, in order, each a whole fp32 tensor."""
        folder, kind = self.global_folder
        keys = [f"{kind}.{name}" for name in self.global_shapes()]
        for key, tensor in self.read(folder, keys):
            yield key.removeprefix(f"{kind}."), tensor

    def damages(self, progress: Callable[[int], None] = lambda size_bytes: None) -> list[str]:
        """One line for each damaged file; reads every byte. `progress` is told what was read."""
        found = []
        for name, file in self.manifest.files.items():
            found += manifest.damages(self.path, self.manifest, [name])
            progress(file.bytes)
        if not found:
            for folder in self.folders:
                try:
                    index.read(self.path / folder)
                except DataError as error:
                    found.append(str(error))
        return found

    def unknown_files(self) -> list[str]:
        """Files that the manifest does not know, and that nothing reads."""
        return manifest.unknown_files(self.path, self.manifest)


@dataclass(frozen=True)
class Difference:
    """How far a tensor of one checkpoint is from that of another."""

    folder: str
    key: str
    largest: float
    """Largest absolute difference; NaN where either tensor holds one."""
    relative: float
    """Norm of the difference by the norm of the first; infinite where only that is zero."""
    remark: str = ""
    """Why they cannot be compared, where they cannot."""


def differences(first: Saved, second: Saved, kinds: list[str]) -> Iterator[Difference]:
    """The tensors that are not bit-equal, of the given kinds (empty: of all)."""
    for folder in sorted({*first.folders, *second.folders}):
        here, there = (
            saved.entries(folder) if folder in saved.folders else {} for saved in (first, second)
        )
        keys = [key for key in sorted({*here, *there}) if not kinds or key.split(".")[0] in kinds]
        comparable = [key for key in keys if _same_form(here.get(key), there.get(key))]
        for key in keys:
            if key not in comparable:
                remark = _form_text(here.get(key), there.get(key))
                yield Difference(folder, key, math.nan, math.nan, remark)
        if not comparable:
            continue
        pairs = zip(first.read(folder, comparable), second.read(folder, comparable), strict=True)
        for (key, one), (_, other) in pairs:
            if not torch.equal(one.view(torch.uint8), other.view(torch.uint8)):
                yield _compare(folder, key, one, other)


def find(path: Path) -> list[Path]:
    """The checkpoints that a user's path means, oldest first: a run's, a folder's, or one itself.

    Raises DataError if there is none.
    """
    names_one = any(folders.step_of(path, light) is not None for light in (False, True))
    if (path / manifest.NAME).is_file() or names_one:
        if not path.is_dir():
            raise DataError(f"{path}: there is no such checkpoint")
        return [path]
    for folder in (path, path / "checkpoints"):
        if found := folders.committed(folder):
            return found
    raise DataError(f"{path}: there is no checkpoint there")


def _batches(keys: list[str], entries: dict[str, index.Entry]) -> Iterator[list[str]]:
    batch, size_bytes = [], 0
    for key in keys:
        batch.append(key)
        size_bytes += entries[key].bytes
        if size_bytes >= _BATCH_BYTES:
            yield batch
            batch, size_bytes = [], 0
    if batch:
        yield batch


def _same_form(one: index.Entry | None, other: index.Entry | None) -> bool:
    return (
        one is not None
        and other is not None
        and (one.shape, one.dtype) == (other.shape, other.dtype)
    )


def _form_text(one: index.Entry | None, other: index.Entry | None) -> str:
    if one is None or other is None:
        return f"only in the {'second' if one is None else 'first'}"
    return f"{list(one.shape)} {one.dtype} against {list(other.shape)} {other.dtype}"


def _compare(folder: str, key: str, one: Tensor, other: Tensor) -> Difference:
    one, difference = one.double(), (one.double() - other.double())
    norm = one.norm().item()
    moved = difference.norm().item()
    return Difference(
        folder, key, difference.abs().max().item(), moved / norm if norm else math.inf
    )
