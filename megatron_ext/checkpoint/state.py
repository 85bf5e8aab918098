"""What a checkpoint holds, as the training program hands it over."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from megatron_ext.blocks import Block

# State that is bit-identical in all replicas. It is saved once, not once for each replica.
SHARED_KINDS = ("anchor", "outer_momentum", "outer_square", "outer_pending")

# What a replica still owes to the others. A replica that joins owes nothing.
RESIDUAL_KINDS = ("error_feedback", "second_error")

# What a run may begin or cease to have: FP8's delayed scaling, which then starts afresh.
OPTIONAL_KINDS = ("fp8_scaling",)

# FP32 weights as a replica trains them.
MASTER_KIND = "master"

# GPA's average of them: what such a run is judged by.
AVERAGE_KIND = "average"

# Key prefix of the random states in a replica's folder, which no layout change can carry over.
RANDOM_KIND = "rng"

StateTensor = tuple[str, Block, Tensor]
"""State kind (MASTER_KIND, "momentum", …, or one of SHARED_KINDS), where it lies, and its values.

The tensor has the block's size.
"""


class TrainingState(Protocol):
    """One rank's view of everything that a run needs to go on."""

    def tensors(self) -> Iterable[StateTensor]:
        """The live tensors that this rank owns: read by a save, written in place by a load.

        Each kind covers each logical parameter exactly once over the ranks of a replica. Every
        rank of every replica hands over its shared kinds too; they are written once.
        """

    def counters(self) -> dict[str, Any]:
        """Plain data (JSON) that is the same on every rank of a replica: step, tokens, …"""

    def rng(self) -> Tensor:
        """Random states of this rank: uint8 [bytes]."""

    def accept(self, counters: dict[str, Any], path: Path) -> None:
        """Raise ConfigError if the run cannot go on from the checkpoint with these counters.

        Nothing is loaded yet. All processes get the same answer.
        """

    def restore(self, counters: dict[str, Any], rng: Tensor | None) -> None:
        """Take over counters and random states; the live tensors are loaded already.

        `rng` is None where the layout differs from the one that saved: then no rank's stream
        has a counterpart and the state derives fresh ones.
        """
