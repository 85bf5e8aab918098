"""One save: from live tensors to a committed folder.

Every process of every replica takes part:

1. stage    on the training thread: plan each folder together within the replica, and, for a
            background save, copy the tensors.
2. write    on any thread: each rank writes and hashes its own files, the first rank of each replica
            the folder's index and the counters.
3. commit   the first rank of all writes the manifest and renames the folder: the one moment in
            which the checkpoint begins to exist, for all replicas at once.

Where replicas write in different places, each first writes its manifest (it is prepared), the chair
of all decides once all have, and then each renames its own folder; a step that only some renamed
before an accident does not count.

If anything fails anywhere, the folder is discarded and every process learns the reason.
"""

import json
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.storage import WriteResult

from megatron_ext.blocks import Block
from megatron_ext.checkpoint import folders, manifest
from megatron_ext.checkpoint.agreement import Council, Failure
from megatron_ext.checkpoint.manifest import FileRecord, Manifest
from megatron_ext.checkpoint.state import RANDOM_KIND, SHARED_KINDS, StateTensor, TrainingState
from megatron_ext.checkpoint.storage import Writing
from megatron_ext.errors import PeerError, TrainingError
from megatron_ext.replicas import Replicas

COUNTERS = "counters.json"
SHARED = "shared"

# Room for indices and manifest, and for what else writes to the disk meanwhile.
_SPARE_BYTES = 64 * 2**20


# Network file systems may show another machine's files late.
_VISIBLE_SECONDS = 10

ToHost = Callable[[list[StateTensor]], list[StateTensor]]
"""Brings tensors to host memory, see staging.py."""


def replica_folder(replica: int) -> str:
    """Where in a checkpoint the state of one replica lies."""
    return f"replica-{replica}"


@dataclass(frozen=True)
class Written:
    """A committed checkpoint."""

    path: Path
    step: int
    bytes: int


@dataclass
class _Part:
    """What a rank tells about its part in the save."""

    results: dict[str, list[WriteResult]] = field(default_factory=dict)  # by folder
    files: dict[str, FileRecord] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class Form:
    """What a save writes.

    Attributes:
        name: of the folder.
        light: only what the replicas share.
        together: all replicas write one folder; else each writes all that it needs into its own.
        latest: whether `latest` is to name it.
    """

    name: str
    light: bool = False
    together: bool = True
    latest: bool = True


