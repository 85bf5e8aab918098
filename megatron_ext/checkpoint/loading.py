"""One load: every file checked, then every rank reads what overlaps its blocks."""

import json
import logging
from pathlib import Path
from typing import Any, Literal

import torch

from megatron_ext.blocks import Block
from megatron_ext.checkpoint import index, manifest, places, storage
from megatron_ext.checkpoint.agreement import Council, Failure
from megatron_ext.checkpoint.manifest import Manifest
from megatron_ext.checkpoint.saved import Saved
from megatron_ext.checkpoint.saving import COUNTERS, SHARED, layout_of, replica_folder
from megatron_ext.checkpoint.state import (
    MASTER_KIND,
    OPTIONAL_KINDS,
    RANDOM_KIND,
    RESIDUAL_KINDS,
    SHARED_KINDS,
    StateTensor,
    TrainingState,
)
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.replicas import Replicas

logger = logging.getLogger(__name__)


def verify(path: Path, replicas: Replicas, everyone: Council, one_place: bool) -> Manifest:
    """Check every file of a checkpoint once, spread over all processes that see the same place.

    Raises, on every process, DataError naming what is damaged, and ConfigError where a replica
    finds another's checkpoint in its place. Files that the manifest does not know are named in a
    warning; nothing reads them.
    """
    damages, misfits, content = [], [], None
    try:
        content = manifest.read(path)
        if one_place:
            ranks = replicas.count * replicas.world_size
            mine = manifest.share(content, replicas.launcher_rank, ranks)
        else:
            mine = manifest.share(content, replicas.rank, replicas.world_size)
            misfits = places.misfits(content, replicas)
        damages = manifest.damages(path, content, mine)
    except DataError as error:
        damages = [str(error)]
    word = (damages, misfits)
    everyone.decide(f"check of {path}", word, lambda words: _refuse_damage(path, words))
    assert content is not None
    if everyone.is_chair and (unknown := manifest.unknown_files(path, content)):
        logger.warning(
            "%s holds files that its manifest does not know, and that are not read: %s",
            path,
            ", ".join(unknown),
        )
    return content


def load_weights(
    path: Path, tensors: list[StateTensor], in_replica: Council, everyone: Council
) -> None:
    """Fill a replica's masters with the global weights of a checkpoint that `verify` found whole.

    Raises, on every process, ConfigError if it is of another model, and DataError if reading fails.
    """
    folder, kind = Saved(path).global_folder
    wanted = [(kind, block, tensor) for _, block, tensor in tensors]
    stored = {
        key: (entry.shape, entry.dtype)
        for key, entry in index.read(path / folder).items()
        if key.startswith(f"{kind}.")
    }

    def judge(words: list[dict[str, Any]]) -> None:
        here = {key: form for word in words for key, form in word.items()}
        for key in sorted(here.keys() | stored.keys()):
            if here.get(key) != stored.get(key):
                raise ConfigError(
                    f"the weights of {path} do not fit this model: {key.removeprefix(kind + '.')} "
                    f"is {_shape_text(stored.get(key))} there and {_shape_text(here.get(key))} "
                    "here; compare model.*"
                )

    in_replica.decide(f"weights of {path}", _described(wanted), judge)
    failure = Failure()
    with failure.catch():
        storage.read(path / folder, wanted)
    everyone.decide(f"load of {path}", failure.error, _refuse_failure)


InnerState = Literal["clone", "mean", "zero"]
"""What a replica that the checkpoint does not hold takes for inner optimizer state: that of replica
(its index modulo the saved number), the mean over the saved replicas, or zeros."""


