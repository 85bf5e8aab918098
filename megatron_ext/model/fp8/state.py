"""Delayed scaling's state: agreed on by the ranks of a stage, and kept in checkpoints."""

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_ext.blocks import Block
from megatron_ext.model.fp8.rounding import Delayed
from megatron_ext.model.logical import modules_by_global_name

# Kind of its tensors in a checkpoint.
SCALING_KIND = "fp8_scaling"


class DelayedScaling:
    """The state of all linear layers of this rank's model chunks that scale by earlier steps."""

    def __init__(self, chunks: Iterable[torch.nn.Module]):
        self._recipes: dict[str, Delayed] = {
            name: module.recipe
            for name, module in modules_by_global_name(chunks)
            if isinstance(getattr(module, "recipe", None), Delayed)
        }
        self._groups = [
            parallel_state.get_tensor_model_parallel_group(),
            parallel_state.get_data_parallel_group(with_context_parallel=True),
        ]

    def finish_step(self) -> None:
        """At the end of a step's backward pass: one maximum over the stage's ranks, new scales."""
        if not self._recipes:
            return
        recipes = self._recipes.values()
        largest = torch.stack([recipe.largest for recipe in recipes])
        for group in self._groups:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        for recipe, agreed in zip(recipes, largest, strict=True):
            recipe.largest.copy_(agreed)
            recipe.finish_step()

    def tensors(self) -> Iterator[tuple[str, Block, torch.Tensor]]:
        """What a checkpoint holds of it: kind, block, values; on the first rank of the stage."""
        if any(group.rank() for group in self._groups):
            return
        for name, recipe in self._recipes.items():
            for part, tensor in (("history", recipe.history), ("scale", recipe.scale)):
                shape = tuple(tensor.shape)
                yield SCALING_KIND, Block(f"{name}.{part}", shape, (0,) * len(shape), shape), tensor

    def share(self) -> None:
        """After a load, which filled the first rank's: give them to the stage's other ranks."""
        for recipe in self._recipes.values():
            for tensor in (recipe.history, recipe.scale):
                for group in self._groups:
                    dist.broadcast(tensor, group=group, group_src=0)
