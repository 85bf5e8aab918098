"""The link between equal ranks of all replicas: counted, and slowed down on purpose."""

import random
import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from pydantic import NonNegativeFloat, PositiveFloat

from megatron_ext.config import Section
from megatron_ext.diloco.background import Background


class LinkConfig(Section):
    """A slow link on purpose, to see on one machine what a real one would do."""

    gbit: PositiveFloat | None = None
    """What a rank sends to other replicas at most, in Gbit/s; null is as fast as it goes."""
    latency_ms: NonNegativeFloat = 0.0
    """Milliseconds from one replica to another, in each exchange."""
    jitter_ms: NonNegativeFloat = 0.0
    """Up to so many milliseconds more, drawn anew for each exchange from a fixed seed."""


class Wire:
    """Exchanges between the replicas, in the order of the calls, which is the same on all.

    Attributes:
        count, index: of replicas, and which of them this is.
        bytes_sent: payload to other replicas so far, without the scalars of `gather`.
    """

    def __init__(
        self,
        link: dist.ProcessGroup | None,
        config: LinkConfig,
        device: torch.device | None = None,
    ):
        """`link`: the same rank of all replicas; None with a single replica. `device`: of the
        tensors, if not the CPU.
        """
        self._link = link
        self.count = link.size() if link else 1
        self.index = link.rank() if link else 0
        self.bytes_sent = 0
        slowed = config.gbit or config.latency_ms or config.jitter_ms
        self._throttle = _Throttle(config, self.index, device) if link and slowed else None

    def exchange(
        self, sent: torch.Tensor, sent_sizes: Sequence[int], received_sizes: Sequence[int]
    ) -> Callable[[], torch.Tensor]:
        """Start to send stretches of a uint8 tensor, one to each replica.

        The returned call waits and gives what all replicas sent to this one, in their order.
        """
        to_others = sum(sent_sizes) - sent_sizes[self.index]
        self.bytes_sent += to_others
        return self._start(sent, list(sent_sizes), list(received_sizes), to_others)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """A few FP64 scalars [n] of each replica, on the CPU → [K, n]."""
        if self._link is None:
            return values[None]
        sizes = [len(values)] * self.count
        to_others = (self.count - 1) * values.nbytes
        gathered = self._start(values.repeat(self.count), sizes, sizes, to_others)()
        return gathered.view(self.count, -1)

    def _start(
        self, sent: torch.Tensor, sent_sizes: list[int], received_sizes: list[int], nbytes: int
    ) -> Callable[[], torch.Tensor]:
        received = sent.new_empty(sum(received_sizes))
        link = self._link

        def run() -> dist.Work:
            return link.alltoall_base(received, sent, received_sizes, sent_sizes)

        if self._throttle is None:
            work = run()

            def wait() -> torch.Tensor:
                work.wait()
                return received

            return wait
        done = self._throttle.submit(lambda: run().wait(), nbytes)

        def wait_for_thread() -> torch.Tensor:
            done.result()
            return received

        return wait_for_thread


class _Throttle:
    """Holds an exchange back until a link of the given speed would have delivered it.

    A sender holds back its part, so that receivers see the slowest of their senders. Latencies of
    exchanges that follow one another overlap, as on a real link; bandwidth is shared in order.
    """

    def __init__(self, config: LinkConfig, index: int, device: torch.device | None):
        self._seconds_per_byte = 8e-9 / config.gbit if config.gbit else 0.0
        self._latency_seconds = config.latency_ms / 1e3
        self._jitter_seconds = config.jitter_ms / 1e3
        self._random = random.Random(index)
        self._free_at = 0.0
        self._thread = Background("slow-link", device)

    def submit(self, exchange: Callable[[], None], nbytes: int):
        sent_at = max(time.monotonic(), self._free_at) + nbytes * self._seconds_per_byte
        self._free_at = sent_at
        arrival = sent_at + self._latency_seconds + self._random.uniform(0, self._jitter_seconds)

        def run() -> None:
            time.sleep(max(0.0, arrival - time.monotonic()))
            exchange()

        return self._thread.submit(run)
