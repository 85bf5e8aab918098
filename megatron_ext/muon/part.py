"""Parameters of a pipeline stage that share their process groups."""

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from megatron.core.optimizer.param_layout import BufferKey, PerBufferParamLayout

from megatron_ext.model.logical import LogicalParameter
from megatron_ext.muon.layout import buffer_layout
from megatron_ext.muon.plan import plan_stage
from megatron_ext.muon.routing import Route


class Part:
    """A stage's parameters with one pair of groups, and the plan of who owns what among them.

    Without expert parallelism a stage is one part. With it, the experts are another: the ranks of
    its data-parallel group are those that hold the same experts.

    Attributes:
        plan: equal on all ranks of both groups.
        tp_group, dp_group: the ranks that hold the pieces of a matrix, and those that share the
            gradient reduction.
        parameters: of all model chunks, in the plan's order.
    """

    def __init__(
        self,
        chunks: Sequence[Sequence[torch.nn.Parameter]],
        logical: Mapping[torch.nn.Parameter, LogicalParameter],
        routes: Mapping[str, Route],
        tp_group: dist.ProcessGroup,
        dp_group: dist.ProcessGroup,
        busy: Sequence[Sequence[int]] | None = None,
    ):
        """`chunks`: the part's parameters in each model chunk, in order of registration.

        `busy`: the FLOPs that these ranks have to do in another part.
        """
        self.tp_group, self.dp_group = tp_group, dp_group
        self.plan = plan_stage(
            [[logical[parameter] for parameter in chunk] for chunk in chunks],
            routes,
            tp_group.size(),
            dp_group.size(),
            busy,
        )
        self.parameters = [parameter for chunk in chunks for parameter in chunk]
        self._chunks = chunks

    @property
    def device(self) -> torch.device:
        return self.parameters[0].device

    @property
    def weight_dtype(self) -> torch.dtype:
        """What the model computes with and what travels to it."""
        return self.parameters[0].dtype

    def gradient(self, parameter: int) -> torch.Tensor:
        """FP32 gradient of a parameter; only this rank's shard of it is complete."""
        return self.parameters[parameter].main_grad

    def weight(self, parameter: int) -> torch.Tensor:
        """The weight in the DDP buffer; only this rank's shard of it is gathered from here."""
        return self.parameters[parameter].data

    def buffer_layout(self, chunk: int) -> tuple[BufferKey, PerBufferParamLayout]:
        """Where DDP shall put this part's parameters of a model chunk."""
        return buffer_layout(self.plan.layouts[chunk], self._chunks[chunk], self.dp_group.size())
