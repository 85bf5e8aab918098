"""Does this layout take the step that one process would take? Random gradients tell."""

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.distributed as dist

from megatron_ext.blocks import Block
from megatron_ext.errors import StackError
from megatron_ext.muon.config import OptimizerConfig
from megatron_ext.muon.optimizer import InnerOptimizer
from megatron_ext.muon.reference import Reference
from megatron_ext.muon.stage import Stage
from megatron_ext.muon.table import align

_LR = 0.01  # of any size that FP32 weights can tell from their rounding
_NORM_TOLERANCE = 1e-5


class VerificationError(StackError):
    """The optimizer's step is not that of its reference."""

    exit_code = 3


@dataclass(frozen=True)
class Check:
    """How the update of one owned block compares with the float64 reference's."""

    name: str
    optimizer: str
    size: tuple[int, ...]
    rank: int  # in the replica, of the owner
    cosine: float
    relative_error: float  # ‖update − reference‖ / ‖reference‖
    orthogonality_error: float | None  # ‖UUᵀ − I‖ / ‖I‖ of Muon's update U


def verify(optimizer: InnerOptimizer) -> list[Check]:
    """Take a step on random gradients and compare it; leave the optimizer as it was.

    Every data-parallel rank contributes a share of each gradient, DDP reduces them, and the step
    starts from the weights as they are and a state of zero. A collective call of the replica's
    ranks, which all get the checks of all blocks. Raises VerificationError if the global norm is
    wrong.
    """
    steps = optimizer.steps
    before = [(tensor, tensor.clone()) for _, _, tensor in optimizer.tensors()]
    for kind, _, tensor in optimizer.tensors():
        if kind != "master":
            tensor.zero_()
    optimizer.steps = 0
    gradients = _Gradients(optimizer.stage)
    gradients.reduce()
    norm = optimizer.step(_LR)
    checks = _compare(optimizer, gradients, before)
    for tensor, values in before:
        tensor.copy_(values)
    optimizer.steps = steps
    optimizer.write_weights()
    optimizer.stage.zero_gradients()
    if not math.isclose(norm, gradients.norm, rel_tol=_NORM_TOLERANCE):
        raise VerificationError(
            f"the global gradient norm is {norm:.7g} and should be {gradients.norm:.7g}: some "
            "gradient is lost or counted twice on this layout"
        )
    everyone: list[list[Check]] = [[]] * dist.get_world_size()
    dist.all_gather_object(everyone, checks)
    order = {name: index for index, name in enumerate(optimizer.stage.routes)}
    found = [check for checks in everyone for check in checks]
    return sorted(found, key=lambda check: (order[check.name], check.rank))


def least_cosine(optimizer: str, config: OptimizerConfig) -> float:
    """What an update must reach on random gradients."""
    return 0.999 if optimizer == "muon" and config.arithmetic == "bf16" else 0.9999


def judge(checks: Sequence[Check], config: OptimizerConfig) -> str:
    """A sentence about checks that pass; raises VerificationError naming those that do not."""
    bad = [c for c in checks if not c.cosine >= least_cosine(c.optimizer, config)]
    if bad:
        worst = min(bad, key=lambda check: check.cosine)
        raise VerificationError(
            f"the optimizer's update of {len(bad)} of {len(checks)} blocks is not that of the "
            f"float64 reference; worst is {worst.name} on rank {worst.rank} with cosine "
            f"{worst.cosine:.6f}, at least {least_cosine(worst.optimizer, config)} is right"
        )
    worst = min(checks, key=lambda check: check.cosine)
    return (
        f"{len(checks)} blocks follow the float64 reference; least cosine {worst.cosine:.7f}, "
        f"of {worst.name}"
    )


def as_text(checks: Sequence[Check]) -> str:
    """A line for each block."""
    lines = [("parameter", "size", "optimizer", "rank", "cosine", "error", "orthogonality error")]
    for check in checks:
        off = check.orthogonality_error
        lines.append(
            (
                check.name,
                " × ".join(map(str, check.size)),
                check.optimizer,
                str(check.rank),
                f"{check.cosine:.7f}",
                f"{check.relative_error:.2e}",
                "" if off is None else f"{off:.3f}",
            )
        )
    return align(lines)


class _Gradients:
    """A Gaussian gradient for each logical parameter, known by its name alone.

    Attributes:
        norm: of all of them together.
    """

    def __init__(self, stage: Stage):
        self._stage = stage
        self.norm = math.sqrt(sum(_norm_of(name) ** 2 for name in stage.routes))
        self._whole = lru_cache(maxsize=4)(self._draw)

    def of(self, block: Block) -> torch.Tensor:
        """The values of a block, FP32."""
        return self._whole(block.name, block.shape)[block.slices]

    def reduce(self) -> None:
        """Leave them reduced in DDP's buffers, from different shares on data-parallel ranks."""
        self._stage.zero_gradients()
        for part in self._stage.parts:
            tp_rank, dp_rank, ranks = part.tp_group.rank(), part.dp_group.rank(), part.plan.dp
            # DDP adds them up: the loss is divided by its tokens afterwards.
            share = 2 * (dp_rank + 1) / (ranks * (ranks + 1))
            for index, parameter in enumerate(part.plan.parameters):
                for segment in parameter.segments_of(tp_rank):
                    part.gradient(index)[segment.local_slices] = self.of(segment) * share
        self._stage.reduce_gradients()

    def _draw(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        device = self._stage.device
        generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
        values = torch.randn(shape, generator=generator, device=device)
        return values * (_norm_of(name) / values.double().norm())


def _norm_of(name: str) -> float:
    """Different for most parameters, so that none can stand in for another."""
    return 1.0 + zlib.crc32(name.encode()) % 7


def _compare(
    optimizer: InnerOptimizer,
    gradients: _Gradients,
    before: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> list[Check]:
    """The checks of the blocks that this rank owns; `before` begins with their masters."""
    checks = []
    routes = optimizer.stage.routes
    for block, (after, start) in zip(optimizer.blocks, before, strict=False):
        name, route = block.name, routes[block.name]
        slow = Reference({name: start}, routes, optimizer.config)
        slow.step({name: gradients.of(block)}, _LR, gradients.norm)
        expected, found = slow.weights[name] - start, after.double() - start
        off = None
        if route.optimizer == "muon":
            step = _LR * route.lr_factor * route.scale
            update = slow.updates[name] + (slow.weights[name] - after) / step if step else expected
            off = _orthogonality_error(update, route.heads)
        checks.append(
            Check(
                name,
                route.optimizer,
                block.size,
                dist.get_rank(),
                _cosine(found, expected),
                ((found - expected).norm() / expected.norm().clamp_min(1e-300)).item(),
                off,
            )
        )
    return checks


def _cosine(one: torch.Tensor, other: torch.Tensor) -> float:
    """Of two float64 tensors; 1 where both are zero."""
    norms = one.norm() * other.norm()
    return ((one * other).sum() / norms).item() if norms else float(torch.equal(one, other))


def _orthogonality_error(update: torch.Tensor, heads: int) -> float:
    parts = torch.stack(update.chunk(heads))
    parts = parts.mT if parts.size(-2) > parts.size(-1) else parts
    identity = torch.eye(parts.size(-2), dtype=parts.dtype, device=parts.device)
    return ((parts @ parts.mT - identity).norm() / (heads**0.5 * identity.norm())).item()
