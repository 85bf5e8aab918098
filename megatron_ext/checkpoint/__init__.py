"""Atomic, self-verifying checkpoints of a whole run."""

from megatron_ext.lazy import lazy

__getattr__ = lazy(
    __name__,
    {
        "SHARED_KINDS": "state",
        "Checkpoints": "checkpoints",
        "Outcome": "checkpoints",
        "TrainingState": "state",
        "Written": "saving",
    },
)
