"""Rounding to FP8 and back, as the scaling recipes of Transformer Engine define it.

A matrix product y = x·wᵀ has three: forward x·wᵀ, the input's gradient dy·w and the weight's dyᵀ·x.
Each rounds both operands. Values are multiplied by a scale that carries the largest to the format's
largest, rounded to nearest even, saturated, and divided by the scale again; products and sums of
what comes out are those of the FP8 hardware, in FP32.

recipe      a scale for                                             scale
tensorwise  the tensor (over all tensor-parallel ranks)             largest / amax
delayed     the tensor, from the amax of earlier steps              largest / amax
blockwise   1 × 128 along the sum of inputs and gradients,          power of two below
            128 × 128 of weights
mxfp8       1 × 32 along the sum                                    power of two below

Transformer Engine measures a tensor on each tensor-parallel rank for itself, but for operands that
it gathers; here all ranks share the scale, so that a layout does not change what is computed.
"""

from typing import Literal

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from megatron_ext.model.fp8.config import Fp8Config

Role = Literal["input", "weight", "gradient"]
ROLES: tuple[Role, ...] = ("input", "weight", "gradient")


def dtype_of(role: Role, fp8: Fp8Config) -> torch.dtype:
    """The FP8 format of an operand."""
    wide = fp8.format == "hybrid" and role == "gradient"
    return torch.float8_e5m2 if wide else torch.float8_e4m3fn


def scale_of(amax: torch.Tensor, dtype: torch.dtype, power_of_two: bool) -> torch.Tensor:
    """FP32 scales for the largest magnitudes `amax`; 1 for nothing, and for what is not finite."""
    scale = torch.finfo(dtype).max / amax
    # A scale of infinity would turn zeros into NaN.
    scale = scale.clamp(max=torch.finfo(torch.float32).max)
    if power_of_two:
        _, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ones_like(scale), exponent - 1)
    return torch.where((amax > 0) & amax.isfinite(), scale, 1.0)


def rounded(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """FP32 `values` to FP8 and back; `scale` broadcasts to them."""
    largest = torch.finfo(dtype).max
    return (values * scale).clamp(-largest, largest).to(dtype).float() / scale


class Tensorwise:
    """A scale for the tensor as it is."""

    def __init__(self, fp8: Fp8Config, group: dist.ProcessGroup | None):
        self._fp8 = fp8
        self._group = group

    def round(
        self, role: Role, values: torch.Tensor, along: int, record: bool = False
    ) -> torch.Tensor:
        """FP32 [rows, cols] as an operand of a product that sums over dimension `along`.

        `record`: training sees these values now, which delayed scaling remembers.
        """
        amax = values.abs().max()
        if self._group is not None and self._group.size() > 1:
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=self._group)
        dtype = dtype_of(role, self._fp8)
        return rounded(values, scale_of(amax, dtype, power_of_two=False), dtype)


class Blocks:
    """A power of two for each stretch of `length` along the sum, or each square of weights."""

    def __init__(self, fp8: Fp8Config, length: int, square_weights: bool):
        self._fp8 = fp8
        self._length = length
        self._square_weights = square_weights

    def round(
        self, role: Role, values: torch.Tensor, along: int, record: bool = False
    ) -> torch.Tensor:
        """As Tensorwise's; the last blocks of a dimension may be shorter."""
        size = [1, 1]
        size[along] = self._length
        if role == "weight" and self._square_weights:
            size = [self._length, self._length]
        rows, cols = values.shape
        blocks = pad(values, (0, -cols % size[1], 0, -rows % size[0]))
        blocks = blocks.unflatten(1, (-1, size[1])).unflatten(0, (-1, size[0]))
        dtype = dtype_of(role, self._fp8)
        scale = scale_of(blocks.abs().amax((1, 3), keepdim=True), dtype, power_of_two=True)
        return rounded(blocks, scale, dtype).flatten(2, 3).flatten(0, 1)[:rows, :cols]


class Delayed(torch.nn.Module):
    """The scale of a step comes from the amax of the steps before it.

    Within a step the scales stand still, so that recomputed activations and all micro-batches are
    rounded alike; at its end `largest` goes into the history. Transformer Engine does so after each
    micro-batch.

    Attributes, which move to a device with the model, and wait for no GPU:
        largest: [3] amax of input, weight and gradient in this step so far.
        history: [3, amax_history] of the steps before, the latest first.
        scale: [3] in use.
    """

    largest: torch.Tensor
    history: torch.Tensor
    scale: torch.Tensor

    def __init__(self, fp8: Fp8Config):
        super().__init__()
        self._fp8 = fp8
        roles = len(ROLES)
        # Not persistent: checkpoints hold them by logical name (state.py).
        self.register_buffer("largest", torch.zeros(roles), persistent=False)
        self.register_buffer("history", torch.zeros(roles, fp8.amax_history), persistent=False)
        self.register_buffer("scale", torch.ones(roles), persistent=False)

    def round(
        self, role: Role, values: torch.Tensor, along: int, record: bool = False
    ) -> torch.Tensor:
        """As Tensorwise's."""
        place = ROLES.index(role)
        if record:
            self.largest[place] = torch.maximum(self.largest[place], values.abs().max())
        return rounded(values, self.scale[place], dtype_of(role, self._fp8))

    def finish_step(self) -> None:
        """Take this step's amax, which all ranks agree on by now, into the history."""
        self.history.copy_(self.history.roll(1, dims=1))
        self.history[:, 0] = self.largest
        self.largest.zero_()
        recent = self._fp8.amax_algorithm == "most_recent"
        amax = self.history[:, 0] if recent else self.history.amax(1)
        for place, role in enumerate(ROLES):
            # Nothing seen yet, or not finite: the scale stays.
            seen = (amax[place] > 0) & amax[place].isfinite()
            fresh = scale_of(amax[place], dtype_of(role, self._fp8), power_of_two=False)
            self.scale[place] = torch.where(seen, fresh, self.scale[place])


Recipe = Tensorwise | Blocks | Delayed


def make_recipe(fp8: Fp8Config, group: dist.ProcessGroup | None) -> Recipe:
    """The recipe for one linear layer; `group`: its tensor-parallel ranks."""
    if fp8.recipe == "tensorwise":
        return Tensorwise(fp8, group)
    if fp8.recipe == "delayed":
        return Delayed(fp8)
    if fp8.recipe == "blockwise":
        return Blocks(fp8, 128, square_weights=True)
    return Blocks(fp8, 32, square_weights=False)
