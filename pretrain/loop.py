"""The training loop."""

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt

from megatron_ext.config import Section


class TrainConfig(Section):
    """How long to train, on how much at a time, and in which arithmetic."""

    steps: PositiveInt
    """Inner steps of the whole run."""
    global_batch: PositiveInt
    """Sequences in one inner step, summed over all replicas."""
    micro_batch: PositiveInt
    """Sequences that one rank computes at a time."""
    seed: NonNegativeInt = 1234
    """Seed of initial weights and of the order of samples."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the model; master weights are fp32 either way."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations computed again in the backward pass: none, attention only, or whole layers."""
    overlap: bool = False
    """Overlap gradient reduction and parameter gather with computation."""
    log_every: PositiveInt = 1
    """Inner steps between lines of metrics.jsonl."""
    stop_at: PositiveInt | None = None
    """End this session after the given step, with a checkpoint."""