class Load:
    """One rank's part in loading a checkpoint that `verify` has found whole.

    With another number of replicas than the checkpoint holds, all replicas start from the mean of
    the saved replicas' masters. At a round's end that is the anchor, to the last bit. Inside a
    round it carries on what every saved replica has learned since, dropped ones included: the
    round goes on from there, and its outer step moves the anchor by all of it. Saved replicas go
    on with their own inner state; new ones get it by the `inner` rule, and no residual of error
    feedback.
    """

    def __init__(self, path: Path, content: Manifest, replicas: Replicas, inner: InnerState):
        self._path = path
        self._replicas = replicas
        self._inner = inner
        # Checkpoints from before expert parallelism do not speak of it.
        self._saved = {"ep": 1} | content.about["layout"]
        self._light = content.about["light"]

    def run(self, state: TrainingState, in_replica: Council, everyone: Council) -> None:
        """Fill the live tensors and hand over counters and random states.

        Raises, on every process, ConfigError if checkpoint and run do not hold the same state, and
        DataError if reading fails.
        """
        counters = self._counters()
        state.accept(counters, self._path)
        wanted = self._wanted(state)
        in_replica.decide(
            f"contents of {self._path}",
            {folder: _described(tensors) for folder, tensors in wanted.items()},
            self._compare_contents,
        )
        failure = Failure()
        with failure.catch():
            for folder, tensors in wanted.items():
                if not tensors:
                    continue
                if folder == self._own_folder and self._light:
                    self._read_anchor(tensors)
                elif folder == self._own_folder and self._is_resized:
                    self._read_resized(tensors)
                else:
                    storage.read(self._path / folder, tensors)
            rng = self._rng(state)
        everyone.decide(f"load of {self._path}", failure.error, _refuse_failure)
        state.restore(counters, rng)

    @property
    def _is_resized(self) -> bool:
        return self._saved["replicas"] != self._replicas.count

    @property
    def _is_new(self) -> bool:
        return self._replicas.index >= self._saved["replicas"]

    @property
    def _own_folder(self) -> str:
        """Of this replica, or of the one that it takes after."""
        return replica_folder(self._replicas.index % self._saved["replicas"])

    def _wanted(self, state: TrainingState) -> dict[str, list[StateTensor]]:
        """The live tensors by the folder that fills them; all folders on all ranks."""
        wanted: dict[str, list[StateTensor]] = {self._own_folder: []}
        wanted |= {f"{SHARED}/{kind}": [] for kind in SHARED_KINDS}
        stored = {} if self._light else self._entries(self._own_folder)
        for tensor in state.tensors():
            kind, block, _ = tensor
            if kind in OPTIONAL_KINDS and storage.key_of(kind, block.name) not in stored:
                continue
            wanted[f"{SHARED}/{kind}" if kind in SHARED_KINDS else self._own_folder].append(tensor)
        return wanted

    def _compare_contents(self, words: list[dict[str, dict[str, Any]]]) -> None:
        """On the first rank of a replica: the run's state must be the checkpoint's, no less."""
        for folder in words[0]:
            if self._light and folder == self._own_folder:
                continue
            wanted = {key: shape for word in words for key, shape in word[folder].items()}
            stored = {
                key: (entry.shape, entry.dtype)
                for key, entry in self._entries(folder).items()
                if not key.startswith(f"{RANDOM_KIND}.")
            }
            for key in sorted(wanted.keys() | stored.keys()):
                if key.split(".")[0] in OPTIONAL_KINDS and key not in wanted:
                    continue
                if self._is_resized and key.split(".")[0] in RESIDUAL_KINDS:
                    continue  # a single replica has none, so both sides may lack them
                if wanted.get(key) != stored.get(key):
                    raise ConfigError(
                        f"{self._path} does not fit this run: {key} is "
                        f"{_shape_text(stored.get(key))} in the checkpoint and "
                        f"{_shape_text(wanted.get(key))} in the run; compare model.*, "
                        "optimizer.name and outer.* with the run that wrote it"
                    )

    def _read_resized(self, tensors: list[StateTensor]) -> None:
        stored = self._entries(self._own_folder)
        rules: dict[str, list[StateTensor]] = {"clone": [], "mean": [], "zero": []}
        for kind, block, tensor in tensors:
            rule = self._inner if self._is_new else "clone"
            if kind == MASTER_KIND:
                rule = "mean"
            elif kind in RESIDUAL_KINDS:
                absent = storage.key_of(kind, block.name) not in stored
                rule = "zero" if self._is_new or absent else "clone"
            rules[rule].append((kind, block, tensor))
        storage.read(self._path / self._own_folder, rules["clone"])
        self._read_mean(rules["mean"])
        for _, _, tensor in rules["zero"]:
            tensor.zero_()

    def _read_anchor(self, tensors: list[StateTensor]) -> None:
        masters = [("anchor", block, tensor) for k, block, tensor in tensors if k == MASTER_KIND]
        storage.read(self._path / SHARED / "anchor", masters)
        for kind, _, tensor in tensors:
            if kind != MASTER_KIND:
                tensor.zero_()

    def _read_mean(self, tensors: list[StateTensor]) -> None:
        """In float64, in which the mean of equal values is exactly that value."""
        count = self._saved["replicas"]
        totals = [torch.zeros(block.size, dtype=torch.float64) for _, block, _ in tensors]
        parts = [(k, b, torch.empty(b.size, dtype=tensor.dtype)) for k, b, tensor in tensors]
        for replica in range(count):
            storage.read(self._path / replica_folder(replica), parts)
            for total, (_, _, part) in zip(totals, parts, strict=True):
                total.add_(part)
        for total, (_, _, tensor) in zip(totals, tensors, strict=True):
            tensor.copy_(total / count)

    def _entries(self, folder: str) -> dict[str, index.Entry]:
        absent = folder.startswith(SHARED) and not (self._path / folder).exists()
        return {} if absent else index.read(self._path / folder)

    def _rng(self, state: TrainingState) -> torch.Tensor | None:
        """This rank's random state, if the rank is the same part of the run as then."""
        if self._light or self._saved != layout_of(self._replicas):
            return None
        rng = torch.empty_like(state.rng())
        place = Block(str(self._replicas.rank), (rng.numel(),), (0,), (rng.numel(),))
        storage.read(self._path / self._own_folder, [(RANDOM_KIND, place, rng)])
        return rng

    def _counters(self) -> dict[str, Any]:
        counters = json.loads((self._path / self._own_folder / COUNTERS).read_bytes())
        return counters | {"light": self._light}


def _described(tensors: list[StateTensor]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {
        storage.key_of(kind, block.name): (tuple(block.shape), tensor.dtype)
        for kind, block, tensor in tensors
    }


def _shape_text(shape: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    if shape is None:
        return "absent"
    size, dtype = shape
    return f"{list(size)} {str(dtype).removeprefix('torch.')}"


def _refuse_damage(path: Path, words: list[tuple[list[str], list[str]]]) -> None:
    for _, misfits in words:
        if misfits:
            raise ConfigError(f"{path} does not belong here: {misfits[0]}")
    damages = sorted({damage for found, _ in words for damage in found})
    if damages:
        more = f" (and {len(damages) - 3} more)" if len(damages) > 3 else ""
        raise DataError(
            f"checkpoint {path} is damaged: {'; '.join(damages[:3])}{more}; "
            "move it away, or set resume.fallback=true, to resume from the one before"
        )


def _refuse_failure(errors: list[str | None]) -> None:
    error = next((error for error in errors if error), None)
    if error:
        raise DataError(error)
