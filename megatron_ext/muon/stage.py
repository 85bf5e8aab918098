"""This rank's pipeline stage under megatron-core's DDP, in the plan's layout."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.transformer import TransformerConfig

from megatron_ext.model.logical import LogicalParameter
from megatron_ext.muon.layout import core_layout
from megatron_ext.muon.plan import plan_stage
from megatron_ext.muon.routing import Route


class Stage:
    """The model chunks of one rank, wrapped in DDP, with the plan of who owns what in them.

    Attributes:
        chunks: one DistributedDataParallel for each model chunk.
        plan: the stage's plan, equal on all its ranks.
        tp_group, dp_group: the ranks that hold the pieces of a matrix, and those that share the
            gradient reduction (data × context parallel).
    """

    def __init__(
        self,
        models: Sequence[torch.nn.Module],
        logical: Mapping[torch.nn.Parameter, LogicalParameter],
        routes: Mapping[str, Route],
        config: TransformerConfig,
        overlap: bool = False,
    ):
        """`overlap`: gradient reduction and parameter gather overlap with compute."""
        self.tp_group = parallel_state.get_tensor_model_parallel_group()
        self.dp_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self.overlap = overlap
        parameters = [list(model.parameters()) for model in models]
        self.plan = plan_stage(
            [[logical[parameter] for parameter in chunk] for chunk in parameters],
            routes,
            self.tp_group.size(),
            self.dp_group.size(),
        )
        ddp_config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=True,
            overlap_grad_reduce=overlap,
            overlap_param_gather=overlap,
        )
        self.chunks = [
            DistributedDataParallel(
                config,
                ddp_config,
                model,
                full_param_layout=core_layout(layout, chunk, self.dp_group.size()),
            )
            for model, chunk, layout in zip(models, parameters, self.plan.layouts, strict=True)
        ]
        self._parameters = [parameter for chunk in parameters for parameter in chunk]

    @property
    def device(self) -> torch.device:
        return self._parameters[0].device

    @property
    def weight_dtype(self) -> torch.dtype:
        """What the model computes with and what travels to it."""
        return self._parameters[0].dtype

    def gradient(self, parameter: int) -> torch.Tensor:
        """FP32 gradient of a parameter; only this rank's shard of it is complete."""
        return self._parameters[parameter].main_grad

    def weight(self, parameter: int) -> torch.Tensor:
        """The weight in the DDP buffer; only this rank's shard of it is gathered from here."""
        return self._parameters[parameter].data

    def zero_gradients(self) -> None:
        """Begin a step: empty the gradient buffers."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()

    def reduce_gradients(self) -> None:
        """Add the gradients of the data-parallel ranks up, each shard on its rank."""
        for chunk in self.chunks:
            chunk.finish_grad_sync()

    def gather_weights(self, at_once: bool) -> None:
        """Spread each shard's weights over the data-parallel ranks.

        With `overlap` the next forward pass does it as it goes, unless `at_once` asks for it now.
        """
        self._share_tied_weights()
        for chunk in self.chunks:
            if at_once or not self.overlap:
                chunk.start_param_sync(force_sync=True)

    def _share_tied_weights(self) -> None:
        """Give the last pipeline stage's copy of a tied embedding the first stage's weights."""
        if parallel_state.get_pipeline_model_parallel_world_size() == 1:
            return
        for parameter in self._parameters:
            if getattr(parameter, "shared_embedding", False):
                group = parallel_state.get_embedding_group()
                dist.broadcast(parameter.data, dist.get_global_rank(group, 0), group=group)

    def wire_bytes(self) -> int:
        """What data parallelism sends each step of one copy of the model, all its ranks together.

        Reduce-scatter of gradients and all-gather of weights, in the ring's volume. A collective
        call of all ranks of the replica.
        """
        ranks = self.dp_group.size()
        buffers = [buffer for chunk in self.chunks for buffer in chunk.buffers]
        held = sum(buffer.grad_data.nbytes + buffer.param_data.nbytes for buffer in buffers)
        total = torch.tensor(held * (ranks - 1), device=self.device)
        dist.all_reduce(total)  # the default group is the replica
        return total.item() // ranks**2
