"""Codecs that keep every value, in another floating-point format."""

import torch

from megatron_ext.diloco.codecs.base import Codec


class Cast(Codec):
    """FP32 (lossless) or BF16 (rounded to nearest even), without side information."""

    grain = "element"

    def __init__(self, dtype: torch.dtype):
        self._dtype = dtype

    def _nbytes(self, shape: tuple[int, ...]) -> int:
        return torch.Size(shape).numel() * self._dtype.itemsize

    def _encode(self, values: torch.Tensor, payload: torch.Tensor) -> None:
        self._cast(payload, values).copy_(values.flatten())

    def _decode(self, payload: torch.Tensor, values: torch.Tensor) -> None:
        values.view(-1).copy_(self._cast(payload, values))

    def _cast(self, payload: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        return payload[: values.numel() * self._dtype.itemsize].view(self._dtype)
