"""The plans of each pipeline stage, as the processes of a run make them, and whose they are."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_ext.model.config import ModelConfig
from megatron_ext.model.gpt import skeleton
from megatron_ext.model.logical import LogicalParameter, describe_parameter
from megatron_ext.muon.plan import StagePlan, plan_stage
from megatron_ext.muon.routing import Route, route_all
from megatron_ext.muon.views import total_numel
from megatron_ext.replicas import ParallelConfig
from pretrain.settings import RunConfig

Chunks = Sequence[Sequence[LogicalParameter]]


@dataclass(frozen=True)
class Seat:
    """A rank's place among those that share a plan."""

    plan: StagePlan
    tp_rank: int
    dp_rank: int
    newton_schulz_flops: int
    """Of one iteration on the matrices whose home the rank is."""

    @property
    def held(self) -> int:
        """Elements of its buffers: as many of gradients as of weights."""
        return sum(layout.buckets[-1][1] for layout in self.plan.layouts)

    def owned(self) -> tuple[int, int]:
        """Elements that it owns: of Muon's matrices, and of what AdamW trains."""
        plan, here = self.plan, (self.tp_rank, self.dp_rank)
        matrices = [unit.shape for unit in plan.matrices if (unit.home, unit.shard) == here]
        vectors = [unit.shape for unit in plan.vectors if (unit.home, unit.shard) == here]
        blocks = [local.block.size for local in plan.local_blocks(*here)]
        return total_numel(matrices), total_numel(vectors + blocks)

    def exchange_bytes(self, weight_bytes: int) -> int:
        """What it sends each step between pieces and homes."""
        return self.plan.exchange_bytes(self.tp_rank, self.dp_rank, weight_bytes)


@dataclass(frozen=True)
class Rank:
    """A rank of a pipeline stage, by its place in tensor and in data (× context) parallelism."""

    tp_rank: int
    dp_rank: int
    seats: tuple[Seat, ...]
    """In the stage's plan, and in that of its experts where they have one."""


def stage_ranks(config: RunConfig) -> list[list[Rank]]:
    """The ranks of each pipeline stage. Needs `host.prepare()` where there is no CUDA."""
    parallel = config.parallel
    routes = route_all(config.model, config.optimizer)
    chunks: list[list[LogicalParameter]] = [[] for _ in range(parallel.pp * parallel.interleave)]
    for layer, parameter in _parameters(config.model, parallel):
        # The embedding counts as layer -1, the final norm and the head as one behind the last.
        place = min(max(layer, 0), config.model.layers - 1) * len(chunks) // config.model.layers
        chunks[place].append(parameter)
    return [
        _ranks(chunks[stage :: parallel.pp], routes, config.model, parallel)
        for stage in range(parallel.pp)
    ]


def _ranks(
    chunks: Chunks, routes: Mapping[str, Route], model: ModelConfig, parallel: ParallelConfig
) -> list[Rank]:
    tp, dp, ep = parallel.tp, parallel.dp * parallel.cp, parallel.ep
    if ep == 1:
        seats = _seats(plan_stage(chunks, routes, tp, dp))
        return [Rank(*place, (seat,)) for place, seat in seats.items()]
    the_rest = [[p for p in chunk if p.expert is None] for chunk in chunks]
    dense = plan_stage(the_rest, routes, tp, dp)
    each = model.experts // ep
    experts = []
    for rank in range(ep):
        held = range(rank * each, (rank + 1) * each)
        mine = [[p for p in chunk if p.expert in held] for chunk in chunks]
        busy = dense.flops_beside(rank, ep)
        experts.append(_seats(plan_stage(mine, routes, tp, dp // ep, busy)))
    return [
        Rank(tp_rank, dp_rank, (seat, experts[dp_rank % ep][tp_rank, dp_rank // ep]))
        for (tp_rank, dp_rank), seat in _seats(dense).items()
    ]


def _seats(plan: StagePlan) -> dict[tuple[int, int], Seat]:
    """The seats of a plan by tensor- and data-parallel rank, the former running faster."""
    flops = plan.flops()
    places = ((t, d) for d in range(plan.dp) for t in range(plan.tp))
    return {(t, d): Seat(plan, t, d, flops[t][d]) for t, d in places}


def _parameters(
    model: ModelConfig, parallel: ParallelConfig
) -> Iterator[tuple[int, LogicalParameter]]:
    """Layer and description of every parameter of the whole model, in order of registration."""
    # One layer's names stand for all layers'; either implementation has the same sizes.
    one_layer = model.model_copy(update={"layers": 1, "implementation": "plain"})
    names = [name for name, _ in skeleton(one_layer).named_parameters()]
    of_layer = [name for name in names if ".layers.0." in name]
    first = names.index(of_layer[0])
    tp = parallel.tp
    for name in names[:first]:
        yield -1, describe_parameter(name, model, tp)
    for layer in range(model.layers):
        for name in of_layer:
            yield (
                layer,
                describe_parameter(name.replace(".layers.0.", f".layers.{layer}."), model, tp),
            )
    for name in names[first + len(of_layer) :]:
        yield model.layers, describe_parameter(name, model, tp)
    if model.tie_head and parallel.pp > 1:
        yield model.layers, describe_parameter("output_layer.weight", model, tp)
