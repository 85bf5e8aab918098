"""Loss of the global weights on held-out text."""

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
from pydantic import NonNegativeInt, PositiveInt

from megatron_ext.config import Section

if TYPE_CHECKING:
    from megatron_ext.diloco.loop import OuterLoop
    from pretrain.engine import Engine
    from pretrain.samples import Samples


class ValidationConfig(Section):
    """When and on how much held-out text."""

    every: NonNegativeInt = 0
    """Inner steps between validations, besides the start and the end; 0 turns them off."""
    batches: PositiveInt = 4
    """Global batches of held-out text in one validation."""


def global_loss(
    engine: "Engine", samples: "Samples", outer: "OuterLoop | None", batches: int
) -> float:
    """Mean loss per token of the global weights; replicas share the batches."""
    with outer.global_weights() if outer else nullcontext():
        sums = [
            engine.evaluate(samples.micro_batches(batch, "validation"))
            for batch in range(1, batches + 1)
        ]
    total = torch.tensor(sums, dtype=torch.float64).sum(0)
    if outer:
        total = outer.gather_scalars(total).sum(0)
    loss, tokens = total.tolist()
    return loss / tokens
