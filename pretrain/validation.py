"""Loss of the global weights on held-out text."""

from pydantic import NonNegativeInt, PositiveInt

from megatron_ext.config import Section


class ValidationConfig(Section):
    """When and on how much held-out text."""

    every: NonNegativeInt = 0
    """Inner steps between validations; 0 turns them off."""
    batches: PositiveInt = 4
    """Global batches of held-out text in one validation."""
