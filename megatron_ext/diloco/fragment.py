"""One fragment of the model on one rank: its anchor, what it sends, and how it is applied."""

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.blocks import Block
from megatron_ext.diloco.background import Background
from megatron_ext.diloco.codecs import Codec, make
from megatron_ext.diloco.collective import Collective, ErrorFeedback
from megatron_ext.diloco.config import OuterConfig
from megatron_ext.diloco.outer import SGD, AdamW, Mean, Muon, NesterovSGD, OuterOptimizer
from megatron_ext.diloco.plan import plan_buckets
from megatron_ext.diloco.record import Before, Round, Summary, pack, summarise
from megatron_ext.diloco.share import Share
from megatron_ext.diloco.wire import Wire
from megatron_ext.errors import TrainingError
from megatron_ext.model.logical import kind_of
from megatron_ext.muon.views import views


@dataclass(frozen=True)
class _Result:
    """What the background thread hands over: everything, but for the sums over the replica."""

    before: Before
    left_out: list[int]
    scalars: torch.Tensor  # [K, scalars]
    seconds: float


class Fragment:
    """State and exchange of one fragment; the loop decides when.

    Attributes:
        units: what this rank holds of it.
        anchor: flat FP32, unit by unit.
        rounds: outer steps taken.
        sent: inner steps taken when it was sent; None while nothing is in flight.
        since: inner steps since the masters were the anchor.
        tokens: trained on by this replica since it was last sent.
    """

    def __init__(
        self,
        index: int,
        config: OuterConfig,
        share: Share,
        wire: Wire,
        background: Background,
    ):
        self.index = index
        self._config = config
        self._share = share
        self._wire = wire
        self._background = background
        self.units = share.units[index]
        start = share.collect(index)
        self._cuda = start.device if start.is_cuda else None
        self.anchor = _in_host_memory(start) if config.host_memory else start
        self.optimizer = make_optimizer(config, self.units)
        self.optimizer.prepare(self._split(self.anchor))
        # What is sent, and after that the mean that came back.
        self._delta = torch.zeros_like(self.anchor) if config.delay else None
        self._first_leg = self._second_leg = None
        if wire.count > 1 and config.error_feedback:
            self._first_leg = ErrorFeedback(self.anchor, config.error_decay)
        if wire.count > 1 and config.second_error_feedback:
            self._second_leg = ErrorFeedback(self.anchor, config.error_decay)
        self._collective = Collective(
            wire,
            plan_buckets(self.units, _codecs(config, self.units), wire.count, shift=self._shift),
            config.exchange == "gather",
            self._first_leg,
            self._second_leg,
        )
        self.rounds = self.since = 0
        self.tokens = 0.0
        self.sent: int | None = None
        self._running: Future[_Result] | None = None
        self._summary: Summary | None = None
        self._seconds = self._exposed_seconds = 0.0

    @property
    def _shift(self) -> int:
        return self.index + dist.get_rank()

    @torch.no_grad()
    def send(self, step: int) -> None:
        """Start the exchange of how far the masters are from the anchor. Collective."""
        started = time.perf_counter()
        delta = self._delta if self._delta is not None else torch.empty_like(self.anchor)
        torch.sub(self.anchor, self._share.collect(self.index).to(self.anchor.device), out=delta)
        squares = [delta.norm().item() ** 2, self.anchor.norm().item() ** 2]
        scalars = torch.cat(
            [
                self._add_up(torch.tensor(squares, dtype=torch.float64)),
                torch.tensor([self.tokens], dtype=torch.float64),
            ]
        )
        stream = torch.cuda.current_stream(self._cuda) if self._cuda else None
        ready = stream.record_event() if stream else None
        self._delta = delta
        self.sent, self.tokens = step, 0.0
        self._running = self._background.submit(lambda: self._exchange(scalars, delta, ready))
        self._exposed_seconds = time.perf_counter() - started

    def settle(self) -> None:
        """Wait for what is in flight to arrive; it is not applied yet. Collective."""
        if self._running is None:
            return
        started = time.perf_counter()
        result, self._running = self._running.result(), None
        totals = self._add_up(result.scalars)
        self._summary = summarise(result.before, result.left_out, totals, self._wire.index)
        waited = time.perf_counter() - started
        self._seconds = self._exposed_seconds + result.seconds
        self._exposed_seconds += waited

    @torch.no_grad()
    def apply(self, step: int, mix: float, lr: float, momentum: float) -> Round:
        """Take the outer step with what was sent, and set the masters. Collective."""
        self.settle()
        started = time.perf_counter()
        summary, sent = self._summary, self.sent
        assert summary is not None and sent is not None and self._delta is not None
        self.optimizer.lr, self.optimizer.momentum = lr, momentum
        self.optimizer.step(self._split(self.anchor), self._split(self._delta))
        if self._wire.index in summary.left_out:
            mix = 0.0  # nothing of its own is worth keeping
        self._set_masters(mix)
        if not self._config.delay:
            self._delta = None
        self.rounds += 1
        if mix == 0:
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
        if self._first_leg:
            flats["error_feedback"] = self._first_leg.error
        if self._second_leg:
            flats["second_error"] = self._second_leg.error
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
            "summary": asdict(self._summary) if self._summary else None,
        }

    def restore(self, counters: dict[str, Any]) -> None:
        """Take over what `counters` gave; the tensors are loaded already. Collective on the link.

        What the second leg owes is with the replica that reduces it, which another layout may have
        changed; so all learn the sum.
        """
        self.rounds = self.optimizer.steps = counters["rounds"]
        self.since, self.tokens = counters["since"], counters["tokens"]
        self.sent = counters["sent"]
        self._summary = Summary(**counters["summary"]) if counters["summary"] else None
        self._seconds = self._exposed_seconds = 0.0
        if self._second_leg:
            self._collective.rehome(self._second_leg.error)

    def _set_masters(self, mix: float) -> None:
        if mix == 1:
            return
        value = self.anchor
        if mix:
            own = self._share.collect(self.index).to(value.device)
            value = torch.lerp(value, own, mix)
        self._share.deliver(self.index, value)

    def _exchange(
        self, scalars: torch.Tensor, delta: torch.Tensor, ready: torch.cuda.Event | None
    ) -> _Result:
        """On the background thread: from this replica's pseudogradient to the mean."""
        started = time.perf_counter()
        stream = torch.cuda.Stream(self._cuda) if self._cuda else None
        with torch.cuda.stream(stream) if stream else nullcontext():
            if stream:
                stream.wait_event(ready)
            gathered = self._gather(scalars)
            norms = gathered[:, 0].sqrt().tolist()
            anchor_norm = gathered[self._wire.index, 1].sqrt().item()
            before = Before(norms, anchor_norm, gathered[:, 2].tolist())
            bad = self._judge(norms)
            if self._wire.index in bad:
                delta.zero_()  # its weight is 0, and 0 · inf is not
            weights = [0.0 if i in bad else tokens for i, tokens in enumerate(before.tokens)]
            sums = self._collective.reduce(delta, weights)
            error = self._first_leg.error.norm().item() if self._first_leg else 0.0
            totals = self._gather(pack(sums, error))
            if stream:
                stream.synchronize()
        return _Result(before, bad, totals, time.perf_counter() - started)

    def _gather(self, values: torch.Tensor) -> torch.Tensor:
        return self._wire.gather(values.to(self.anchor.device)).cpu()

    def _judge(self, norms: Sequence[float]) -> list[int]:
        """The replicas to leave out; the same on every rank of every replica."""
        config = self._config
        finite = [norm for norm in norms if norm < float("inf")]
        most = float("inf")
        if config.outlier_factor and finite:
            most = config.outlier_factor * median(finite)
        bad = [index for index, norm in enumerate(norms) if not norm < float("inf") or norm > most]
        if bad and (config.bad_replica == "stop" or len(bad) == len(norms)):
            index = bad[0]
            what = (
                f"has norm {norms[index]:.3g}, more than outer.outlier_factor="
                f"{config.outlier_factor:g} times the median {median(finite):.3g}"
                if norms[index] < float("inf")
                else "is not finite"
            )
            names = ", ".join(map(str, bad))
            raise TrainingError(
                f"outer step {self.rounds + 1}: the pseudogradient of replica {names} {what}; the "
                "outer step was not taken. Resume from the last checkpoint, or set "
                "outer.bad_replica=leave_out"
            )
        return bad

    def _split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        return views(flat, [unit.size for unit in self.units])

    def _add_up(self, values: torch.Tensor) -> torch.Tensor:
        """Sum over the ranks of the replica, FP64."""
        values = values.to(self._cuda or "cpu")
        dist.all_reduce(values)  # the default group is the replica
        return values.cpu()


def make_optimizer(config: OuterConfig, units: Sequence[Block]) -> OuterOptimizer:
    """The outer optimizer that the configuration asks for."""
    lr, momentum = config.lr, config.momentum
    makers: dict[str, Callable[[], OuterOptimizer]] = {
        "nesterov": lambda: NesterovSGD(lr, momentum),
        "sgd": lambda: SGD(lr, momentum),
        "adamw": lambda: AdamW(lr, momentum, config.adam_beta2, config.adam_epsilon),
        "muon": lambda: Muon(lr, momentum, config.matrix_lr, [_is_matrix(unit) for unit in units]),
        "mean": Mean,
    }
    return makers[config.optimizer]()


def _is_matrix(unit: Block) -> bool:
    return kind_of(unit.name) == "matrix" and min(unit.shape) > 1


def _codecs(config: OuterConfig, units: Sequence[Block]) -> list[Codec]:
    codec = make(config.codec, config.bits, config.per_row, config.keep, config.chunk)
    exact = codec if config.compress_norms else make("fp32")
    return [exact if kind_of(unit.name) == "norm" else codec for unit in units]


def _in_host_memory(tensor: torch.Tensor) -> torch.Tensor:
    host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
    return host.copy_(tensor)
