"""One forward and backward pass on any layout, and by the reference, for this folder's tests."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_ext import host
from megatron_ext.model import ModelConfig, build, describe, documents, logical_shapes
from megatron_ext.model.initialize import draw
from megatron_ext.model.logical import Segment
from megatron_ext.model.reference import objective, token_losses
from megatron_ext.replicas import ParallelConfig, initialize_megatron, join
from tests.ranks import run

MICRO_BATCH, MICRO_BATCHES = 2, 4
SEED = 7


@dataclass
class Step:
    """What one forward and backward pass over the whole batch gives."""

    loss: float  # mean over tokens
    gradients: dict[str, torch.Tensor]  # whole, by logical name, float64

    @property
    def norm(self) -> float:
        return sum(g.square().sum() for g in self.gradients.values()).sqrt().item()


def model_config(**changes) -> ModelConfig:
    """A model of a few thousand parameters."""
    small = {"layers": 4, "hidden": 32, "heads": 4, "ffn": 48}
    return ModelConfig(**(small | {"vocab_size": 64, "sequence_length": 16} | changes))


def megatron_step(
    model: ModelConfig,
    parallel: ParallelConfig | None = None,
    precision: str = "fp32",
    recompute: str = "none",
    ddp: DistributedDataParallelConfig | None = None,
) -> Step:
    """The step on real ranks of megatron-core."""
    parallel = parallel or ParallelConfig()
    ddp = ddp or DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    ranks = run(_rank_step, parallel.world_size, model, parallel, precision, recompute, ddp)
    gradients = {}
    for _, counted in ranks:
        for segment, gradient in counted:
            nothing = torch.full(segment.shape, torch.nan, dtype=torch.float64)
            gradients.setdefault(segment.name, nothing)[segment.slices] = gradient
    tokens = MICRO_BATCHES * MICRO_BATCH * model.sequence_length
    return Step(sum(loss for loss, _ in ranks) / tokens, gradients)


def reference_step(model: ModelConfig) -> Step:
    """The step in float64, on whole matrices."""
    weights = {
        name: draw(name, model, SEED).double().requires_grad_() for name in logical_shapes(model)
    }
    tokens, labels, cu_seqlens = (torch.cat(parts) for parts in zip(*batches(model), strict=True))
    document = None
    if model.document_masking:
        positions = torch.arange(model.sequence_length).repeat(len(tokens), 1)
        document = torch.searchsorted(cu_seqlens, positions, right=True)
    loss = token_losses(weights, model, tokens, labels, document).mean()
    objective(weights, model, tokens, labels, document).backward()
    return Step(loss.item(), {name: weight.grad for name, weight in weights.items()})


def batches(model: ModelConfig, dp_rank: int = 0, dp: int = 1) -> Iterator[tuple]:
    """(tokens, labels, cu_seqlens) of each micro-batch of this data-parallel rank."""
    generator = torch.Generator().manual_seed(SEED)
    sequence = model.sequence_length
    shape = (MICRO_BATCHES, MICRO_BATCH, sequence + 1)
    text = torch.randint(model.vocab_size, shape, generator=generator)
    for index in range(dp_rank, MICRO_BATCHES, dp):
        # Documents of 5 and 1 tokens and of the rest in one row, one that fills the other row.
        cu_seqlens = torch.tensor([[0, 5, 6, sequence, sequence], [0, *[sequence] * 4]])
        yield text[index, :, :-1].contiguous(), text[index, :, 1:].contiguous(), cu_seqlens


def _rank_step(
    rank: int,
    model: ModelConfig,
    parallel: ParallelConfig,
    precision: str,
    recompute: str,
    ddp: DistributedDataParallelConfig,
) -> tuple[float, list[tuple[Segment, torch.Tensor]]]:
    """This rank's share of the loss, and of the gradients: each element on one rank only."""
    host.prepare()
    with join(parallel, timeout_seconds=30):
        initialize_megatron(parallel, SEED)
        chunks = build(model, parallel, precision=precision, recompute=recompute, seed=SEED)
        config = chunks[0].config
        chunks = [DistributedDataParallel(config, ddp, chunk) for chunk in chunks]
        config.finalize_model_grads_func = finalize_model_grads
        if ddp.overlap_grad_reduce:
            config.no_sync_func = chunks[0].no_sync
        if ddp.overlap_param_gather:
            _forget_other_shards(chunks)
        loss = _forward_backward(chunks, model)
        if ddp.use_distributed_optimizer:
            _gather_gradients(chunks)
        return loss, _counted_gradients(chunks, model, parallel)


def _forward_backward(chunks: list[DistributedDataParallel], model: ModelConfig) -> float:
    dp_rank = parallel_state.get_data_parallel_rank()
    dp = parallel_state.get_data_parallel_world_size()
    positions = torch.arange(model.sequence_length).expand(MICRO_BATCH, -1)

    def forward(iterator, chunk):
        tokens, labels, cu_seqlens = next(iterator)
        packed = documents(cu_seqlens) if model.document_masking else None
        losses = chunk(tokens, positions, None, labels=labels, packed_seq_params=packed)
        return losses, summed

    def summed(losses):
        total = losses.sum()
        # Core divides the reported tensor in place, hence the clone.
        return total, torch.tensor(losses.numel(), dtype=torch.int), {"loss": total.clone()}

    reports = get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[batches(model, dp_rank, dp) for _ in chunks],
        model=chunks,
        num_microbatches=MICRO_BATCHES // dp,
        seq_length=model.sequence_length,
        micro_batch_size=MICRO_BATCH,
        forward_only=False,
    )
    if parallel_state.get_tensor_model_parallel_rank() > 0:
        return 0.0
    return sum(report["loss"].double().item() for report in reports)


def _forget_other_shards(chunks: list[DistributedDataParallel]) -> None:
    """Spoil the weights that another data-parallel rank owns: the forward pass gathers them."""
    rank = parallel_state.get_data_parallel_rank()
    for bucket in _buckets(chunks):
        for index, shard in enumerate(_shards(bucket.param_data)):
            if index != rank:
                shard.fill_(torch.nan)


def _gather_gradients(chunks: list[DistributedDataParallel]) -> None:
    """After a reduce-scatter each data-parallel rank holds its shard: put them together."""
    group = parallel_state.get_data_parallel_group()
    for bucket in _buckets(chunks):
        shard = _shards(bucket.grad_data)[group.rank()].clone()
        dist.all_gather_into_tensor(bucket.grad_data, shard, group=group)


def _buckets(chunks: list[DistributedDataParallel]) -> Iterator:
    for chunk in chunks:
        for group in chunk.bucket_groups:
            yield from group.buckets


def _shards(buffer: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return buffer.chunk(parallel_state.get_data_parallel_world_size())


def _counted_gradients(
    chunks: list[DistributedDataParallel], model: ModelConfig, parallel: ParallelConfig
) -> list[tuple[Segment, torch.Tensor]]:
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    dp_rank = parallel_state.get_data_parallel_rank()
    return [
        (segment, parameter.main_grad[segment.local_slices].double())
        for parameter, logical in describe(chunks, model, parallel).items()
        if not logical.shared_copy and not (logical.replicated and tp_rank > 0)
        # Neighbours hold different experts, and the same everything else.
        if dp_rank < (1 if logical.expert is None else parallel.ep)
        for segment in logical.segments_of(tp_rank)
    ]
