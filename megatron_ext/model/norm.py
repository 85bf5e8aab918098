"""RMSNorm that knows sequence parallelism, and the norm behind each sublayer (sandwich norm)."""

from collections.abc import Callable

import torch
from megatron.core.transformer import TransformerConfig


class RMSNorm(torch.nn.Module):
    """x / rms(x) · weight over the last dimension (Zhang & Sennrich, 2019, eq. 4).

    Core's own wrapper refuses sequence parallelism. There each tensor-parallel rank sees a part of
    the sequence, so its weight gradient is a partial sum; the flag tells finalize_model_grads.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., hidden_size] -> the same."""
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


class PostNormAdd(torch.nn.Module):
    """residual + norm(sublayer output), in the place of core's bias-dropout-add.

    Standing there as a module, its weight is found by DDP's hooks and by sharded_state_dict, and
    the transformer layer needs no subclass.
    """

    def __init__(self, config: TransformerConfig, norm: Callable[..., torch.nn.Module]):
        super().__init__()
        self.norm = norm(
            config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
        )

    def forward(self, training: bool, fused: bool) -> Callable[..., torch.Tensor]:
        """The function that the layer calls with (output, bias), residual and dropout."""
        return self._add

    def _add(
        self,
        output_and_bias: tuple[torch.Tensor, None],
        residual: torch.Tensor,
        dropout: float,
    ) -> torch.Tensor:
        output, _ = output_and_bias
        return residual + self.norm(output)
