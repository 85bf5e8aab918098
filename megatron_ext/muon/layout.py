"""Where each parameter lies in the data-parallel buffers of a pipeline stage.

Experts that expert parallelism shares out lie in buffers of their own, laid out in the same way.

Megatron-core's DDP reduce-scatters a bucket in equal shards over the data-parallel ranks. Its own
layouts let a shard begin anywhere in a parameter; here every matrix lies whole in one shard, so
that the reduce-scatter brings its complete gradient to one rank. Embedding and head are too large
for that and are spread by whole rows. Shards are packed to equal sizes, which the reduce-scatter
needs, and within that freedom to equal work for the optimizer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from megatron.core.distributed.param_and_grad_buffer import group_params_for_buffers
from megatron.core.optimizer.param_layout import BufferKey, PerBufferParamLayout

from megatron_ext.model.logical import LogicalParameter

# Starts are aligned to this many elements, which keeps every weight aligned for tensor cores.
_ALIGNMENT = 64

# Smaller buckets leave the network idle between collectives (megatron-core's default size).
_BUCKET_NUMEL = 40_000_000

# A bucket takes in more layers until its padding is at most this share of its content.
_MOST_PADDING = 0.05


@dataclass(frozen=True)
class Placement:
    """One parameter's place in the buffer of its model chunk, in elements."""

    start: int
    end: int
    bucket: int
    shard: int | None  # the data-parallel rank that holds it whole; None: spread by rows
    rows_per_shard: int | None = None  # for a spread parameter


@dataclass(frozen=True)
class ChunkLayout:
    """Layout of one model chunk's buffer."""

    placements: tuple[Placement, ...]  # in the order in which the parameters were registered
    buckets: tuple[tuple[int, int], ...]  # (start, end) in elements
    contents: tuple[int, ...]  # elements of each bucket without padding


def lay_out(
    parameters: Sequence[LogicalParameter], work: Sequence[int], done: list[int]
) -> ChunkLayout:
    """Place the parameters of one model chunk.

    Buckets follow the backward pass, from the last parameter to the first, because DDP reduces a
    bucket as soon as its gradients are there.

    Args:
        parameters: in order of registration.
        work: for each, what its update costs the rank that holds its shard, in FLOPs.
        done: what each data-parallel rank has to do already; what is placed is added to it.
    """
    shards = len(done)
    placements: dict[int, Placement] = {}
    buckets: list[tuple[int, int]] = []
    contents: list[int] = []
    for group in _group(parameters, work, shards):
        start = buckets[-1][1] if buckets else 0
        numels = {index: _numel(parameters[index]) for index in group}
        if _spread(parameters[group[0]]):
            placed, end = _spread_out(group[0], parameters[group[0]], shards, start, len(buckets))
        else:
            chosen, shard_numel = _pack(numels, work, done)
            end = start + shards * shard_numel
            placed = {
                index: Placement(begin, begin + numels[index], len(buckets), shard)
                for index, (shard, offset) in chosen.items()
                for begin in [start + shard * shard_numel + offset]
            }
        placements |= placed
        buckets.append((start, end))
        contents.append(sum(numels.values()))
    ordered = tuple(placements[index] for index in range(len(parameters)))
    return ChunkLayout(ordered, tuple(buckets), tuple(contents))


def _group(
    parameters: Sequence[LogicalParameter], work: Sequence[int], shards: int
) -> list[list[int]]:
    """Indices of the parameters of each bucket, in backward order."""
    groups: list[list[int]] = []
    current: list[int] = []

    def finish_run() -> None:
        nonlocal current
        # What is left over at the end of a run of layers may be too little to pack well.
        follows_layers = groups and not _spread(parameters[groups[-1][0]])
        if current and follows_layers and not _full(current, parameters, work, shards):
            current = groups.pop() + current
        if current:
            groups.append(current)
        current = []

    for index in reversed(range(len(parameters))):
        if _spread(parameters[index]):
            finish_run()
            groups.append([index])
            continue
        current.append(index)
        if _full(current, parameters, work, shards):
            groups.append(current)
            current = []
    finish_run()
    return groups


def _full(
    group: list[int], parameters: Sequence[LogicalParameter], work: Sequence[int], shards: int
) -> bool:
    numels = {index: _numel(parameters[index]) for index in group}
    content = sum(numels.values())
    if content < _BUCKET_NUMEL:
        return False
    _, shard_numel = _pack(numels, work, [0] * shards)
    return shards * shard_numel <= (1 + _MOST_PADDING) * content


def _pack(
    numels: Mapping[int, int], work: Sequence[int], done: list[int]
) -> tuple[dict[int, tuple[int, int]], int]:
    """Shard and offset of each parameter of a bucket, and the elements that a shard needs.

    Largest first, each to the shard with the least work so far, `done`, among those that have room;
    where none has, to the emptiest. Sizes alone would be within 4/3 of the best packing (Graham,
    1969). What is placed is added to `done`.
    """
    shards = len(done)
    room = (1 + _MOST_PADDING) * sum(numels.values()) / shards
    loads = [0] * shards
    chosen: dict[int, tuple[int, int]] = {}
    for index in sorted(numels, key=lambda index: (-numels[index], index)):
        fitting = [shard for shard in range(shards) if loads[shard] + numels[index] <= room]
        if fitting:
            shard = min(fitting, key=lambda shard: (done[shard], loads[shard]))
        else:
            shard = min(range(shards), key=loads.__getitem__)
        chosen[index] = (shard, loads[shard])
        loads[shard] += -(-numels[index] // _ALIGNMENT) * _ALIGNMENT
        done[shard] += work[index]
    return chosen, max(loads)


def _spread_out(
    index: int, parameter: LogicalParameter, shards: int, start: int, bucket: int
) -> tuple[dict[int, Placement], int]:
    rows, cols = parameter.local_shape
    rows_per_shard = -(-rows // shards)
    placement = Placement(start, start + rows * cols, bucket, None, rows_per_shard)
    return {index: placement}, start + rows_per_shard * cols * shards


def _spread(parameter: LogicalParameter) -> bool:
    return parameter.kind in ("embedding", "head")


def _numel(parameter: LogicalParameter) -> int:
    return torch.Size(parameter.local_shape).numel()


def buffer_layout(
    layout: ChunkLayout, parameters: Sequence[torch.nn.Parameter], shards: int
) -> tuple[BufferKey, PerBufferParamLayout]:
    """The layout in the form that megatron-core's DistributedDataParallel takes for one buffer."""
    groups = group_params_for_buffers(list(parameters), grad_reduce_in_fp32=True)
    if len(groups) != 1:
        raise ValueError(f"parameters of one buffer expected, found {list(groups)}")
    ((key, (_, indices)),) = groups.items()
    places = {
        parameter: (place.start, place.end, place.bucket)
        for parameter, place in zip(parameters, layout.placements, strict=True)
    }
    return key, PerBufferParamLayout(
        param_index_map=places,
        bucket_indices=list(layout.buckets),
        per_bucket_numel_unpadded=list(layout.contents),
        param_indices=indices,
        num_optimizer_shards=shards,
    )
