"""When checkpoints are written and how many stay."""

from pydantic import NonNegativeInt, PositiveInt

from megatron_ext.config import Section


class CheckpointConfig(Section):
    """Checkpoints under <run.dir>/checkpoints."""

    every: NonNegativeInt = 0
    """Inner steps between checkpoints; 0 writes one at the end only."""
    keep_last: PositiveInt = 2
    """Checkpoints that stay; older ones are removed after a newer one is committed."""
