"""Who owns what: the static plan that all ranks of a pipeline stage compute alike.

Where expert parallelism shares experts out, the ranks with the same experts have a plan for these,
and another for the rest of the stage.

Every logical parameter has one owner for each of its elements. A Muon matrix is owned whole by its
*home*, one of the tensor-parallel ranks of the data-parallel shard in which its pieces lie. What
AdamW trains stays where it lies, and what tensor parallelism replicates is owned by rank 0 of it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron_ext.blocks import Block
from megatron_ext.model.logical import LogicalParameter, Segment
from megatron_ext.muon.layout import ChunkLayout, lay_out
from megatron_ext.muon.newton_schulz import newton_schulz_flops
from megatron_ext.muon.routing import Route
from megatron_ext.muon.views import total_numel


@dataclass(frozen=True)
class Unit:
    """A logical parameter that one rank keeps whole although others hold pieces of it."""

    name: str
    shape: tuple[int, ...]
    parameter: int  # index of the parameter with its pieces, counted over the stage's chunks
    pieces: tuple[tuple[Segment, ...], ...]  # of each tensor-parallel rank
    shard: int  # data-parallel rank
    home: int  # tensor-parallel rank


@dataclass(frozen=True)
class Local:
    """A rectangle of a logical parameter that is owned where it lies."""

    block: Block
    parameter: int
    local: tuple[slice, ...]  # index of the rectangle in the rank's parameter


@dataclass(frozen=True)
class StagePlan:
    """The plan of one pipeline stage, or of a part of it that has groups of its own."""

    parameters: tuple[LogicalParameter, ...]  # of all chunks, in order of registration
    layouts: tuple[ChunkLayout, ...]  # one for each chunk
    matrices: tuple[Unit, ...]  # Muon's
    vectors: tuple[Unit, ...]  # replicated over tensor parallelism, on AdamW
    routes: Mapping[str, Route]
    tp: int
    dp: int

    def local_blocks(self, tp_rank: int, dp_rank: int) -> list[Local]:
        """What AdamW trains in place on one rank."""
        placements = [place for layout in self.layouts for place in layout.placements]
        found = []
        for index, (parameter, place) in enumerate(zip(self.parameters, placements, strict=True)):
            if parameter.shared_copy or parameter.replicated:
                continue
            if place.shard is not None and place.shard != dp_rank:
                continue
            first, last = 0, parameter.local_shape[0]
            if place.shard is None:
                first = min(dp_rank * place.rows_per_shard, last)
                last = min(first + place.rows_per_shard, last)
            for segment in parameter.segments_of(tp_rank):
                if self.routes[segment.name].optimizer == "adamw":
                    found += _rows_between(segment, first, last, index)
        return found

    def flops(self) -> list[list[int]]:
        """Newton–Schulz FLOPs of one iteration at each home: [tensor rank][data rank]."""
        flops = [[0] * self.dp for _ in range(self.tp)]
        for matrix in self.matrices:
            flops[matrix.home][matrix.shard] += newton_schulz_flops(matrix.shape, steps=1)
        return flops

    def flops_beside(self, ep_rank: int, ep: int) -> list[list[int]]:
        """The same of those ranks that hold the experts of one expert-parallel rank.

        Neighbours in data parallelism hold different experts.
        """
        return [of_tp_rank[ep_rank::ep] for of_tp_rank in self.flops()]

    def exchange_bytes(self, tp_rank: int, dp_rank: int, weight_bytes: int) -> int:
        """What one rank sends each step between pieces and homes: FP32 gradients, then weights.

        `weight_bytes` is the size of one element of the model's weights.
        """
        gradients = weights = 0
        for unit in self.matrices:
            if unit.shard != dp_rank:
                continue
            sizes = [total_numel([segment.size for segment in pieces]) for pieces in unit.pieces]
            if unit.home == tp_rank:
                weights += sum(sizes) - sizes[tp_rank]
            else:
                gradients += sizes[tp_rank]
        vectors = [unit for unit in self.vectors if unit.shard == dp_rank and unit.home == tp_rank]
        weights += total_numel([unit.shape for unit in vectors]) * (self.tp - 1)
        return 4 * gradients + weight_bytes * weights

    def padding(self) -> float:
        """Elements of the buffers for each element of the parameters in them."""
        held = sum(sum(layout.contents) for layout in self.layouts)
        return sum(layout.buckets[-1][1] for layout in self.layouts) / held


def plan_stage(
    chunks: Sequence[Sequence[LogicalParameter]],
    routes: Mapping[str, Route],
    tp: int,
    dp: int,
    busy: Sequence[Sequence[int]] | None = None,
) -> StagePlan:
    """Plan a pipeline stage, or a part of it.

    Args:
        chunks: the parameters of each model chunk in order of registration.
        routes: for each logical name.
        tp: tensor-parallel ranks.
        dp: data-parallel ranks (times context-parallel, which shares the gradient reduction).
        busy: the `flops()` that the ranks have to do by another plan.
    """
    busy = busy or [[0] * dp] * tp
    done = [sum(of_shard) for of_shard in zip(*busy, strict=True)]
    layouts = tuple(
        lay_out(chunk, [_work(parameter, routes) for parameter in chunk], done) for chunk in chunks
    )
    placements = [place for layout in layouts for place in layout.placements]
    parameters = tuple(parameter for chunk in chunks for parameter in chunk)
    whole = [
        Unit(name, shape, index, _pieces(parameter, name), place.shard, home=0)
        for index, (parameter, place) in enumerate(zip(parameters, placements, strict=True))
        if place.shard is not None
        for name, shape in parameter.shapes.items()
    ]
    matrices = [unit for unit in whole if routes[unit.name].optimizer == "muon"]
    vectors = [unit for unit in whole if parameters[unit.parameter].replicated]
    homes = _find_homes(matrices, busy)
    return StagePlan(parameters, layouts, homes, tuple(vectors), routes, tp, dp)


def whole_block(unit: Unit) -> Block:
    """The block that the home of a unit owns: all of it."""
    return Block(unit.name, unit.shape, (0,) * len(unit.shape), unit.shape)


def _find_homes(matrices: list[Unit], busy: Sequence[Sequence[int]]) -> tuple[Unit, ...]:
    """Give each matrix a home so that the busiest rank of each shard has the least to do.

    Largest first, each to the rank with the least work so far; equal shapes stay together, since
    they are orthogonalised as one batch.
    """
    homes = []
    for shard, of_shard in enumerate(zip(*busy, strict=True)):
        work = list(of_shard)
        mine = [matrix for matrix in matrices if matrix.shard == shard]
        for matrix in sorted(mine, key=lambda m: (-newton_schulz_flops(m.shape, 1), m.shape)):
            home = min(range(len(work)), key=work.__getitem__)
            work[home] += newton_schulz_flops(matrix.shape, 1)
            homes.append(
                Unit(matrix.name, matrix.shape, matrix.parameter, matrix.pieces, shard, home)
            )
    return tuple(homes)


def _work(parameter: LogicalParameter, routes: Mapping[str, Route]) -> int:
    """Newton–Schulz FLOPs of one iteration on the matrices that have pieces in a parameter."""
    return sum(
        newton_schulz_flops(shape, 1)
        for name, shape in parameter.shapes.items()
        if routes[name].optimizer == "muon"
    )


def _pieces(parameter: LogicalParameter, name: str) -> tuple[tuple[Segment, ...], ...]:
    return tuple(
        tuple(segment for segment in parameter.segments_of(rank) if segment.name == name)
        for rank in range(parameter.tp)
    )


def _rows_between(segment: Segment, first: int, last: int, parameter: int) -> list[Local]:
    """The part of a segment in rows [first, last) of the rank's parameter, if there is any."""
    begin = max(first, segment.local[0])
    end = min(last, segment.local[0] + segment.size[0])
    if begin >= end:
        return []
    offset = (segment.offset[0] + begin - segment.local[0], *segment.offset[1:])
    block = Block(segment.name, segment.shape, offset, (end - begin, *segment.size[1:]))
    rows = (slice(begin, end), *segment.local_slices[1:])
    return [Local(block, parameter, rows)]
