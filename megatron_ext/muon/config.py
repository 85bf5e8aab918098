"""The inner optimizer's options."""

from typing import Annotated, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Strict,
    model_validator,
)

from megatron_ext.config import Section
from megatron_ext.errors import ConfigError

Fraction = Annotated[float, Field(ge=0, lt=1)]


class Rule(Section):
    """What some parameters get instead of the defaults; the last rule that matches decides."""

    match: str = ""
    """Logical names, with * and ?, for example "*.attention.v" or "layers.0.*"."""
    optimizer: Literal["muon", "adamw"] | None = None
    """muon, only for matrices inside layers, or adamw."""
    lr_factor: NonNegativeFloat | None = None
    """Factor on the learning rate; 0 freezes."""
    weight_decay: NonNegativeFloat | None = None
    """Weight decay."""

    @model_validator(mode="after")
    def _check(self) -> "Rule":
        if not self.match:
            raise ConfigError('optimizer.rules: every rule needs match, as in match: "*.mlp.down"')
        if self.optimizer is None and self.lr_factor is None and self.weight_decay is None:
            raise ConfigError(
                f"optimizer.rules: the rule for {self.match!r} changes nothing; "
                "give it optimizer, lr_factor or weight_decay"
            )
        return self


class AveragingConfig(Section):
    """Primal averaging (GPA, arXiv 2512.17131): an average x follows the weights z that the
    optimizer steps; the model trains between them, at y = mix·x + (1 − mix)·z, and is validated and
    exported at x."""

    decay: Fraction = 0.0
    """x ← decay·x + (1 − decay)·z after each step (μ_x; published 0.9967); 0 turns it off."""
    mix: Fraction = 0.7
    """Share of x in what is trained (μ_y)."""


class OptimizerConfig(Section):
    """Muon for the matrices of the layers and AdamW for the rest, or AdamW for all."""

    name: Literal["muon", "adamw"] = "muon"
    """What updates the matrices; embeddings, head and norms always have AdamW."""
    lr: PositiveFloat
    """Peak learning rate, of both halves."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled: a weight shrinks by lr × weight_decay a step."""
    cautious_decay: bool = False
    """Decay only weights that their update makes smaller (arXiv 2510.12402)."""
    rules: Annotated[tuple[Rule, ...], Strict(False)] = ()  # a list will do
    """Other routes by logical name: a list of {match, optimizer, lr_factor, weight_decay}."""
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
    syrk: bool = False
    """Use emerging-optimizers' kernel for symmetric products on large matrices (GPU, bf16)."""
    scale: Literal["unit_rms_norm", "spectral", "shape_scaling", "match_adamw"] = "unit_rms_norm"
    """How the size of an orthogonal update depends on the matrix's shape."""
    per_head: bool = False
    """Orthogonalise Q, K and V head by head instead of all heads as one matrix."""
    normuon: bool = False
    """Even the rows of Muon's update out by a second moment (NorMuon, arXiv 2510.05491)."""
    normuon_beta2: Fraction = 0.95
    """NorMuon's decay of that moment."""
    adam_beta1: Fraction = 0.9
    """AdamW's decay of the first moment."""
    adam_beta2: Fraction = 0.99
    """AdamW's decay of the second moment."""
    adam_epsilon: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    averaging: AveragingConfig = AveragingConfig()
    self_check: bool = False
    """Before training, compare a step on random gradients with the float64 reference."""

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
        if self.normuon and self.name != "muon":
            raise ConfigError("optimizer.normuon=true needs optimizer.name=muon")
        if self.per_head and self.name != "muon":
            raise ConfigError("optimizer.per_head=true needs optimizer.name=muon")
        if self.syrk and self.arithmetic != "bf16":
            raise ConfigError(
                f"optimizer.syrk=true is a bf16 kernel; optimizer.arithmetic={self.arithmetic} "
                "cannot use it"
            )
        if self.coefficients == "cans" and self.arithmetic == "bf16":
            raise ConfigError(
                "optimizer.coefficients=cans with optimizer.arithmetic=bf16 can diverge: rounding "
                "carries singular values out of its interval; use fp32, or polar_express"
            )
        return self
