"""Loss of the global weights on held-out text."""

from typing import TYPE_CHECKING

import torch
from pydantic import NonNegativeInt, PositiveInt

from megatron_ext.config import Section

if TYPE_CHECKING:
    from pretrain.session import Session


class ValidationConfig(Section):
    """When and on how much held-out text."""

    every: NonNegativeInt = 0
    """Inner steps between validations, besides the start and the end; 0 turns them off."""
    batches: PositiveInt = 4
    """Global batches of held-out text in one validation."""


def global_loss(session: "Session", batches: int) -> float:
    """Mean loss per token of the global weights; replicas share the batches."""
    engine, samples, outer = session.engine, session.samples, session.outer
    with (outer or session.inner).global_weights():
        sums = [
            engine.evaluate(samples.micro_batches(batch, "validation"))
            for batch in range(1, batches + 1)
        ]
    total = torch.tensor(sums, dtype=torch.float64).sum(0)
    if outer:
        total = outer.gather_scalars(total).sum(0)
    loss, tokens = total.tolist()
    return loss / tokens
