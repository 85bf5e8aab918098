"""A small run's state, cut into random rectangles that random ranks own."""

import random
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_ext.blocks import Block
from megatron_ext.checkpoint import SHARED_KINDS
from megatron_ext.checkpoint.state import StateTensor
from megatron_ext.replicas import Replicas

SHAPES = {
    "embedding": (11, 6),
    "layers.0.attention.q": (8, 8),
    "layers.0.attention_norm": (7,),
    "layers.1.mlp.down": (5, 12),
}
KINDS = ("master", "momentum", "anchor", "outer_momentum")


def whole(kind: str, name: str, replica: int, step: int) -> Tensor:
    """What the whole logical parameter holds: equal in all replicas for shared kinds."""
    owner = "all" if kind in SHARED_KINDS else replica
    key = f"{kind} {name} {owner} {step}"
    generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    return torch.randn(SHAPES[name], generator=generator)


def cut(shape: tuple[int, ...], world_size: int, chance: random.Random) -> list[tuple]:
    """(owner, offset, size) of irregular rectangles that cover a parameter exactly."""
    pieces = [((0,) * len(shape), shape)]
    for _ in range(world_size + 1):
        offset, size = pieces.pop(chance.randrange(len(pieces)))
        axis = chance.randrange(len(shape))
        at = chance.randint(0, size[axis])
        for begin, length in ((0, at), (at, size[axis] - at)):
            if length:
                moved = (*offset[:axis], offset[axis] + begin, *offset[axis + 1 :])
                pieces.append((moved, (*size[:axis], length, *size[axis + 1 :])))
    return [(chance.randrange(world_size), offset, size) for offset, size in pieces]


class ToyState:
    """One rank's blocks, filled with the values of a step."""

    def __init__(self, replicas: Replicas, cutting: int, step: int | None = None, kinds=KINDS):
        """`cutting` seeds the cuts; without `step` everything is NaN."""
        self.replicas = replicas
        self.step = step
        chance = random.Random(cutting)
        self.blocks = [
            (kind, Block(name, shape, offset, size))
            for kind in kinds
            for name, shape in SHAPES.items()
            for owner, offset, size in cut(shape, replicas.world_size, chance)
            if owner == replicas.rank
        ]
        self.values = [torch.full(block.size, torch.nan) for _, block in self.blocks]
        self.random = torch.zeros(16, dtype=torch.uint8)
        self.restored_rng: Tensor | None = None
        self._schedule: dict[str, Any] = {}  # one object that every step changes
        if step is not None:
            self.become(step)

    def become(self, step: int) -> None:
        """Take the values of a step, in place."""
        self.step = self._schedule["step"] = step
        self.random.fill_(10 * self.replicas.launcher_rank + step)
        for (kind, block), tensor in zip(self.blocks, self.values, strict=True):
            tensor.copy_(whole(kind, block.name, self.replicas.index, step)[block.slices])

    def differences(self, step: int, replica: int | None = None) -> list[str]:
        """The tensors that do not hold, bit for bit, what the step's state holds."""
        replica = self.replicas.index if replica is None else replica
        return [
            f"{kind}.{block.name}{block.offset}"
            for (kind, block), tensor in zip(self.blocks, self.values, strict=True)
            if not torch.equal(tensor, whole(kind, block.name, replica, step)[block.slices])
        ]

    def tensors(self) -> list[StateTensor]:
        return [(k, b, t) for (k, b), t in zip(self.blocks, self.values, strict=True)]

    def counters(self) -> dict[str, Any]:
        self._schedule["step"] = self.step
        return {"step": self.step, "tokens": 1000 * (self.step or 0), "schedule": self._schedule}

    def rng(self) -> Tensor:
        return self.random

    def accept(self, counters: dict[str, Any], path: Path) -> None:
        assert counters["schedule"]["step"] == counters["step"]

    def restore(self, counters: dict[str, Any], rng: Tensor | None) -> None:
        self.step = counters["step"]
        self.restored_rng = rng