class Save:
    """One rank's part in one save."""

    def __init__(
        self,
        root: Path,
        step: int,
        form: Form,
        replicas: Replicas,
        observe: Callable[[str], None],
        prune: Callable[[Path], None],
    ) -> None:
        """`prune` removes what need not stay below `root`, once the new checkpoint is there."""
        self._root = root
        self._form = form
        self._step = step
        self._replicas = replicas
        self._observe = observe
        self._prune = prune
        self._partial = root / f"{form.name}{folders.PARTIAL}"
        self._failure = Failure()
        self._writings: dict[str, Writing] = {}
        self._bytes = 0
        self._counters = b""
        self._files: dict[str, FileRecord] = {}  # of the whole replica, on its first rank

    def stage(self, state: TrainingState, to_host: ToHost) -> None:
        """Plan what this rank writes. Collective in the replica; a failure is raised later."""
        # As text already, because training goes on to change what it counts.
        self._counters = json.dumps(state.counters(), indent=1, allow_nan=False).encode()
        parts = self._parts(state)
        self._bytes = sum(tensor.nbytes for part in parts.values() for _, _, tensor in part)
        if not self._make_folders(parts):
            return
        for name, tensors in parts.items():
            with self._failure.catch():
                self._writings[name] = Writing(self._partial / name, to_host(tensors))
        self._observe("staged")

    def write_and_commit(self, in_replica: Council, everyone: Council) -> Written:
        """Write, agree, commit. Raises TrainingError on every process if any of them failed."""
        what = f"checkpoint of step {self._step}"
        word = (self._bytes, shutil.disk_usage(self._root).free, self._failure.error)
        self._cleaned(lambda: everyone.decide(f"{what}: space", word, self._check_space))
        try:
            in_replica.decide(f"{what}: files", self._write(), self._finish_folders)
        except PeerError as error:
            self._failure.error = str(error)
        word = (self._files, self._failure.error)
        patience = 3  # more than another replica may have needed to see that it lacks a rank
        if self._form.together:
            return everyone.decide(f"{what}: commit", word, self._commit, patience)
        self._cleaned(
            lambda: everyone.decide(f"{what}: prepare", self._prepare(), self._judge, patience)
        )
        return everyone.decide(f"{what}: commit", self._commit_prepared(), self._judge)

    def _parts(self, state: TrainingState) -> dict[str, list[StateTensor]]:
        """What this rank writes into which folder. All ranks of a replica name the same folders.

        A shared kind is written by one replica in each place; in one place the kinds go round the
        replicas.
        """
        tensors = list(state.tensors())
        rng = state.rng()
        place = Block(str(self._replicas.rank), (rng.numel(),), (0,), (rng.numel(),))
        own = [tensor for tensor in tensors if tensor[0] not in SHARED_KINDS]
        parts = {}
        if not self._form.light:
            parts[replica_folder(self._replicas.index)] = [*own, (RANDOM_KIND, place, rng)]

        present: list[set[str]] = [set()] * self._replicas.world_size
        dist.all_gather_object(present, {kind for kind, _, _ in tensors})
        for number, kind in enumerate(SHARED_KINDS):
            is_writer = number % self._replicas.count == self._replicas.index
            if (is_writer or not self._form.together) and any(kind in kinds for kinds in present):
                parts[f"{SHARED}/{kind}"] = [tensor for tensor in tensors if tensor[0] == kind]
        return parts

    def _make_folders(self, names: dict[str, Any]) -> bool:
        """The replica's first rank makes its folders, fresh. All its ranks learn whether."""
        if self._replicas.rank == 0:
            with self._failure.catch():
                for name in {*names, replica_folder(self._replicas.index)}:
                    (self._partial / name).mkdir(parents=True)
        outcome = [self._failure.error]
        dist.broadcast_object_list(outcome, src=0)
        self._failure.error = outcome[0]
        return self._failure.error is None

    def _check_space(self, words: list[tuple[int, int, str | None]]) -> None:
        """Judged before anything is written."""
        self._give_up_if([error for _, _, error in words])
        ranks = len(words) if self._form.together else self._replicas.world_size
        for first in range(0, len(words), ranks):
            needed_bytes = sum(size for size, _, _ in words[first : first + ranks]) + _SPARE_BYTES
            free_bytes = words[first][1]
            if free_bytes < needed_bytes:
                where = "" if self._form.together else f"of replica {first // ranks} "
                self._give_up_if(
                    [
                        f"it needs {needed_bytes / 1e9:.2f} GB and {self._root} {where}has "
                        f"{free_bytes / 1e9:.2f} GB free; free space, or lower checkpoint.keep_last"
                    ]
                )
        self._observe("space")

    def _write(self) -> _Part:
        """Write and hash this rank's files."""
        part = _Part()
        with self._failure.catch():
            for folder, writing in self._writings.items():
                part.results[folder], records = writing.write()
                part.files |= {f"{folder}/{name}": record for name, record in records.items()}
                self._observe("file")
        part.error = self._failure.error
        return part

    def _finish_folders(self, parts: list[_Part]) -> None:
        """On the first rank of a replica: what its folders need besides the tensors' files."""
        self._failure.error = next((part.error for part in parts if part.error), None)
        if self._failure.error:
            return
        for part in parts:
            self._files.update(part.files)
        with self._failure.catch():
            for folder, writing in self._writings.items():
                for name in writing.finish([part.results[folder] for part in parts]):
                    self._files[f"{folder}/{name}"] = self._record(f"{folder}/{name}")
                self._observe("index")
            counters = f"{replica_folder(self._replicas.index)}/{COUNTERS}"
            manifest.write_durably(self._partial / counters, self._counters)
            self._files[counters] = self._record(counters)
            self._observe("counters")

    def _commit(self, words: list[tuple[dict[str, FileRecord], str | None]]) -> Written:
        """On the first rank of all: the point of no return."""
        self._give_up_if([error for _, error in words])
        content = self._content({name: file for files, _ in words for name, file in files.items()})
        self._give_up_if([self._invisible(content)])
        try:
            manifest.write(self._partial, content)
            self._observe("manifest")
            return self._rename(content)
        except OSError as error:
            self._give_up_if([str(error)])
            raise

    def _prepare(self) -> str | None:
        """On the first rank of a replica in its own place: all but the rename. Returns an error."""
        if self._replicas.rank == 0 and not self._failure.error:
            with self._failure.catch():
                content = self._content(self._files)
                if error := self._invisible(content):
                    return error
                manifest.write(self._partial, content)
                self._observe("manifest")
        return self._failure.error

    def _commit_prepared(self) -> str | Written | None:
        """On the first rank of a replica, once all are prepared. Returns an error, or what is."""
        if self._replicas.rank:
            return None
        self._observe("prepared")
        with self._failure.catch():
            return self._rename(manifest.read(self._partial))
        return self._failure.error

    def _judge(self, words: list[str | Written | None]) -> Written | None:
        self._give_up_if([word for word in words if isinstance(word, str)])
        return next((word for word in words if isinstance(word, Written)), None)

    def _cleaned(self, decide: Callable[[], Any]) -> None:
        """Decide together; where that fails, each replica that has its own place clears it."""
        try:
            decide()
        except TrainingError:
            if not self._form.together and self._replicas.rank == 0 and self._partial.exists():
                folders.discard(self._partial)
            raise

    def _rename(self, content: Manifest) -> Written:
        path = folders.commit(self._partial)
        self._observe("committed")
        if self._form.latest:
            folders.point_latest(self._root, path)
        self._observe("latest")
        self._prune(self._root)
        self._observe("pruned")
        return Written(path, self._step, content.total_bytes)

    def _content(self, files: dict[str, FileRecord]) -> Manifest:
        about = {
            "step": self._step,
            "written": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "layout": layout_of(self._replicas),
            "light": self._form.light,
            "replicas": "all" if self._form.together else [self._replicas.index],
            "torch": torch.__version__,
        }
        return Manifest(about, files)

    def _invisible(self, content: Manifest) -> str | None:
        """What is wrong if the processes do not all write to the same storage."""
        deadline = time.monotonic() + _VISIBLE_SECONDS
        for name, file in content.files.items():
            path = self._partial / name
            while not (path.exists() and path.stat().st_size == file.bytes):
                if time.monotonic() > deadline:
                    return (
                        f"{name} was written, but the first process does not see it below "
                        f"{self._root}; put run.dir on storage that all processes share"
                    )
                time.sleep(0.1)
        return None

    def _record(self, name: str) -> FileRecord:
        return manifest.record(self._partial / name)

    def _give_up_if(self, errors: list[str | None]) -> None:
        """Discard everything and raise, if there is any error."""
        error = next((error for error in errors if error), None)
        if error is None:
            return
        if self._partial.exists():
            folders.discard(self._partial)
        raise TrainingError(
            f"checkpoint of step {self._step} was not saved (earlier ones are untouched): {error}"
        )


def layout_of(replicas: Replicas) -> dict[str, int]:
    """How a run is cut, for the manifest."""
    names = ("replicas", "tp", "pp", "cp", "dp", "ep", "interleave")
    return {name: getattr(replicas.parallel, name) for name in names}
