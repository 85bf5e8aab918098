"""Memory of each rank by category, from the plans and shapes that the program itself allocates by.

Weights, gradients, masters and the states of both optimizers are exact: they come from the same
`StagePlan` that lays the buffers out. Activations are counted from what the layers keep for the
backward pass; on a GPU kernels are fused and keep less than on a processor.

Transformer Engine in FP8 is taken to keep the input of a layer's matrix in FP8, once, in the form
that the weight's gradient needs; and of each such weight two copies in FP8, as it is and
transposed, made for the first micro-batch of a step. What is no matrix's input it keeps in BF16.
That is an assumption, which was not held against a GPU.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from launch.plan.stages import Rank, Seat, stage_ranks
from megatron_ext.diloco import outer
from megatron_ext.diloco.plan import BUCKET_NUMEL
from megatron_ext.model.logical import kind_of, logical_shapes
from megatron_ext.muon.optimizer import BATCHES
from megatron_ext.muon.views import total_numel
from pretrain.settings import RunConfig

_FP32 = 4
# A CUDA context, NCCL's buffers and cuBLAS workspaces, as seen on H100s; none on a processor.
_GPU_RUNTIME_BYTES = 2 * 2**30
# An element and its share of the scales: none, or an FP32 for 128 elements, or a byte for 32.
_FP8_INPUT_BYTES = {"tensorwise": 1, "delayed": 1, "blockwise": 1 + 4 / 128, "mxfp8": 1 + 1 / 32}
# What the collective between replicas sends and receives of the three buckets under way.
_OUTER_BUCKETS_BYTES = 6 * _FP32 * BUCKET_NUMEL


@dataclass(frozen=True)
class RankMemory:
    """Bytes of one rank. All but the last three live as long as the run."""

    weights: int  # with their copies in FP8
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
    """The rank of a pipeline stage that needs most, and the most that any of its ranks does."""

    stage: int
    tp_rank: int
    dp_rank: int
    memory: RankMemory
    data_parallel_bytes: int  # gradients and weights that each rank sends in a step
    newton_schulz_flops: int  # of one iteration, on the busiest rank


def plan_memory(config: RunConfig, on_gpu: bool) -> list[StageMemory]:
    """The fullest rank of each pipeline stage. Needs `host.prepare()` where there is no CUDA."""
    return [
        _stage_memory(config, stage, ranks, on_gpu)
        for stage, ranks in enumerate(stage_ranks(config))
    ]


def _stage_memory(
    config: RunConfig, stage: int, ranks: Sequence[Rank], on_gpu: bool
) -> StageMemory:
    memories = [_rank_memory(config, rank.seats, stage, on_gpu) for rank in ranks]
    memory, fullest = max(zip(memories, ranks, strict=True), key=lambda of_rank: of_rank[0].peak)
    element_bytes = _FP32 + _weight_bytes(config)
    return StageMemory(
        stage,
        fullest.tp_rank,
        fullest.dp_rank,
        memory,
        sum(
            element_bytes * seat.held // seat.plan.dp * (seat.plan.dp - 1) for seat in fullest.seats
        ),
        max(sum(seat.newton_schulz_flops for seat in rank.seats) for rank in ranks),
    )


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


def _rank_memory(config: RunConfig, seats: Sequence[Seat], stage: int, on_gpu: bool) -> RankMemory:
    held = sum(seat.held for seat in seats)
    matrices, rest = map(sum, zip(*(seat.owned() for seat in seats), strict=True))
    owned = matrices + rest
    return RankMemory(
        weights=_weight_bytes(config) * held + (_fp8_copies_bytes(config, stage) if on_gpu else 0),
        gradients=_FP32 * held,
        masters=_FP32 * owned,
        optimizer=_FP32 * (matrices + 2 * rest + owned * bool(config.optimizer.averaging.decay)),
        **_outer_bytes(config, owned, on_gpu),
        activations=activation_bytes(config, stage, on_gpu),
        transit=_transit_bytes(config, seats),
        runtime=_GPU_RUNTIME_BYTES if on_gpu else 0,
    )


def _weight_bytes(config: RunConfig) -> int:
    return 2 if config.train.precision == "bf16" else 4


def _fp8_copies_bytes(config: RunConfig, stage: int) -> int:
    model = config.model
    matrices = [s for name, s in logical_shapes(model).items() if kind_of(name) == "matrix"]
    of_layer = total_numel(matrices) // model.layers
    return 2 * of_layer * _layers_in_fp8(config, stage) // config.parallel.tp


def _layers_in_fp8(config: RunConfig, stage: int) -> int:
    """Those of a pipeline stage that Transformer Engine computes in FP8."""
    fp8, layers, parallel = config.fp8, config.model.layers, config.parallel
    if not fp8.enabled or fp8.emulated:
        return 0
    of_chunk = layers // (parallel.pp * parallel.interleave)
    inner = range(fp8.first_last_layers_bf16, layers - fp8.first_last_layers_bf16)
    return sum(layer // of_chunk % parallel.pp == stage for layer in inner)


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


def _transit_bytes(config: RunConfig, seats: Sequence[Seat]) -> int:
    """The larger of what the inner step and what the outer step hold for a while."""
    inner = max(_inner_transit_bytes(config, seat) for seat in seats)
    if not config.outer.interval:
        return inner
    pseudogradient = _FP32 * sum(sum(seat.owned()) for seat in seats)
    exchanges_here = config.parallel.replicas > 1 and not config.outer.host_memory
    buckets = min(_OUTER_BUCKETS_BYTES, 2 * pseudogradient) if exchanges_here else 0
    return max(inner, pseudogradient + buckets)


def _inner_transit_bytes(config: RunConfig, seat: Seat) -> int:
    """Gradients of the next batch, weights of the last one, and what the current one holds."""
    matrices, _ = seat.owned()
    tp = seat.plan.tp
    gradients = _FP32 * matrices
    received = gradients * (tp - 1) // tp
    if config.optimizer.nesterov:
        received += gradients
    travelling = seat.exchange_bytes(_weight_bytes(config))
    return (received + travelling) * 2 // (BATCHES if tp > 1 else 1)


def activation_bytes(config: RunConfig, stage: int, on_gpu: bool) -> int:
    """The most that a rank of a stage keeps for the backward pass, and the logits at its end."""
    model, parallel, train = config.model, config.parallel, config.train
    tokens = train.micro_batch * model.sequence_length // parallel.cp
    layers = model.layers // (parallel.pp * parallel.interleave)
    whole = _layer_bytes_per_token(config, "none", stage, on_gpu)
    kept = _layer_bytes_per_token(config, train.recompute, stage, on_gpu) * layers
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


def _layer_bytes_per_token(config: RunConfig, recompute: str, stage: int, on_gpu: bool) -> float:
    """What a layer keeps of one token on one tensor-parallel rank, by the mean of the stage's."""
    of_stage = config.model.layers // config.parallel.pp
    share = on_gpu and _layers_in_fp8(config, stage) / of_stage
    bf16, fp8 = (_kept_bytes(config, recompute, on_gpu, in_fp8) for in_fp8 in (False, True))
    return (1 - share) * bf16 + share * fp8


