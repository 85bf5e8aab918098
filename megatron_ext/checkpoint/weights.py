"""Checkpoints that hold weights only, written by one process: averages and imported models.

They look like any other checkpoint of one replica, so that all commands read them, and a run can
begin anew from them; it cannot go on from them.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ext.blocks import Block
from megatron_ext.checkpoint import folders
from megatron_ext.checkpoint.checkpoints import Checkpoints
from megatron_ext.checkpoint.saved import Saved
from megatron_ext.checkpoint.state import MASTER_KIND, StateTensor
from megatron_ext.errors import ConfigError
from megatron_ext.replicas import ParallelConfig, join


def write(folder: Path, weights: Iterable[tuple[str, Tensor]], counters: Mapping[str, Any]) -> Path:
    """Write fp32 weights, by logical name, as the checkpoint of counters["step"] below `folder`.

    They are taken one by one and wait in mapped files beside `folder`, so that a model larger than
    the memory can be written; until the end that takes its size on the disk a second time.
    `counters` also says of which model they are (its options "model.…") and where they come from
    ("weights_of"). Raises ConfigError if `folder` holds something already, and OSError if the disk
    is full.
    """
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError(f"{folder} exists already and is not empty; choose another folder")
    waiting = folder.with_name(folder.name + folders.PARTIAL)
    folders.discard(waiting)
    waiting.mkdir(parents=True)
    try:
        mapped = {
            name: _on_disk(tensor, waiting / str(number))
            for number, (name, tensor) in enumerate(weights)
        }
        with join(ParallelConfig()) as replicas:
            state = _Weights(mapped, counters)
            return Checkpoints(folder, replicas).save(state, counters["step"]).written.path
    finally:
        folders.discard(waiting)


def average(checkpoints: Sequence[Saved]) -> Iterator[tuple[str, Tensor]]:
    """The mean of the global weights by logical name, each summed in float64.

    Raises ConfigError if they are not of one model.
    """
    expected = checkpoints[0].global_shapes()
    for saved in checkpoints[1:]:
        if different := expected.items() ^ saved.global_shapes().items():
            raise ConfigError(
                f"{saved.path} is of another model than {checkpoints[0].path}: "
                f"{min(name for name, _ in different)} differs"
            )
    for tensors in zip(*(saved.global_weights() for saved in checkpoints), strict=True):
        total = sum(tensor.double() for _, tensor in tensors)
        yield tensors[0][0], (total / len(tensors)).float()


def _on_disk(tensor: Tensor, path: Path) -> Tensor:
    """The same values, in a file of their own.

    Its room is taken first: a mapping that meets a full disk kills the process.
    """
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, tensor.nbytes)
    mapped = torch.from_file(str(path), shared=True, size=tensor.numel(), dtype=tensor.dtype)
    return mapped.view(tensor.shape).copy_(tensor)


class _Weights:
    def __init__(self, weights: Mapping[str, Tensor], counters: Mapping[str, Any]):
        self._weights = weights
        self._counters = dict(counters)

    def tensors(self) -> Iterator[StateTensor]:
        for name, tensor in self._weights.items():
            shape = tuple(tensor.shape)
            yield MASTER_KIND, Block(name, shape, (0,) * len(shape), shape), tensor

    def counters(self) -> dict[str, Any]:
        return self._counters

    def rng(self) -> Tensor:
        return torch.zeros(1, dtype=torch.uint8)
