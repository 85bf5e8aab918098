"""Memory of each rank by category, from the plans and shapes that the program itself allocates by.

Weights, gradients, masters and the states of both optimizers are exact: they come from the same
`StagePlan` that lays the buffers out. Activations are counted from what the layers keep for the
backward pass; on a GPU kernels are fused and keep less than on a processor.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import product

from megatron_ext.diloco import outer
from megatron_ext.diloco.plan import BUCKET_NUMEL
from megatron_ext.model.config import ModelConfig
from megatron_ext.model.gpt import skeleton
from megatron_ext.model.logical import (
    LogicalParameter,
    describe_parameter,
)
from megatron_ext.muon.optimizer import BATCHES
from megatron_ext.muon.plan import StagePlan, plan_stage
from megatron_ext.muon.routing import route_all
from megatron_ext.muon.views import total_numel
from megatron_ext.replicas import ParallelConfig
from pretrain.settings import RunConfig

_FP32 = 4
# A CUDA context, NCCL's buffers and cuBLAS workspaces, as seen on H100s; none on a processor.
_GPU_RUNTIME_BYTES = 2 * 2**30
# What the collective between replicas sends and receives of the three buckets under way.
_OUTER_BUCKETS_BYTES = 6 * _FP32 * BUCKET_NUMEL


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank. All but the last three live as long as the run."""

    weights: int
    gradients: int
    masters: int
    optimizer: int  # momentum and moments
    anchor: int
    outer_momentum: int
    error_feedback: int
    in_flight: int  # pseudogradients that wait for outer.delay to pass
    activations: int  # most that lives at once in forward and backward
    transit: int  # most that lives at once in an inner or outer step
    runtime: int

    @property
    def state(self) -> int:
        """What lives as long as the run."""
        return sum(getattr(self, field.name) for field in fields(self)[:8])

    @property
    def peak(self) -> int:
        """Activations are gone when the optimizers step."""
        return self.state + max(self.activations, self.transit) + self.runtime


@dataclass(frozen=True)
class StageMemory:
    """The rank of a pipeline stage that needs most."""

    stage: int
    tp_rank: int
    dp_rank: int
    memory: RankMemory
    plan: StagePlan


def plan_memory(config: RunConfig, on_gpu: bool) -> list[StageMemory]:
    """The fullest rank of each pipeline stage. Needs `host.prepare()` where there is no CUDA."""
    return [
        max(
            (
                StageMemory(stage, *place, _rank_memory(config, plan, stage, place, on_gpu), plan)
                for place in product(range(plan.tp), range(plan.dp))
            ),
            key=lambda rank: rank.memory.peak,
        )
        for stage, plan in enumerate(stage_plans(config))
    ]


def with_activations_of(
    config: RunConfig, stages: list[StageMemory], on_gpu: bool
) -> list[StageMemory]:
    """The same layout with the activations of another micro-batch or recomputation."""
    return [
        replace(
            stage,
            memory=replace(stage.memory, activations=activation_bytes(config, stage.stage, on_gpu)),
        )
        for stage in stages
    ]


def stage_plans(config: RunConfig) -> list[StagePlan]:
    """The plan of each pipeline stage, as the processes of a run make it."""
    model, parallel = config.model, config.parallel
    routes = route_all(model, config.optimizer)
    described = _parameters(model, parallel)
    virtual_stages = parallel.pp * parallel.interleave
    chunks: list[list[LogicalParameter]] = [[] for _ in range(virtual_stages)]
    for layer, parameter in described:
        # The embedding counts as layer -1, the final norm and the head as one behind the last.
        place = min(max(layer, 0), model.layers - 1) * virtual_stages // model.layers
        chunks[place].append(parameter)
    data_ranks = parallel.dp * parallel.cp
    return [
        plan_stage(chunks[stage :: parallel.pp], routes, parallel.tp, data_ranks)
        for stage in range(parallel.pp)
    ]


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


def _rank_memory(
    config: RunConfig, plan: StagePlan, stage: int, place: tuple[int, int], on_gpu: bool
) -> RankMemory:
    tp_rank, dp_rank = place
    weight_bytes = 2 if config.train.precision == "bf16" else 4
    held = sum(layout.buckets[-1][1] for layout in plan.layouts if layout.buckets)
    matrices, rest = owned_numels(plan, tp_rank, dp_rank)
    owned = matrices + rest
    return RankMemory(
        weights=weight_bytes * held,
        gradients=_FP32 * held,
        masters=_FP32 * owned,
        optimizer=_FP32 * (matrices + 2 * rest + owned * bool(config.optimizer.averaging.decay)),
        **_outer_bytes(config, owned, on_gpu),
        activations=activation_bytes(config, stage, on_gpu),
        transit=_transit_bytes(config, plan, tp_rank, dp_rank),
        runtime=_GPU_RUNTIME_BYTES if on_gpu else 0,
    )


def _outer_bytes(config: RunConfig, owned: int, on_gpu: bool) -> dict[str, int]:
    """What the outer loop keeps of the elements that a rank owns, by category."""
    options = config.outer
    legs = options.error_feedback + options.second_error_feedback
    numels = {"anchor": 0, "outer_momentum": 0, "error_feedback": 0, "in_flight": 0}
    if options.interval and not (on_gpu and options.host_memory):
        numels["anchor"] = owned
        numels["outer_momentum"] = owned * len(outer.make(options, ()).kinds)
        numels["error_feedback"] = owned * legs * (config.parallel.replicas > 1)
        numels["in_flight"] = owned * bool(options.delay)
    return {category: _FP32 * numel for category, numel in numels.items()}


