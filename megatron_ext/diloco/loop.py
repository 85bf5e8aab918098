"""DiLoCo's outer loop over the inner optimizer's masters.

Every H inner steps each replica sends how far it has moved from the anchor, and all move the anchor
by the mean (arXiv 2311.08105, algorithm 1; with Muon inside, arXiv 2505.23725). The model may be
sent in fragments, spread over the round, and a fragment applied some steps after it was sent, so
that the exchange hides behind inner steps (arXiv 2501.18512). Each rank carries whole units of what
the replica owns, so a replica sends every parameter once, whatever its layout.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.blocks import Block
from megatron_ext.diloco.background import Background
from megatron_ext.diloco.config import OuterConfig, ScheduleConfig
from megatron_ext.diloco.fragment import Fragment
from megatron_ext.diloco.record import Round
from megatron_ext.diloco.share import Share
from megatron_ext.diloco.units import fragments_of, offsets
from megatron_ext.diloco.wire import Wire
from megatron_ext.errors import ConfigError
from megatron_ext.muon.optimizer import InnerOptimizer
from megatron_ext.replicas import Replicas

__all__ = ["OuterLoop", "Round"]


class OuterLoop:
    """The outer loop as one rank sees it.

    Attributes:
        fragments: in the order in which a round sends them.
    """

    def __init__(
        self,
        inner: InnerOptimizer,
        config: OuterConfig,
        replicas: Replicas,
        steps: int,
    ):
        """Start from the inner optimizer's masters. `steps`: of the run, for schedules that end.

        Collective over the replica.
        """
        if config.lr is None or config.momentum is None:
            raise ConfigError("outer.lr and outer.momentum have no value; give them")
        self._inner = inner
        self._config = config
        self._replicas = replicas
        self._steps = steps
        device = torch.device("cpu") if config.host_memory else inner.masters.device
        self._wire = Wire(replicas.link, config.link, device)
        self._background = Background("outer-exchange", inner.masters.device)
        timeout = timedelta(seconds=replicas.timeout_seconds)
        replica = dist.new_group(backend="gloo", timeout=timeout)
        names = list(inner.stage.routes)  # of the whole model
        fragments = fragments_of(names, config.fragments, config.fragment_order)
        share = Share(inner.blocks, inner.masters, fragments)
        self.fragments = [
            Fragment(index, config, share, self._wire, replica, self._background)
            for index in range(config.fragments)
        ]
        self._offsets = offsets(config.interval, config.fragments)

    def step(self, step: int, tokens: float, last: bool = False) -> list[Round]:
        """Call after inner step number `step`, in which this replica trained on `tokens`.

        What a replica has trained on since it last sent a fragment is its weight in the mean.
        Sends and applies what is due, and returns what was applied. The last step of a run applies
        everything, however early, so that nothing trained is lost and all replicas are equal.

        Raises TrainingError naming a replica whose pseudogradient cannot be used, before anything
        has changed, and PeerError naming a replica that does not answer.
        """
        for fragment in self.fragments:
            fragment.since += 1
            fragment.tokens += tokens
        rounds = sum(fragment.rounds for fragment in self.fragments)
        with self._replicas.guard(f"outer step {rounds + 1}"):
            applied = self._finish(step) if last else self._advance(step)
            if applied:
                self._inner.write_weights()
        return applied

    def settle(self) -> None:
        """Wait for what is in flight, for a checkpoint; applying it stays due as it was."""
        with self._replicas.guard("outer exchange"):
            for fragment in self.fragments:
                fragment.settle()

    def take_back(self) -> None:
        """Forget what is in flight, since another replica is lost; the next outer step has it."""
        for fragment in self.fragments:
            fragment.take_back()

    @contextmanager
    def global_weights(self) -> Iterator[None]:
        """Let the model compute with the anchor inside the block.

        Costs nothing right after all of it was applied; elsewhere the replica's weights step aside.
        """
        if all(fragment.since == 0 for fragment in self.fragments):
            yield
            return
        own = self._inner.masters.clone()
        for fragment in self.fragments:
            fragment.show()
        self._inner.write_weights()
        try:
            yield
        finally:
            self._inner.masters.copy_(own)
            self._inner.write_weights()

    def gather_scalars(self, values: torch.Tensor) -> torch.Tensor:
        """A few FP64 scalars [n] of each replica → [K, n]; after what is in flight."""
        with self._replicas.guard("sum over replicas"):
            return self._background.submit(partial(self._wire.gather, values)).result()

    def tensors(self) -> Iterator[tuple[str, Block, torch.Tensor]]:
        """What a checkpoint holds of it: kind, block, view. `settle` first."""
        for fragment in self.fragments:
            yield from fragment.tensors()

    def counters(self) -> dict[str, Any]:
        """Plain data for a checkpoint. `settle` first."""
        return {"fragments": [fragment.counters() for fragment in self.fragments]}

    def restore(self, counters: dict[str, Any], at_anchor: bool = False) -> None:
        """Take over what `counters` gave; the tensors are loaded already.

        `at_anchor`: the masters are the anchor, wherever in the round they were.
        """
        saved = counters["fragments"]
        if len(saved) != len(self.fragments):
            raise ConfigError(
                f"outer.fragments={len(self.fragments)} and was {len(saved)} in the checkpoint; a "
                "resumed run must go on with the same"
            )
        for fragment, theirs in zip(self.fragments, saved, strict=True):
            fragment.restore(theirs | {"since": 0, "tokens": 0.0} if at_anchor else theirs)

    def _advance(self, step: int) -> list[Round]:
        """Apply what was sent `delay` steps ago, send what is due."""
        delay = self._config.delay
        applied = [
            self._apply(fragment, step, self._config.mix)
            for fragment in self.fragments
            if fragment.sent is not None and step - fragment.sent >= delay
        ]
        due = [
            fragment
            for fragment, offset in zip(self.fragments, self._offsets, strict=True)
            if step >= offset and (step - offset) % self._config.interval == 0
        ]
        for fragment in due:
            fragment.send(step)
        if delay == 0:
            applied += [self._apply(fragment, step, self._config.mix) for fragment in due]
        return applied

    def _finish(self, step: int) -> list[Round]:
        """Apply what is in flight, then a last round of everything, without mixing."""
        in_flight = [fragment for fragment in self.fragments if fragment.sent is not None]
        in_flight.sort(key=lambda fragment: fragment.sent)
        applied = [self._apply(fragment, step, self._config.mix) for fragment in in_flight]
        changed = [fragment for fragment in self.fragments if fragment.since]
        for fragment in changed:
            fragment.send(step)
        return applied + [self._apply(fragment, step, mix=0.0) for fragment in changed]

    def _apply(self, fragment: Fragment, step: int, mix: float) -> Round:
        config = self._config
        lr = config.lr * scheduled(config.lr_schedule, step, self._steps)
        momentum = config.momentum * scheduled(config.momentum_schedule, step, self._steps)
        return fragment.apply(step, mix, lr, momentum)


def scheduled(schedule: ScheduleConfig, step: int, steps: int) -> float:
    """The factor of inner step `step` of 1 … `steps`: linear warm-up, then constant or cosine."""
    if step < schedule.warmup_steps:
        return step / schedule.warmup_steps
    if schedule.shape == "constant":
        return 1.0
    done = (step - schedule.warmup_steps) / max(1, steps - schedule.warmup_steps)
    falling = (1 + math.cos(math.pi * done)) / 2
    return schedule.final_fraction + (1 - schedule.final_fraction) * falling
