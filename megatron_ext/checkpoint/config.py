"""When checkpoints are written and how many stay."""

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveInt

from megatron_ext.config import Section


class CheckpointConfig(Section):
    """Checkpoints under <run.dir>/checkpoints."""

    every: NonNegativeInt = 0
    """Inner steps between checkpoints; 0 writes one at the end only."""
    every_minutes: NonNegativeFloat = 0.0
    """Minutes between checkpoints, in addition; all processes save after the same step. 0 is never.
    A file `save` in run.dir, or SIGUSR2 to a process of the run, asks for one at once."""
    light_every: NonNegativeInt = 0
    """Inner steps between light checkpoints, in addition: anchor and outer state only, the newest
    two of them; resume=PATH goes on from one, with fresh inner optimizer state. 0 writes none."""
    keep_last: PositiveInt = 2
    """Checkpoints that stay; older ones are removed after a newer one is committed."""
    keep_every: NonNegativeInt = 0
    """Checkpoints of steps that are a multiple of this stay for good; 0 keeps none of them."""
    background: bool = False
    """Write while training goes on, from a copy in host memory; the last one is waited for."""
    shared: bool = True
    """All processes see one run.dir; false where replicas write in different places. Each place
    then holds all that its replica needs; a checkpoint counts once every replica committed it."""
