"""The mean over replicas: reduce-scatter and all-gather, each byte over the slow link once."""

import torch
import torch.distributed as dist

# Bounds the memory for what is in transit.
_BUCKET_NUMEL = 16 * 2**20


class ReplicaMean:
    """Mean of FP32 tensors over the replicas, between equal ranks of all of them.

    A bucket is cut in one chunk for each replica. Chunks go to the replica that reduces them, which
    adds them in the order of replicas, and their means go back to all. A replica so sends
    2·(K − 1)/K of its bytes in total, the mean is bit-equal everywhere, and its bits do not depend
    on how the tensor is cut.

    Attributes:
        bytes_sent: payload that this rank has sent to other replicas so far.
    """

    def __init__(self, link: dist.ProcessGroup | None):
        """`link`: the same rank of all replicas; None with a single replica."""
        self._link = link
        self.count = link.size() if link else 1
        self.bytes_sent = 0

    def reduce(self, flat: torch.Tensor) -> None:
        """Replace a flat tensor by its mean over the replicas."""
        if self._link is None:
            return
        for bucket in flat.split(_BUCKET_NUMEL):
            self._reduce_bucket(bucket)

    def planned_bytes(self, numel: int) -> int:
        """What `reduce` of that many elements sends from this rank to other replicas."""
        if self._link is None:
            return 0
        full, rest = divmod(numel, _BUCKET_NUMEL)
        return full * self._bucket_bytes(_BUCKET_NUMEL) + self._bucket_bytes(rest)

    def gather_scalars(self, values: torch.Tensor) -> torch.Tensor:
        """A few FP64 scalars [n] of each replica → [K, n]."""
        if self._link is None:
            return values[None]
        repeated = values.repeat(self.count, 1)
        gathered = torch.empty_like(repeated)
        self._link.alltoall_base(gathered, repeated, [], []).wait()
        return gathered

    def _reduce_bucket(self, bucket: torch.Tensor) -> None:
        sizes = _chunk_sizes(bucket.numel(), self.count)
        mine = sizes[self._link.rank()]
        received = torch.empty(self.count, mine, dtype=bucket.dtype, device=bucket.device)
        self._exchange(received.flatten(), bucket, [mine] * self.count, sizes)
        mean, *others = received
        for other in others:
            mean += other
        mean /= self.count
        self._exchange(bucket, mean.repeat(self.count), sizes, [mine] * self.count)

    def _exchange(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: list[int],
        sent_sizes: list[int],
    ) -> None:
        self._link.alltoall_base(received, sent, received_sizes, sent_sizes).wait()
        to_others = sum(sent_sizes) - sent_sizes[self._link.rank()]
        self.bytes_sent += to_others * sent.element_size()

    def _bucket_bytes(self, numel: int) -> int:
        mine = _chunk_sizes(numel, self.count)[self._link.rank()]
        return 4 * (numel - mine + (self.count - 1) * mine)


def _chunk_sizes(numel: int, count: int) -> list[int]:
    return [numel // count + (index < numel % count) for index in range(count)]