def _kept_bytes(config: RunConfig, recompute: str, on_gpu: bool, in_fp8: bool) -> float:
    """What one layer, in FP8 or not, keeps of one token on one tensor-parallel rank."""
    model, parallel = config.model, config.parallel
    element = 2 if config.train.precision == "bf16" else 4
    hidden, ffn, kv = model.hidden, model.ffn, model.kv_heads * model.head_dim
    if recompute == "full":
        return hidden * element / (parallel.tp if parallel.sequence_parallel else 1)
    norms = 4 if model.sandwich_norm else 2
    # A composed norm keeps its input and its result in FP32; a fused one its input alone.
    norm_bytes = element if on_gpu else 8
    input_bytes = _FP8_INPUT_BYTES[config.fp8.recipe] if in_fp8 else element
    whole = hidden * (norms * norm_bytes + 2 * input_bytes)  # and the inputs of QKV and FC1
    attention = element * (hidden + 2 * kv) + element * (hidden + kv) + element * hidden
    if not on_gpu:
        attention += (8 if element == 2 else 4) * (hidden + kv)  # norms of Q and K
    if model.attention_gate:
        # The gate beside Q, K and V, its sigmoid in FP32, and the gated context.
        attention += hidden * (element + _FP32 + input_bytes)
    elif in_fp8:
        attention += hidden * input_bytes  # the context once more, for the projection
    # FC1's result and FC2's input; and SiLU's result and the contiguous up, unless one kernel.
    feed_forward = ffn * (2 * element + input_bytes + (0 if on_gpu else 2 * element))
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
