"""This rank's pipeline stage under megatron-core's DDP, in the layout of its plans."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer.param_layout import FullParamLayout
from megatron.core.transformer import TransformerConfig

from megatron_ext.model.logical import LogicalParameter
from megatron_ext.muon.part import Part
from megatron_ext.muon.routing import Route


class Stage:
    """The model chunks of one rank, wrapped in DDP, with the plans of who owns what in them.

    Attributes:
        chunks: one DistributedDataParallel for each model chunk.
        parts: the parameters by the groups that share them; the experts come last.
        routes: of the whole model.
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
        self.overlap = overlap
        self.routes = routes
        self.parts = _parts([list(model.parameters()) for model in models], logical, routes)
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
                full_param_layout=FullParamLayout(
                    dict(part.buffer_layout(index) for part in self.parts)
                ),
            )
            for index, model in enumerate(models)
        ]

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

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
        for parameter in self.parts[0].parameters:
            if getattr(parameter, "shared_embedding", False):
                group = parallel_state.get_embedding_group()
                dist.broadcast(parameter.data, dist.get_global_rank(group, 0), group=group)

    def wire_bytes(self) -> int:
        """What data parallelism sends each step of one copy of the model, all its ranks together.

        Reduce-scatter of gradients and all-gather of weights, in the ring's volume; tokens on their
        way to experts are not among it. A collective call of all ranks of the replica.
        """
        sent = 0
        for chunk in self.chunks:
            for buffer in chunk.buffers + chunk.expert_parallel_buffers:
                held = buffer.grad_data.nbytes + buffer.param_data.nbytes
                ranks = buffer.data_parallel_world_size
                sent += held // ranks * (ranks - 1)
        total = torch.tensor(sent, device=self.device)
        dist.all_reduce(total)  # the default group is the replica
        return total.item() // self.parts[0].dp_group.size()


def _parts(
    chunks: Sequence[Sequence[torch.nn.Parameter]],
    logical: Mapping[torch.nn.Parameter, LogicalParameter],
    routes: Mapping[str, Route],
) -> list[Part]:
    """The parameters by groups, as megatron-core's DDP will reduce them."""
    shared_out = [[p for p in chunk if not getattr(p, "allreduce", True)] for chunk in chunks]
    the_rest = [[p for p in chunk if getattr(p, "allreduce", True)] for chunk in chunks]
    tp_group = parallel_state.get_tensor_model_parallel_group()
    dp_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    parts = [Part(the_rest, logical, routes, tp_group, dp_group)]
    if any(shared_out):
        tp_group = parallel_state.get_expert_tensor_parallel_group()
        dp_group = parallel_state.get_expert_data_parallel_group()
        ep = parallel_state.get_expert_model_parallel_world_size()
        ep_rank = parallel_state.get_expert_model_parallel_rank()
        busy = parts[0].plan.flops_beside(ep_rank, ep)
        parts.append(Part(shared_out, logical, routes, tp_group, dp_group, busy))
    return parts
