"""When checkpoints are written and how many stay."""

from pydantic import NonNegativeInt, PositiveInt

from megatron_ext.config import Section


class CheckpointConfig(Section):
    """Checkpoints under <run.dir>/checkpoints."""

    every: NonNegativeInt = 0
    """Inner steps between checkpoints; 0 writes one at the end only."""
    keep_last: PositiveInt = 2
    """Checkpoints that stay; older ones are removed after a newer one is committed."""
    keep_every: NonNegativeInt = 0
    """Checkpoints of steps that are a multiple of this stay for good; 0 keeps none of them."""
    background: bool = False
    """Write while training goes on, from a copy in host memory; the last one is waited for."""
