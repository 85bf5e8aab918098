"""Forward and backward of a global batch's micro-batches through megatron-core's schedules."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_ext.model.attention import documents
from megatron_ext.model.fp8.state import DelayedScaling
from megatron_ext.muon.stage import Stage
from pretrain.samples import Batch


class Engine:
    """Runs the model of one rank, together with the other ranks of the replica.

    Attributes:
        scaling: what FP8's delayed scaling remembers of earlier steps.
    """

    def __init__(self, stage: Stage):
        self._stage = stage
        self.scaling = DelayedScaling(stage.chunks)
        self._schedule = get_forward_backward_func()
        config = stage.chunks[0].config
        config.finalize_model_grads_func = finalize_model_grads
        if stage.overlap:
            # Gradients are reduced in the backward pass of the last micro-batch only.
            no_sync = [chunk.no_sync for chunk in stage.chunks]
            config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]

    def train(self, micro_batches: Iterable[Batch]) -> tuple[float, float]:
        """Leave reduced gradients of the mean loss per token of the replica.

        Returns that loss, and on how many tokens it is: those that the loss mask lets count.
        """
        for chunk in self._stage.chunks:
            chunk.train()
            chunk.zero_grad_buffer()
        total, tokens = self._run(list(micro_batches), forward_only=False)
        self.scaling.finish_step()
        return total / tokens, tokens

    @torch.no_grad()
    def evaluate(self, micro_batches: Iterable[Batch]) -> tuple[float, float]:
        """Sum of the losses of the replica's tokens, and how many they are."""
        for chunk in self._stage.chunks:
            chunk.eval()
        return self._run(list(micro_batches), forward_only=True)

    def _run(self, batches: list[Batch], forward_only: bool) -> tuple[float, float]:
        micro_batch, sequence = batches[0]["tokens"].shape
        context = parallel_state.get_context_parallel_world_size()
        chunks = self._stage.chunks
        outputs = self._schedule(
            forward_step_func=self._forward,
            data_iterator=[iter(batches) for _ in chunks] if len(chunks) > 1 else iter(batches),
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=len(batches),
            seq_length=sequence * context,
            micro_batch_size=micro_batch,
            forward_only=forward_only,
        )
        return self._sum_over_replica(outputs)

    def _forward(self, batches: Iterator[Batch], model: torch.nn.Module) -> tuple:
        batch = dict(next(batches))
        boundaries = batch.pop("cu_seqlens", None)  # read on the CPU
        packed = documents(boundaries) if boundaries is not None else None
        batch = {name: tensor.to(self._stage.device) for name, tensor in batch.items()}
        output = model(
            batch["tokens"],
            batch["position_ids"],
            attention_mask=None,
            labels=batch["labels"],
            packed_seq_params=packed,
        )
        return output, partial(_loss, batch["loss_mask"])

    def _sum_over_replica(self, outputs: Sequence[torch.Tensor]) -> tuple[float, float]:
        """Add up [loss, tokens] of the micro-batches over the ranks that computed losses."""
        total = torch.zeros(2, dtype=torch.float64, device=self._stage.device)
        # All tensor-parallel ranks of the last stage hold the same losses.
        if outputs and parallel_state.get_tensor_model_parallel_rank() == 0:
            total += torch.stack(list(outputs)).sum(0)
        dist.all_reduce(total)  # the default group is the replica
        loss, tokens = total.tolist()
        return loss, tokens


def _loss(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Loss to differentiate, tokens to divide it by, and both for the record [2]."""
    loss = (losses.float() * mask).sum()
    tokens = mask.sum()
    # The schedule divides what it is given in place, so the record is a copy.
    return loss, tokens.int(), torch.stack([loss.detach(), tokens]).double()
