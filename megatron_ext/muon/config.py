"""The inner optimizer's options."""

from typing import Annotated, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from megatron_ext.config import Section
from megatron_ext.errors import ConfigError

Fraction = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """Muon for the matrices of the layers and AdamW for the rest, or AdamW for all."""

    name: Literal["muon", "adamw"] = "muon"
    """What updates the matrices; embeddings, head and norms always have AdamW."""
    lr: PositiveFloat
    """Peak learning rate, of both halves."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled: a weight shrinks by lr × weight_decay a step."""
    warmup_steps: NonNegativeInt = 0
    """Steps of linear warm-up."""
    schedule: Literal["cosine", "wsd", "constant"] = "cosine"
    """After warm-up: cosine decay, a plateau with linear decay at the end (wsd), or constant."""
    final_lr_fraction: Annotated[float, Field(ge=0, le=1)] = 0.1
    """Learning rate at the last step, as a fraction of lr."""
    decay_steps: PositiveInt | None = None
    """Length of wsd's decay in steps."""
    clip: NonNegativeFloat = 1.0
    """Largest global gradient norm of a replica; 0 turns clipping off."""
    momentum: Fraction = 0.9
    """Muon's momentum."""
    nesterov: bool = False
    """Muon's Nesterov momentum."""
    newton_schulz_steps: PositiveInt = 5
    """Iterations that orthogonalise an update."""
    coefficients: Literal["quintic", "simple", "polar_express", "cans"] = "quintic"
    """Coefficients of the Newton–Schulz polynomials."""
    arithmetic: Literal["bf16", "fp32"] = "bf16"
    """Precision of the Newton–Schulz iteration."""
    scale: Literal["unit_rms_norm", "spectral", "shape_scaling", "match_adamw"] = "unit_rms_norm"
    """How the size of an orthogonal update depends on the matrix's shape."""
    adam_beta1: Fraction = 0.9
    """AdamW's decay of the first moment."""
    adam_beta2: Fraction = 0.99
    """AdamW's decay of the second moment."""
    adam_epsilon: PositiveFloat = 1e-8
    """AdamW's epsilon."""

    @model_validator(mode="after")
    def _check(self) -> "OptimizerConfig":
        if self.schedule == "wsd" and self.decay_steps is None:
            raise ConfigError(
                "optimizer.schedule=wsd needs optimizer.decay_steps, the length of its decay"
            )
        if self.schedule != "wsd" and self.decay_steps is not None:
            raise ConfigError(
                f"optimizer.decay_steps={self.decay_steps} is wsd's; "
                f"optimizer.schedule={self.schedule} has no use for it"
            )
        if self.coefficients == "cans" and self.arithmetic == "bf16":
            raise ConfigError(
                "optimizer.coefficients=cans with optimizer.arithmetic=bf16 can diverge: rounding "
                "carries singular values out of its interval; use fp32, or polar_express"
            )
        return self
