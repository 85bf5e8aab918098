"""Kernels that are there only where a library is: used where they are, refused where missing.

AdamW needs none of them: torch's own kernel is fused and steps all tensors of a rank at once.
"""

import importlib.util
from typing import Literal

import torch

from megatron_ext.errors import ConfigError


def fused_gradients(
    asked: bool | None, implementation: Literal["plain", "transformer_engine"]
) -> bool:
    """Whether weight gradients are added straight into the FP32 buffer, as part of the product.

    Transformer Engine's layers can; plain ones need apex's extension. `asked`: None takes it where
    it is. Raises ConfigError where it was asked for and is missing.
    """
    there = torch.cuda.is_available() and (
        implementation == "transformer_engine"
        or importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
    )
    if asked and not there:
        raise ConfigError(
            "train.fused_gradients=true needs a GPU and apex's extension "
            "fused_weight_gradient_mlp_cuda (NVIDIA's apex, built with --cpp_ext --cuda_ext), or "
            "model.implementation=transformer_engine; leave it out to go without"
        )
    return there if asked is None else asked
