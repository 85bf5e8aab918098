"""Which replica reduces what, and how many bytes that sends: known before anything is sent."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import torch

from megatron_ext.blocks import Block
from megatron_ext.diloco.codecs import Codec
from megatron_ext.muon.views import total_numel

# Elements of a bucket: enough for the link's bandwidth, and few enough that coding one, sending
# another and decoding a third go on at the same time.
BUCKET_NUMEL = 2**22

# Cuts between elements keep payloads free of padding.
_CUT_NUMEL = 8


@dataclass(frozen=True)
class Part:
    """A stretch of a fragment's flat tensor that is coded, and reduced by one replica, as one."""

    start: int
    shape: tuple[int, ...]
    codec: Codec
    nbytes: int

    @property
    def numel(self) -> int:
        return torch.Size(self.shape).numel()

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Its values in the fragment's flat tensor, as a view in its shape."""
        return flat[self.start : self.start + self.numel].view(self.shape)


@dataclass(frozen=True)
class Bucket:
    """Parts that travel together, by the replica that reduces them."""

    parts: tuple[tuple[Part, ...], ...]

    @property
    def sizes(self) -> list[int]:
        """Bytes of the parts of each reducer."""
        return [sum(part.nbytes for part in parts) for parts in self.parts]


def plan_buckets(
    units: Sequence[Block], codecs: Sequence[Codec], replicas: int, shift: int
) -> list[Bucket]:
    """Cut a fragment's units on one rank into parts, give each a reducer, and fill buckets.

    Parts go, largest first, to the replica with the fewest bytes so far. `shift` turns the order of
    replicas where they are equal, so that ranks do not all begin with the same one.
    """
    parts = sorted(_cut(units, codecs, replicas), key=lambda part: (-part.nbytes, part.start))
    load = [0] * replicas
    buckets: list[Bucket] = []
    current: list[list[Part]] = [[] for _ in range(replicas)]
    held = 0
    for part in parts:
        if held and held + part.numel > BUCKET_NUMEL:
            buckets.append(Bucket(tuple(map(tuple, current))))
            current, held = [[] for _ in range(replicas)], 0
        reducer = min(range(replicas), key=lambda r: (load[r], (r - shift) % replicas))
        load[reducer] += part.nbytes
        current[reducer].append(part)
        held += part.numel
    if held:
        buckets.append(Bucket(tuple(map(tuple, current))))
    return buckets


def planned_bytes(buckets: Sequence[Bucket], replica: int, replicas: int, gather: bool) -> int:
    """What one rank of `replica` sends to other replicas in one exchange of these buckets.

    Reduce-scatter and all-gather: what others reduce, once, and what it reduces, to each of the
    others. A plain gather: everything to each of the others.
    """
    total = 0
    for bucket in buckets:
        mine, everything = bucket.sizes[replica], sum(bucket.sizes)
        if gather:
            total += (replicas - 1) * everything
        else:
            total += everything - mine + (replicas - 1) * mine
    return total


def _cut(units: Sequence[Block], codecs: Sequence[Codec], replicas: int) -> list[Part]:
    """Parts as small as a fair division needs and as the codec's grain allows."""
    parts: list[Part] = []
    start = 0
    fair_numel = max(1, total_numel([unit.size for unit in units]) // (4 * replicas))
    for codec, run in groupby(zip(units, codecs, strict=True), key=lambda pair: pair[1]):
        sizes = [unit.size for unit, _ in run]
        if codec.grain == "element":
            numel = total_numel(sizes)
            pieces = replicas * -(-numel // BUCKET_NUMEL)
            shapes = [(length,) for length in _equal(numel, pieces, _CUT_NUMEL)]
        elif codec.grain == "row":
            shapes = [shape for size in sizes for shape in _by_rows(size, fair_numel)]
        else:
            shapes = sizes
        for shape in shapes:
            parts.append(Part(start, shape, codec, codec.nbytes(shape)))
            start += parts[-1].numel
    return parts


def _equal(numel: int, pieces: int, multiple: int) -> list[int]:
    """About equal lengths that are multiples, but for the last; empty ones are left out."""
    cuts = [numel * index // pieces // multiple * multiple for index in range(pieces)] + [numel]
    lengths = [end - begin for begin, end in pairwise(cuts)]
    return [length for length in lengths if length]


def _by_rows(size: tuple[int, ...], most_numel: int) -> list[tuple[int, ...]]:
    if len(size) == 1:
        return [size]
    rows, cols = size
    pieces = min(rows, -(-rows * cols // most_numel))
    return [(length, cols) for length in _equal(rows, pieces, 1)]