def owned_numels(plan: StagePlan, tp_rank: int, dp_rank: int) -> tuple[int, int]:
    """Elements that one rank owns: of Muon's matrices, and of what AdamW trains."""
    matrices = [u.shape for u in plan.matrices if (u.home, u.shard) == (tp_rank, dp_rank)]
    vectors = [u.shape for u in plan.vectors if (u.home, u.shard) == (tp_rank, dp_rank)]
    blocks = [local.block.size for local in plan.local_blocks(tp_rank, dp_rank)]
    return total_numel(matrices), total_numel(vectors + blocks)


def _transit_bytes(config: RunConfig, plan: StagePlan, tp_rank: int, dp_rank: int) -> int:
    """The larger of what the inner step and what the outer step hold for a while."""
    matrices, rest = owned_numels(plan, tp_rank, dp_rank)
    weight_bytes = 2 if config.train.precision == "bf16" else 4
    travelling = plan.exchange_bytes(tp_rank, dp_rank, weight_bytes)
    gradients = _FP32 * matrices
    received = gradients * (plan.tp - 1) // plan.tp
    if config.optimizer.nesterov:
        received += gradients
    # Gradients of the next batch, weights of the last one, and what the current one holds.
    inner = (received + travelling) * 2 // (BATCHES if plan.tp > 1 else 1)
    if not config.outer.interval:
        return inner
    pseudogradient = _FP32 * (matrices + rest)
    exchanges_here = config.parallel.replicas > 1 and not config.outer.host_memory
    buckets = min(_OUTER_BUCKETS_BYTES, 2 * pseudogradient) if exchanges_here else 0
    return max(inner, pseudogradient + buckets)


def activation_bytes(config: RunConfig, stage: int, on_gpu: bool) -> int:
    """The most that a rank of a stage keeps for the backward pass, and the logits at its end."""
    model, parallel, train = config.model, config.parallel, config.train
    tokens = train.micro_batch * model.sequence_length // parallel.cp
    layers = model.layers // (parallel.pp * parallel.interleave)
    whole = _layer_bytes_per_token(config, "none", on_gpu)
    kept = _layer_bytes_per_token(config, train.recompute, on_gpu) * layers
    total = tokens * kept * _chunks_in_flight(config, stage)
    if train.recompute != "none":
        total += tokens * whole  # of the layer that is computed again
    if stage == parallel.pp - 1:
        # The logits and their gradient in the model's precision, and the loss's FP32 copy.
        element_bytes = 2 if train.precision == "bf16" else 4
        total += tokens * model.vocab_size // parallel.tp * (2 * element_bytes + _FP32)
    return int(total)


def _chunks_in_flight(config: RunConfig, stage: int) -> int:
    """Forward passes of a model chunk that wait for their backward in the 1F1B schedules."""
    pp, interleave = config.parallel.pp, config.parallel.interleave
    behind = pp - stage - 1
    warm_up = behind if interleave == 1 else 2 * behind + (interleave - 1) * pp
    return min(warm_up + 1, config.micro_batches * interleave)


def _layer_bytes_per_token(config: RunConfig, recompute: str, on_gpu: bool) -> float:
    """What one layer keeps of one token on one tensor-parallel rank."""
    model, parallel = config.model, config.parallel
    element = 2 if config.train.precision == "bf16" else 4
    hidden, ffn, kv = model.hidden, model.ffn, model.kv_heads * model.head_dim
    if recompute == "full":
        return hidden * element / (parallel.tp if parallel.sequence_parallel else 1)
    norms = 4 if model.sandwich_norm else 2
    # A composed norm keeps its input and its result in FP32; a fused one its input alone.
    norm_bytes = element if on_gpu else 8
    whole = hidden * (norms * norm_bytes + 2 * element)  # and the inputs of QKV and FC1
    attention = element * (hidden + 2 * kv) + element * (hidden + kv) + element * hidden
    if not on_gpu:
        attention += (8 if element == 2 else 4) * (hidden + kv)  # norms of Q and K
    if model.attention_gate:
        # The gate beside Q, K and V, its sigmoid in FP32, and the gated context.
        attention += hidden * (2 * element + _FP32)
    # FC1's result; and SiLU's result, the contiguous up, and the product, unless one kernel.
    feed_forward = ffn * element * (3 if on_gpu else 5)
    routed = 0
    if model.experts:
        # Each chosen expert's, with the product by its probability, unless that is in the kernel.
        feed_forward = model.experts_per_token * ffn * element * (3 if on_gpu else 6)
        # A copy of the token for each, on every tensor-parallel rank; and three FP32 tables of
        # logits and probabilities beside the one of what was chosen.
        routed = model.experts_per_token * hidden * element + (3 * _FP32 + 1) * model.experts
    if recompute == "selective":
        feed_forward = routed = 0
    shared = parallel.tp if parallel.sequence_parallel else 1
    return whole / shared + (attention + feed_forward) / parallel.tp + routed
