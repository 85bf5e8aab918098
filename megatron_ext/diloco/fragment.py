"""One fragment of the model on one rank: its anchor, what it sends, and how it is applied."""

import time
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.blocks import Block
from megatron_ext.diloco.background import Background
from megatron_ext.diloco.config import OuterConfig
from megatron_ext.diloco.exchange import Exchange
from megatron_ext.diloco.outer import make
from megatron_ext.diloco.record import Round, Summary
from megatron_ext.diloco.share import Share
from megatron_ext.diloco.wire import Wire
from megatron_ext.muon.views import views


class Fragment:
    """State and exchange of one fragment; the loop decides when.

    Attributes:
        units: what this rank holds of it.
        anchor: flat FP32, unit by unit.
        rounds: outer steps taken.
        sent: inner steps taken when it was sent; None while nothing is in flight.
        since: inner steps since the masters of all replicas were the anchor.
        tokens: trained on by this replica since it was last sent.
    """

    def __init__(
        self,
        index: int,
        config: OuterConfig,
        share: Share,
        wire: Wire,
        replica: dist.ProcessGroup,
        background: Background,
    ):
        """Collective over the replica. `replica`: for the scalars of `Exchange`."""
        self.index = index
        self._config = config
        self._share = share
        self._wire = wire
        self._background = background
        self.units = share.units[index]
        start = share.collect(index)
        self.anchor = _in_host_memory(start) if config.host_memory else start
        self.optimizer = make(config, self.units)
        self.optimizer.prepare(self._split(self.anchor))
        # What is sent, and after that the mean that came back.
        self._delta = _like(self.anchor).zero_() if config.delay else None
        shift = index + dist.get_rank()
        self._exchange = Exchange(config, self.units, self.anchor, wire, replica, shift)
        self.rounds = self.since = 0
        self.tokens = 0.0
        self.sent: int | None = None
        self._sent_tokens = 0.0
        self._running: Future[tuple[Summary, float]] | None = None
        self._summary: Summary | None = None
        self._seconds = self._exposed_seconds = 0.0

    def send(self, step: int) -> None:
        """Start the exchange of how far the masters are from the anchor. Collective."""
        started = time.perf_counter()
        own = self._share.collect(self.index)
        if self._delta is None:
            self._delta = own if own.device == self.anchor.device else _like(self.anchor)
        self._running = self._background.submit(partial(self._reduce, own, self.tokens))
        self.sent, self._sent_tokens, self.tokens = step, self.tokens, 0.0
        self._exposed_seconds = time.perf_counter() - started

    def settle(self) -> None:
        """Wait for what is in flight to arrive; it is not applied yet."""
        if self._running is None:
            return
        started = time.perf_counter()
        (self._summary, seconds), self._running = self._running.result(), None
        self._seconds = self._exposed_seconds + seconds
        self._exposed_seconds += time.perf_counter() - started

    def take_back(self) -> None:
        """As if what is in flight had not been sent: the masters still hold all of it."""
        if self.sent is None:
            return
        self.tokens += self._sent_tokens
        self.sent = self._running = self._summary = None
        self._exchange.take_back()

    @torch.no_grad()
    def apply(self, step: int, mix: float, lr: float, momentum: float) -> Round:
        """Take the outer step with what was sent, and set the masters. Collective."""
        self.settle()
        started = time.perf_counter()
        summary, sent = self._summary, self.sent
        assert summary is not None and sent is not None and self._delta is not None
        self.optimizer.lr, self.optimizer.momentum = lr, momentum
        self.optimizer.step(self._split(self.anchor), self._split(self._delta))
        # Of a replica that was left out nothing is worth keeping.
        self._set_masters(0.0 if self._wire.index in summary.left_out else mix)
        if not self._config.delay:
            self._delta = None
        self.rounds += 1
        if mix == 0:  # in all replicas alike: the loop decides by `since` what all send at the end
            self.since = 0
        self.sent = self._summary = None
        applied = time.perf_counter() - started
        return Round(
            round=self.rounds,
            fragment=self.index,
            step=step,
            sent=sent,
            replicas=self._wire.count,
            lr=lr,
            momentum=momentum,
            seconds=self._seconds + applied,
            exposed_seconds=self._exposed_seconds + applied,
            **asdict(summary),
        )

    def show(self) -> None:
        """Set the masters to the anchor. Collective."""
        self._share.deliver(self.index, self.anchor)

    def tensors(self) -> Iterator[tuple[str, Block, torch.Tensor]]:
        """What a checkpoint holds of it: kind, block, view."""
        flats = {"anchor": self.anchor}
        if self._config.delay:
            flats["outer_pending"] = self._delta
        flats |= self._exchange.errors
        by_kind = {kind: self._split(flat) for kind, flat in flats.items()}
        for kind, parts in (by_kind | self.optimizer.state).items():
            for unit, part in zip(self.units, parts, strict=True):
                yield kind, unit, part

    def counters(self) -> dict[str, Any]:
        """Plain data for a checkpoint; `settle` first."""
        return {
            "rounds": self.rounds,
            "since": self.since,
            "tokens": self.tokens,
            "sent": self.sent,
            "sent_tokens": self._sent_tokens,
            "summary": asdict(self._summary) if self._summary else None,
        }

    def restore(self, counters: dict[str, Any]) -> None:
        """Take over what `counters` gave; the tensors are loaded already. Collective."""
        self.rounds = self.optimizer.steps = counters["rounds"]
        self.since, self.tokens = counters["since"], counters["tokens"]
        self.sent = counters["sent"]
        self._summary = Summary(**counters["summary"]) if counters["summary"] else None
        self._sent_tokens = counters.get("sent_tokens", 0.0)
        self._seconds = self._exposed_seconds = 0.0
        self._exchange.rehome()

    def _set_masters(self, mix: float) -> None:
        if mix == 1:
            return
        value = self.anchor
        if mix:
            own = self._share.collect(self.index)
            value = torch.lerp(value.to(own.device), own, mix)
        self._share.deliver(self.index, value)

    def _reduce(self, own: torch.Tensor, tokens: float) -> tuple[Summary, float]:
        """In the background: from the masters to the mean pseudogradient, and how long it took."""
        started = time.perf_counter()
        delta = self._delta
        delta.copy_(own)
        torch.sub(self.anchor, delta, out=delta)
        norm = self.anchor.norm().item()
        summary = self._exchange.run(delta, norm, tokens, self.rounds + 1)
        return summary, time.perf_counter() - started

    def _split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return views(flat, [unit.size for unit in self.units])


def _in_host_memory(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return host.copy_(tensor)


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """Room for another one in the same kind of memory."""
    return torch.empty_like(tensor, pin_memory=tensor.is_pinned())
