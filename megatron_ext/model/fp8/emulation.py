"""Megatron-core's parallel linear layers with operands rounded as FP8 would round them."""

from typing import Any

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from megatron_ext.model.fp8.config import Fp8Config
from megatron_ext.model.fp8.rounding import Recipe, make_recipe


class _Product(torch.autograd.Function):
    """x·wᵀ and its two gradients, each of rounded operands."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, recipe: Recipe, training: bool
    ) -> torch.Tensor:
        """[tokens, in], [out, in] → [tokens, out] in the input's dtype."""
        ctx.save_for_backward(x, weight)
        ctx.recipe = recipe
        left = recipe.round("input", x.float(), along=1, record=training)
        right = recipe.round("weight", weight.float(), along=1, record=training)
        return (left @ right.T).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        x, weight = ctx.saved_tensors
        recipe = ctx.recipe
        dx = recipe.round("gradient", dy.float(), along=1, record=True) @ recipe.round(
            "weight", weight.float(), along=0
        )
        dw = recipe.round("gradient", dy.float(), along=0).T @ recipe.round(
            "input", x.float(), along=0
        )
        return dx.to(x.dtype), dw.to(weight.dtype), None, None


class _Fp8:
    """What both layers share: core calls `_forward_impl` for the product itself."""

    def __init__(self, *args: Any, fp8: Fp8Config, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.recipe = make_recipe(fp8, self.tp_group)

    def _forward_impl(
        self,
        input: torch.Tensor,
        weight: torch.Tensor,
        allreduce_dgrad: bool,
        sequence_parallel: bool,
        **from_core: Any,
    ) -> torch.Tensor:
        """[sequence, batch, in] → [sequence, batch, out]."""
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, group=self.tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=self.tp_group)
        # Inside the product autograd is off, so that it cannot tell training from evaluation.
        training = torch.is_grad_enabled()
        product = _Product.apply(input.flatten(0, 1), weight, self.recipe, training)
        return product.unflatten(0, input.shape[:2])


class Fp8ColumnParallelLinear(_Fp8, ColumnParallelLinear):
    """The output is cut over the tensor-parallel ranks."""


class Fp8RowParallelLinear(_Fp8, RowParallelLinear):
    """The input is cut over the tensor-parallel ranks."""
