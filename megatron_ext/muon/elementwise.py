"""The part of the inner optimizer that AdamW trains where it lies."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.optim.adamw import adamw

from megatron_ext.blocks import Block
from megatron_ext.muon.config import OptimizerConfig
from megatron_ext.muon.exchange import copy_all, exchange
from megatron_ext.muon.part import Part
from megatron_ext.muon.plan import whole_block
from megatron_ext.muon.update import decay
from megatron_ext.muon.views import views


@dataclass(frozen=True)
class _Place:
    """An owned block and where it lies in this rank's parameter."""

    block: Block
    parameter: int
    local: tuple[slice, ...]


class Elementwise:
    """What one rank trains with AdamW of a part: rows and pieces in place, vectors at rank 0.

    Attributes:
        blocks: the owned blocks. `masters`, `exp_avg` and `exp_avg_sq` are flat FP32 tensors of
            them, one after another.
    """

    def __init__(self, part: Part):
        self._part = part
        tp_rank, dp_rank = part.tp_group.rank(), part.dp_group.rank()
        self._vectors = [unit for unit in part.plan.vectors if unit.shard == dp_rank]
        self._places = [
            _Place(local.block, local.parameter, local.local)
            for local in part.plan.local_blocks(tp_rank, dp_rank)
        ]
        self._places += [
            _Place(whole_block(unit), unit.parameter, (slice(None),))
            for unit in self._vectors
            if unit.home == tp_rank
        ]
        self.blocks = [place.block for place in self._places]

    def bind(self, masters: torch.Tensor) -> None:
        """Keep the masters in this flat tensor, with moments of zero."""
        self.masters = masters
        self.exp_avg = torch.zeros_like(masters)
        self.exp_avg_sq = torch.zeros_like(masters)

    def gradients(self) -> list[tuple[str, torch.Tensor]]:
        """Name and gradient of each owned block."""
        return [
            (place.block.name, self._view(self._part.gradient, place)) for place in self._places
        ]

    def update(self, lr: float, step: int, config: OptimizerConfig) -> None:
        """Step number `step`, from 1, of AdamW (Loshchilov & Hutter, 2019, algorithm 2)."""
        masters, exp_avg, exp_avg_sq = (
            self._split(flat) for flat in (self.masters, self.exp_avg, self.exp_avg_sq)
        )
        gradients = [gradient for _, gradient in self.gradients()]
        for (lr_factor, weight_decay), chosen in self._by_route().items():
            some = [[of[i] for i in chosen] for of in (masters, gradients, exp_avg, exp_avg_sq)]
            amount = lr * lr_factor * weight_decay
            if config.cautious_decay:
                _decay_cautiously(*some[:3], amount, config.adam_beta1)
                weight_decay = 0.0
            adamw(
                *some,
                [],
                # The library counts steps itself, in one tensor for each parameter.
                [torch.tensor(step - 1.0, device=self._part.device) for _ in chosen],
                fused=True,
                amsgrad=False,
                beta1=config.adam_beta1,
                beta2=config.adam_beta2,
                lr=lr * lr_factor,
                weight_decay=weight_decay,
                eps=config.adam_epsilon,
                maximize=False,
            )

    def _by_route(self) -> dict[tuple[float, float], list[int]]:
        """Learning-rate factor and weight decay -> places that have them."""
        groups: dict[tuple[float, float], list[int]] = {}
        for index, place in enumerate(self._places):
            route = self._part.plan.routes[place.block.name]
            groups.setdefault((route.lr_factor, route.weight_decay), []).append(index)
        return groups

    def scatter(self, values: torch.Tensor) -> Callable[[], None]:
        """Set the weights to values, flat as the masters; vectors travel to other tensor ranks."""
        blocks = self._split(values)
        copy_all([self._view(self._part.weight, place) for place in self._places], blocks)
        if not self._vectors:  # then the other tensor ranks of the shard have none either
            return lambda: None
        part, rank = self._part, self._part.tp_group.rank()
        owned = blocks[len(blocks) - len(self._vectors) :] if rank == 0 else []
        everyone = range(part.plan.tp)
        weights = [part.weight(unit.parameter) for unit in self._vectors]
        return exchange(
            [owned if other != rank else [] for other in everyone],
            [weights if home == 0 and rank != 0 else [] for home in everyone],
            part.weight_dtype,
            part.device,
            part.tp_group,
        )

    def _split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return views(flat, [block.size for block in self.blocks])

    def _view(self, of: Callable[[int], torch.Tensor], place: _Place) -> torch.Tensor:
        return of(place.parameter)[place.local]


def _decay_cautiously(
    masters: list[torch.Tensor],
    gradients: list[torch.Tensor],
    exp_avg: list[torch.Tensor],
    amount: float,
    beta1: float,
) -> None:
    """Before AdamW's step, whose direction has the sign of its next first moment."""
    for master, gradient, mean in zip(masters, gradients, exp_avg, strict=True):
        decay(master, mean.lerp(gradient, 1 - beta1), amount, cautious=True)
