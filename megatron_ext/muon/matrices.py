"""One batch of Muon matrices: gradients to their homes, the update there, weights back."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby, islice

import torch

from megatron_ext.muon.config import OptimizerConfig
from megatron_ext.muon.exchange import exchange
from megatron_ext.muon.newton_schulz import Kernel, newton_schulz_flops
from megatron_ext.muon.part import Part
from megatron_ext.muon.plan import Unit
from megatron_ext.muon.routing import Route
from megatron_ext.muon.update import kernel, muon_step
from megatron_ext.muon.views import views


class MatrixBatch:
    """Matrices of one data-parallel shard that travel together.

    All tensor-parallel ranks of the shard hold the same units in the same order; each owns those
    whose home it is. `masters`, `momentum` and NorMuon's `moment` (or None) are flat FP32 tensors
    of the owned matrices.
    """

    def __init__(self, units: Sequence[Unit], part: Part):
        self._units = units
        self._part = part
        self._rank = part.tp_group.rank()
        self.owned = [unit for unit in units if unit.home == self._rank]
        # [n, rows, cols] of neighbours that are updated alike, and their route.
        self._groups = [
            ((len(list(group)), *shape), route)
            for (shape, route), group in groupby(self.owned, key=self._kind)
        ]

    def bind(
        self, masters: torch.Tensor, momentum: torch.Tensor, moment: torch.Tensor | None
    ) -> None:
        """Keep the state in these flat tensors, one matrix after another."""
        self._masters, self._momentum, self._moment = masters, momentum, moment

    def _kind(self, unit: Unit) -> tuple[tuple[int, ...], Route]:
        return unit.shape, replace(self._part.plan.routes[unit.name], reason="")

    def kernels(self, config: OptimizerConfig) -> dict[str, Kernel]:
        """What computes the products of each owned matrix."""
        owned = iter(self.owned)
        return {
            unit.name: kernel(shape, route, config, self._part.device)
            for shape, route in self._groups
            for unit in islice(owned, shape[0])
        }

    def gradients(self) -> list[tuple[str, torch.Tensor]]:
        """Name and gradient of each piece that lies on this rank."""
        return [
            (unit.name, self._part.gradient(unit.parameter)[segment.local_slices])
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
            self._lying_here(self._part.gradient),
            self._at_home(self._gradients),
            torch.float32,
            self._part.device,
            self._part.tp_group,
            add=True,
        )

    def scatter(self, values: torch.Tensor) -> Callable[[], None]:
        """Start to send values, flat as the masters, to where the weights lie, in their dtype."""
        return exchange(
            self._at_home(values),
            self._lying_here(self._part.weight),
            self._part.weight_dtype,
            self._part.device,
            self._part.tp_group,
        )

    def update(self, lr: float, config: OptimizerConfig) -> None:
        """Muon's step on the owned matrices; the direction is M, or G + μM with Nesterov."""
        if config.nesterov:
            self._momentum.add_(self._gradients)
            self._gradients.add_(self._momentum, alpha=config.momentum)
        shapes = [shape for shape, _ in self._groups]
        moments = [None] * len(shapes)
        if self._moment is not None:
            moments = views(self._moment, [(*shape[:2], 1) for shape in shapes])
        for (_, route), masters, direction, moment in zip(
            self._groups,
            views(self._masters, shapes),
            views(self._gradients, shapes),
            moments,
            strict=True,
        ):
            muon_step(masters, direction, moment, lr, route, config)
        del self._gradients

    def _lying_here(self, view: Callable[[int], torch.Tensor]) -> list[list[torch.Tensor]]:
        """For each home the pieces of its matrices that lie on this rank."""
        pieces: list[list[torch.Tensor]] = [[] for _ in range(self._part.plan.tp)]
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
            for rank in range(self._part.plan.tp)
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
