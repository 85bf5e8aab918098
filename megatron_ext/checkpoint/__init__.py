"""Atomic, self-verifying checkpoints of a whole run."""

from megatron_ext.checkpoint.checkpoints import Checkpoints, Outcome
from megatron_ext.checkpoint.saving import Written
from megatron_ext.checkpoint.state import SHARED_KINDS, TrainingState

__all__ = ["SHARED_KINDS", "Checkpoints", "Outcome", "TrainingState", "Written"]
