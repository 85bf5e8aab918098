"""Kernels that are there only where a library is: used where they are, refused where missing.

AdamW needs none of them: torch's own kernel is fused and steps all tensors of a rank at once.
"""

import importlib.util

import torch

from megatron_ext.errors import ConfigError

_EXTENSION = "fused_weight_gradient_mlp_cuda"


def fused_gradients(asked: bool | None) -> bool:
    """Whether weight gradients are added straight into the FP32 buffer, as part of the product.

    It takes apex's extension also under Transformer Engine's layers, which could do without: the
    head is megatron-core's own layer. `asked`: None takes it where it is. Raises ConfigError where
    it was asked for and is missing.
    """
    there = torch.cuda.is_available() and importlib.util.find_spec(_EXTENSION) is not None
    if asked and not there:
        raise ConfigError(
            f"train.fused_gradients=true needs a GPU and apex's extension {_EXTENSION} (NVIDIA's "
            "apex, built with --cpp_ext --cuda_ext); leave it out to go without"
        )
    return there if asked is None else asked
