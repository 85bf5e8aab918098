"""DiLoCo's outer loop over the inner optimizer's masters.

Every H inner steps each replica sends how far it has moved from the anchor, and all move the anchor
by the mean (arXiv 2311.08105, algorithm 1; with Muon inside, arXiv 2505.23725). Each rank carries
the masters that it owns, so a replica sends every parameter once, whatever its layout.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_ext.blocks import Block
from megatron_ext.diloco.collective import ReplicaMean
from megatron_ext.diloco.config import OuterConfig
from megatron_ext.diloco.outer import NesterovSGD
from megatron_ext.errors import TrainingError
from megatron_ext.muon.optimizer import InnerOptimizer
from megatron_ext.muon.views import views
from megatron_ext.replicas import Replicas


@dataclass(frozen=True)
class Round:
    """What an outer step did: a line of rounds.jsonl. Norms are of the whole model."""

    round: int  # from 1
    fragment: int
    step: int  # inner steps taken so far
    replicas: int
    pseudogradient_norm: float  # of the mean
    cosine: float | None  # between the pseudogradients of two replicas, on average
    drift: float  # ‖θ_replica − θ‖ / ‖θ‖, on average
    bytes_sent: int  # by this replica to the others
    bytes_planned: int
    seconds: float
    exposed_seconds: float  # of them, those in which training stood still


class OuterLoop:
    """The anchor, the outer optimizer and the position inside the round, for one rank.

    Attributes:
        anchor: flat FP32, laid out as the inner optimizer's masters.
        mean: the collective between replicas.
        rounds: outer steps taken.
        position: inner steps since the last outer step.
    """

    def __init__(self, inner: InnerOptimizer, config: OuterConfig, replicas: Replicas):
        self._inner = inner
        self._interval = config.interval
        self._replicas = replicas
        self.mean = ReplicaMean(replicas.link)
        self.anchor = inner.masters.clone()
        self.optimizer = NesterovSGD(config.lr, config.momentum)
        self.optimizer.prepare([self.anchor])
        self.rounds = 0
        self.position = 0

    def step(self, step: int, last: bool = False) -> Round | None:
        """Call after inner step number `step`; takes the outer step when a round is full.

        The last step of a run ends its round, however short, so that nothing trained is lost.

        Raises TrainingError naming the replica whose pseudogradient is not finite, before anything
        has changed, and PeerError naming a replica that does not answer.
        """
        self.position += 1
        if self.position < self._interval and not last:
            return None
        with self._replicas.guard(f"outer step {self.rounds + 1}"):
            return self._outer_step(step)

    @torch.no_grad()
    def _outer_step(self, step: int) -> Round:
        started = time.perf_counter()
        sent_before = self.mean.bytes_sent
        delta = self.anchor - self._inner.masters
        norms, anchor_norm = self._norms(delta)
        self.mean.reduce(delta)
        mean_norm = _sum_over_replica(delta.square().sum()).sqrt().item()
        self.optimizer.step([self.anchor], [delta])
        self._inner.masters.copy_(self.anchor)
        self._inner.write_weights()
        self.rounds += 1
        self.position = 0
        sent = self.mean.bytes_sent - sent_before
        planned = self.mean.planned_bytes(delta.numel())
        counts = torch.tensor([sent, planned], device=delta.device)
        sent, planned = _sum_over_replica(counts).tolist()
        seconds = time.perf_counter() - started
        return Round(
            round=self.rounds,
            fragment=0,
            step=step,
            replicas=self.mean.count,
            pseudogradient_norm=mean_norm,
            cosine=_cosine(norms, mean_norm),
            drift=sum(norms) / len(norms) / anchor_norm,
            bytes_sent=sent,
            bytes_planned=planned,
            seconds=seconds,
            exposed_seconds=seconds,
        )

    @contextmanager
    def global_weights(self) -> Iterator[None]:
        """Let the model compute with the anchor inside the block.

        Costs nothing right after an outer step; elsewhere the replica's weights step aside.
        """
        if self.position == 0:
            yield
            return
        own = self._inner.masters.clone()
        self._write(self.anchor)
        try:
            yield
        finally:
            self._write(own)

    def tensors(self) -> Iterator[tuple[str, Block, torch.Tensor]]:
        """What a checkpoint holds of it, equal on all replicas: kind, block, view."""
        (momentum,) = self.optimizer.buffers
        sizes = [block.size for block in self._inner.blocks]
        for kind, flat in (("anchor", self.anchor), ("outer_momentum", momentum)):
            for block, view in zip(self._inner.blocks, views(flat, sizes), strict=True):
                yield kind, block, view

    def _write(self, masters: torch.Tensor) -> None:
        self._inner.masters.copy_(masters)
        self._inner.write_weights()

    def _norms(self, delta: torch.Tensor) -> tuple[list[float], float]:
        """Norm of each replica's pseudogradient, and of the anchor."""
        squares = torch.stack([delta.square().sum(), self.anchor.square().sum()]).double()
        of_replicas = _sum_over_replica(self.mean.gather_scalars(squares)).sqrt()
        norms = of_replicas[:, 0].tolist()
        bad = [str(index) for index, norm in enumerate(norms) if not norm < float("inf")]
        if bad:
            raise TrainingError(
                f"outer step {self.rounds + 1}: the pseudogradient of replica {', '.join(bad)} is "
                "not finite; the outer step was not taken. Resume from the last checkpoint"
            )
        return norms, of_replicas[self._replicas.index, 1].item()


def _sum_over_replica(values: torch.Tensor) -> torch.Tensor:
    dist.all_reduce(values)  # the default group is the replica
    return values


def _cosine(norms: list[float], mean_norm: float) -> float | None:
    """Σ⟨Δi, Δj⟩ / Σ‖Δi‖‖Δj‖ over pairs i ≠ j, which needs no pair's product.

    With two replicas, or equal norms, it is the mean pairwise cosine.
    """
    count = len(norms)
    products = sum(norms) ** 2 - sum(norm**2 for norm in norms)
    if count == 1 or products == 0:
        return None
    return ((count * mean_norm) ** 2 - sum(norm**2 for norm in norms)) / products
