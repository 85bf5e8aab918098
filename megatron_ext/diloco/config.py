"""The outer loop's options."""

from typing import Annotated

from pydantic import Field, NonNegativeInt, PositiveFloat

from megatron_ext.config import Section


class OuterConfig(Section):
    """The outer step θ ← θ − lr·(mean Δ + momentum·B) between replicas."""

    interval: NonNegativeInt = 0
    """Inner steps between outer steps (H); 0 is plain data parallelism, without an outer loop."""
    lr: PositiveFloat = 0.7
    """Outer learning rate (η)."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.6
    """Outer Nesterov momentum (μ)."""
