"""The mean over replicas, packed on the wire in both legs.

Each replica sends the codes of every part to the replica that reduces it; that one decodes, adds in
FP32 in the order of replicas, packs the mean and sends it to all. A replica so sends 2·(K − 1)/K of
the packed size, however many replicas there are, and all decode the same bytes to the same mean.
While a bucket is on the wire, the next one is packed and the one before unpacked.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from megatron_ext.diloco.plan import Bucket, Part, planned_bytes
from megatron_ext.diloco.wire import Wire


class ErrorFeedback:
    """What coding left out is added to what is coded next: v = Q(e), e ← e − v, before which
    e ← β·e + Δ. The outer learning rate has no place in it.

    Attributes:
        error: e, flat like the fragment.
    """

    def __init__(self, like: torch.Tensor, decay: float):
        self.decay = decay
        self.error = torch.zeros_like(like)

    def encode(
        self, part: Part, values: torch.Tensor, payload: torch.Tensor, scratch: torch.Tensor
    ) -> None:
        """Pack the values of a part with what is due to them; `scratch` has room for the part."""
        error = part.of(self.error)
        error.mul_(self.decay).add_(values)
        part.codec.encode_into(error, payload)
        error.sub_(_decoded(part, payload, scratch))


@dataclass
class Sums:
    """What is measured on the way, on this rank; squares of norms, to be added up over ranks."""

    mean: float = 0.0
    product: float = 0.0  # of this replica's pseudogradient and the mean
    residual: float = 0.0  # what coding the parts that this replica reduces left out of its own
    coded: float = 0.0  # those parts themselves
    bytes_sent: int = 0
    bytes_planned: int = 0


class Collective:
    """The mean of one fragment on one rank."""

    def __init__(
        self,
        wire: Wire,
        buckets: Sequence[Bucket],
        gather: bool = False,
        first_leg: ErrorFeedback | None = None,
        second_leg: ErrorFeedback | None = None,
    ):
        """`gather`: every replica sends its codes to all others, which costs K − 1 times the packed
        size instead of 2·(K − 1)/K, and codes the mean no second time.
        """
        self._wire = wire
        self._buckets = buckets
        self._gather = gather
        self._first_leg, self._second_leg = first_leg, second_leg
        parts = [part for bucket in buckets for of_one in bucket.parts for part in of_one]
        self._largest_numel = max((part.numel for part in parts), default=0)
        self.planned_bytes = planned_bytes(buckets, wire.index, wire.count, gather)

    @torch.no_grad()
    def reduce(self, flat: torch.Tensor, weights: Sequence[float]) -> Sums:
        """Replace a fragment's pseudogradient by the weighted mean over the replicas.

        `weights` are the replicas', of any sum; one of weight 0 is left out.
        """
        sums = Sums()
        if self._wire.count == 1:
            square = flat.norm().item() ** 2
            return Sums(mean=square, product=square)
        sent_before = self._wire.bytes_sent
        # Fresh memory for each part would cost more than decoding it.
        self._scratch = flat.new_empty(self._largest_numel)
        count = len(self._buckets)
        first: dict[int, Callable[[], torch.Tensor]] = {}
        second: dict[int, Callable[[], torch.Tensor]] = {}
        for number in range(count + 2):
            if number < count:
                first[number] = self._send_codes(self._buckets[number], flat)
            if 0 <= number - 1 < count:
                bucket, codes = self._buckets[number - 1], first.pop(number - 1)()
                second[number - 1] = self._reduce_and_send(bucket, codes, flat, weights, sums)
            if 0 <= number - 2 < count:
                self._unpack(self._buckets[number - 2], second.pop(number - 2)(), flat, sums)
        sums.bytes_sent = self._wire.bytes_sent - sent_before
        sums.bytes_planned = self.planned_bytes
        del self._scratch
        return sums

    def rehome(self, error: torch.Tensor) -> None:
        """Move the second leg's error to where its parts are reduced now.

        In sum over the replicas it stays the same; each keeps what it reduces. Collective.
        """
        for bucket in self._buckets:
            for reducer, parts in enumerate(bucket.parts):
                for part in parts:
                    own = part.of(error).clone()
                    sizes = [0] * self._wire.count
                    sizes[reducer] = own.nbytes
                    mine = reducer == self._wire.index
                    received = self._wire.exchange(
                        own.flatten().view(torch.uint8),
                        sizes,
                        [own.nbytes if mine else 0] * self._wire.count,
                    )()
                    part.of(error).zero_()
                    if mine:
                        shape = (self._wire.count, *part.shape)
                        part.of(error).copy_(received.view(torch.float32).view(shape).sum(0))

    def _send_codes(self, bucket: Bucket, flat: torch.Tensor) -> Callable[[], torch.Tensor]:
        sizes = bucket.sizes
        message = _message(sum(sizes), flat)
        for part, payload in _payloads(bucket.parts, message):
            if self._first_leg:
                self._first_leg.encode(part, part.of(flat), payload, self._scratch)
            else:
                part.codec.encode_into(part.of(flat), payload)
        count = self._wire.count
        if self._gather:
            everything = [len(message)] * count
            return self._wire.exchange(message.repeat(count), everything, everything)
        return self._wire.exchange(message, sizes, [sizes[self._wire.index]] * count)

    def _reduce_and_send(
        self,
        bucket: Bucket,
        codes: torch.Tensor,
        flat: torch.Tensor,
        weights: Sequence[float],
        sums: Sums,
    ) -> Callable[[], torch.Tensor]:
        """`codes`: of the parts that this replica reduces, from each replica in order."""
        index, count = self._wire.index, self._wire.count
        mine = bucket.parts if self._gather else (bucket.parts[index],)
        of_replicas = codes.view(count, -1)
        exact = torch.empty(sum(p.numel for parts in mine for p in parts), device=flat.device)
        message = exact.view(torch.uint8) if self._gather else _message(bucket.sizes[index], flat)
        position = offset = 0
        for part in (part for parts in mine for part in parts):
            payloads = of_replicas[:, position : position + part.nbytes]
            mean = exact[offset : offset + part.numel].view(part.shape)
            sums.residual += self._add_up(part, payloads, weights, mean, part.of(flat))
            sums.coded += part.of(flat).norm().item() ** 2
            if not self._gather:
                payload = message[position : position + part.nbytes]
                if self._second_leg:
                    self._second_leg.encode(part, mean, payload, self._scratch)
                else:
                    part.codec.encode_into(mean, payload)
            position += part.nbytes
            offset += part.numel
        if self._gather:
            return lambda: message
        return self._wire.exchange(
            message.repeat(count), [bucket.sizes[index]] * count, bucket.sizes
        )

    def _add_up(
        self,
        part: Part,
        payloads: torch.Tensor,
        weights: Sequence[float],
        mean: torch.Tensor,
        own: torch.Tensor,
    ) -> float:
        """Write the mean; returns the squared norm of what coding left out of this replica's own.

        Equal weights add up exactly as a plain sum: they are scaled to a largest one of 1.
        """
        residual = 0.0
        scales = [weight / max(weights) for weight in weights]
        mean.zero_()
        for replica, (payload, scale) in enumerate(zip(payloads, scales, strict=True)):
            mine = replica == self._wire.index
            if scale or mine:
                decoded = _decoded(part, payload, self._scratch)
            if scale:
                mean.add_(decoded, alpha=scale)
            if mine and self._first_leg:
                residual = part.of(self._first_leg.error).norm().item() ** 2
            elif mine:
                residual = decoded.sub_(own).norm().item() ** 2
        mean.div_(sum(scales))
        return residual

    def _unpack(
        self, bucket: Bucket, message: torch.Tensor, flat: torch.Tensor, sums: Sums
    ) -> None:
        """`message`: the packed means of all parts, by reducer; plain FP32 after a gather."""
        offset = 0
        for part, payload in _payloads(bucket.parts, message):
            if self._gather:
                values = message.view(torch.float32)[offset : offset + part.numel]
                mean = values.view(part.shape)
                offset += part.numel
            else:
                mean = _decoded(part, payload, self._scratch)
            own = part.of(flat)
            sums.product += torch.dot(own.flatten(), mean.flatten()).item()
            sums.mean += mean.norm().item() ** 2
            own.copy_(mean)


def _message(nbytes: int, like: torch.Tensor) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device=like.device)


def _payloads(parts: Sequence[Sequence[Part]], message: torch.Tensor):
    """Each part, by reducer, and its stretch of the message."""
    position = 0
    for part in (part for of_reducer in parts for part in of_reducer):
        yield part, message[position : position + part.nbytes]
        position += part.nbytes


def _decoded(part: Part, payload: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
    values = scratch[: part.numel].view(part.shape)
    part.codec.decode_into(payload, values)
    return values
