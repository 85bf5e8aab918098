"""The outer loop's options."""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from megatron_ext.blocks import Block
from megatron_ext.config import Section
from megatron_ext.diloco.codecs import Codec, Kind, make
from megatron_ext.diloco.units import Order
from megatron_ext.diloco.wire import LinkConfig
from megatron_ext.errors import ConfigError
from megatron_ext.model.logical import kind_of

Fraction = Annotated[float, Field(ge=0, lt=1)]
Share = Annotated[float, Field(ge=0, le=1)]
_BY_METHOD = {"derived": "by inner optimizer and number of replicas, as published"}


class ScheduleConfig(Section):
    """How a value changes over the run."""

    shape: Literal["constant", "cosine"] = "constant"
    """After warm-up: constant, or cosine decay to the last step."""
    warmup_steps: NonNegativeInt = 0
    """Inner steps over which it rises linearly."""
    final_fraction: Share = 0.1
    """Where cosine ends, as a fraction of the value; with 0 the last round's training is lost."""


class OuterConfig(Section):
    """The outer step between replicas: what is sent when, how it is packed, and what it does."""

    interval: NonNegativeInt = 0
    """Inner steps between outer steps (H); 0 is plain data parallelism, without an outer loop."""
    optimizer: Literal["nesterov", "sgd", "adamw", "muon", "mean"] = "nesterov"
    """What moves the anchor: mean is to the mean of the replicas; with muon, embeddings, head and
    norms keep nesterov."""
    lr: PositiveFloat | None = Field(None, json_schema_extra=_BY_METHOD)
    """Outer learning rate (η)."""
    momentum: Fraction | None = Field(None, json_schema_extra=_BY_METHOD)
    """Outer momentum (μ); of AdamW the decay of the first moment."""
    matrix_lr: PositiveFloat = 0.02
    """Outer learning rate of matrices with optimizer=muon; lr_schedule changes it too."""
    adam_beta2: Fraction = 0.99
    """AdamW's decay of the second moment."""
    adam_epsilon: PositiveFloat = 1e-8
    """AdamW's epsilon."""
    lr_schedule: ScheduleConfig = ScheduleConfig()
    """How the outer learning rate changes over the run."""
    momentum_schedule: ScheduleConfig = ScheduleConfig()
    """How the outer momentum changes over the run."""
    fragments: PositiveInt = 1
    """Parts of the model that are sent one after another, spread over the round (P)."""
    fragment_order: Order = "contiguous"
    """Which layers a fragment has: neighbours, or every P-th (strided)."""
    delay: NonNegativeInt = 0
    """Inner steps between sending a fragment and applying it (τ), less than interval."""
    mix: Share = 0.0
    """Share of the replica's own value that stays when a fragment is applied (α)."""
    codec: Kind = "fp32"
    """How pseudogradients are packed between replicas; a single replica sends none."""
    bits: Literal[2, 4, 8] | None = None
    """Bits of a value, for linear and statistical."""
    per_row: bool = False
    """Measure each row of a matrix for itself, for linear and statistical."""
    keep: Annotated[float, Field(gt=0, le=1)] | None = None
    """Fraction of the values that topk keeps."""
    chunk: PositiveInt | None = None
    """Values of which topk keeps that fraction; null is a whole matrix."""
    compress_norms: bool = False
    """Pack the weights of norms too."""
    error_feedback: bool = False
    """Add what packing left out to what is sent next."""
    error_decay: Share = 0.9
    """What of it is left a round later (β)."""
    second_error_feedback: bool = False
    """The same where the mean is packed."""
    exchange: Literal["reduce_scatter", "gather"] = "reduce_scatter"
    """gather sends every replica's codes to all others: more bytes with more replicas."""
    bad_replica: Literal["stop", "leave_out"] = "stop"
    """What to do with a replica whose pseudogradient is not finite, or an outlier."""
    outlier_factor: Annotated[float, Field(gt=1)] | None = None
    """A norm above so many times the median of all replicas' is an outlier; null: none is."""
    host_memory: bool = False
    """Keep anchor, outer momentum and error buffers in host memory, pinned where the GPU reads it,
    and send from there."""
    link: LinkConfig = LinkConfig()

    def codecs_of(self, units: Sequence[Block]) -> list[Codec]:
        """How each unit is packed; one codec for all that are packed alike."""
        codec = make(self.codec, self.bits, self.per_row, self.keep, self.chunk)
        of_norms = codec if self.compress_norms else make("fp32")
        return [of_norms if kind_of(unit.name) == "norm" else codec for unit in units]

    @model_validator(mode="before")
    @classmethod
    def _fill_in_mean(cls, values: Any) -> Any:
        """A plain mean is plain gradient descent with a learning rate of 1."""
        if not isinstance(values, dict) or values.get("optimizer") != "mean":
            return values
        given = {key: value for key, value in values.items() if value is not None}
        return {"lr": 1.0, "momentum": 0.0} | given

    @model_validator(mode="after")
    def _check(self) -> "OuterConfig":
        make(self.codec, self.bits, self.per_row, self.keep, self.chunk)
        if self.interval == 0:
            return self
        if self.delay >= self.interval:
            raise ConfigError(
                f"outer.delay={self.delay} must be less than outer.interval={self.interval}: "
                "a fragment is applied before it is sent again"
            )
        if self.fragments > self.interval:
            raise ConfigError(
                f"outer.fragments={self.fragments} must not exceed outer.interval="
                f"{self.interval}; each is sent after an inner step of its own"
            )
        if self.optimizer == "adamw" and (self.lr is None or self.momentum is None):
            raise ConfigError(
                "outer.optimizer=adamw needs outer.lr and outer.momentum: a step is about as long "
                "as the learning rate, in every weight, and nothing is published for it"
            )
        if self.optimizer == "adamw" and self.momentum_schedule != ScheduleConfig():
            raise ConfigError(
                "outer.momentum_schedule is not for outer.optimizer=adamw, whose bias correction "
                "supposes a constant decay; leave it out"
            )
        schedules = (self.lr_schedule, self.momentum_schedule)
        if self.optimizer == "mean" and (
            (self.lr, self.momentum) != (1.0, 0.0) or schedules != (ScheduleConfig(),) * 2
        ):
            raise ConfigError(
                "outer.optimizer=mean has neither outer.lr nor outer.momentum, nor schedules of "
                "them; leave them out (outer.lr=null where a recipe gives it), or use "
                "outer.optimizer=sgd"
            )
        return self
