"""One batch of Muon matrices: gradients to their homes, the update there, weights back."""

from collections.abc import Callable, Sequence
from itertools import groupby

import torch

from megatron_ext.muon.config import OptimizerConfig
from megatron_ext.muon.exchange import exchange
from megatron_ext.muon.newton_schulz import batch_size, newton_schulz, newton_schulz_flops
from megatron_ext.muon.plan import Unit
from megatron_ext.muon.stage import Stage
from megatron_ext.muon.views import views

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class MatrixBatch:
    """Matrices of one data-parallel shard that travel together.

    All tensor-parallel ranks of the shard hold the same units in the same order; each owns those
    whose home it is. `masters` and `momentum` are flat FP32 tensors of the owned matrices.
    """

    def __init__(self, units: Sequence[Unit], stage: Stage):
        self._units = units
        self._stage = stage
        self._rank = stage.tp_group.rank()
        self.owned = [unit for unit in units if unit.home == self._rank]

    def bind(self, masters: torch.Tensor, momentum: torch.Tensor) -> None:
        """Keep the state in these flat tensors, one matrix after another."""
        self._masters, self._momentum = masters, momentum

    def gradients(self) -> list[tuple[str, torch.Tensor]]:
        """Name and gradient of each piece that lies on this rank."""
        return [
            (unit.name, self._stage.gradient(unit.parameter)[segment.local_slices])
            for unit in self._units
            for segment in unit.pieces[self._rank]
        ]

    def gather_gradients(self, config: OptimizerConfig) -> Callable[[], None]:
        """Start to send the gradients home; the returned call waits for them.

        They are added to the momentum where they arrive: M ← μM + G. Only Nesterov's direction
        needs them once more, and so a buffer of their own.
        """
        self._momentum.mul_(config.momentum)
        self._gradients = torch.zeros_like(self._momentum) if config.nesterov else self._momentum
        return exchange(
            self._lying_here(self._stage.gradient),
            self._at_home(self._gradients),
            torch.float32,
            self._stage.device,
            self._stage.tp_group,
            add=True,
        )

    def scatter_weights(self) -> Callable[[], None]:
        """Start to send the masters, cast to the model's dtype, to where the weights lie."""
        return exchange(
            self._at_home(self._masters),
            self._lying_here(self._stage.weight),
            self._stage.weight_dtype,
            self._stage.device,
            self._stage.tp_group,
        )

    def update(self, lr: float, config: OptimizerConfig) -> None:
        """Muon's step on the owned matrices, equal shapes side by side.

        W ← (1 − lr·wd)·W − lr·scale·orthogonalize(M), or of G + μM with Nesterov.
        """
        if config.nesterov:
            self._momentum.add_(self._gradients)
            self._gradients.add_(self._momentum, alpha=config.momentum)
        directions = self._gradients
        start = 0
        for (shape, scale, decay), group in groupby(self.owned, key=self._kind):
            count = len(list(group))
            end = start + count * torch.Size(shape).numel()
            masters = self._masters[start:end].view(count, *shape)
            direction = directions[start:end].view(count, *shape)
            start = end
            if decay:
                masters.mul_(1 - lr * decay)
            together = batch_size(shape, masters.device)
            for some, matrices in zip(
                masters.split(together), direction.split(together), strict=True
            ):
                some.add_(self._orthogonalize(matrices, config), alpha=-lr * scale)
        del self._gradients

    def _orthogonalize(self, matrices: torch.Tensor, config: OptimizerConfig) -> torch.Tensor:
        # A batch of one is slower than a matrix alone.
        alone = len(matrices) == 1
        orthogonal = newton_schulz(
            matrices[0] if alone else matrices,
            config.newton_schulz_steps,
            config.coefficients,
            _DTYPES[config.arithmetic],
        )
        return orthogonal[None] if alone else orthogonal

    def _kind(self, unit: Unit) -> tuple[tuple[int, ...], float, float]:
        route = self._stage.plan.routes[unit.name]
        return unit.shape, route.scale, route.weight_decay

    def _lying_here(self, view: Callable[[int], torch.Tensor]) -> list[list[torch.Tensor]]:
        """For each home the pieces of its matrices that lie on this rank."""
        pieces: list[list[torch.Tensor]] = [[] for _ in range(self._stage.plan.tp)]
        for unit in self._units:
            tensor = view(unit.parameter)
            pieces[unit.home] += [tensor[s.local_slices] for s in unit.pieces[self._rank]]
        return pieces

    def _at_home(self, flat: torch.Tensor) -> list[list[torch.Tensor]]:
        """For each rank the places of its pieces in the matrices that this rank owns."""
        wholes = views(flat, [unit.shape for unit in self.owned])
        return [
            [
                whole[segment.slices]
                for unit, whole in zip(self.owned, wholes, strict=True)
                for segment in unit.pieces[rank]
            ]
            for rank in range(self._stage.plan.tp)
        ]


def cut_into_batches(units: Sequence[Unit], count: int) -> list[list[Unit]]:
    """Up to `count` batches of about equal Newton–Schulz work, equal shapes side by side."""
    ordered = sorted(units, key=lambda unit: (unit.shape, unit.name))
    total = sum(newton_schulz_flops(unit.shape, 1) for unit in ordered)
    batches: list[list[Unit]] = [[] for _ in range(count)]
    done = 0
    for unit in ordered:
        batches[min(count - 1, done * count // total)].append(unit)
        done += newton_schulz_flops(unit.shape, 1)
    return [batch for batch in batches if batch]
