"""What every codec does: FP32 tensors to bytes and back."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch

# Payloads stand one after another in a message and are read as words of up to this size.
_ALIGNMENT_BYTES = 8

# Values worked on at a time: their temporaries stay in a core's cache.
CHUNK_NUMEL = 1 << 15

Grain = Literal["element", "row", "tensor"]


@dataclass(frozen=True)
class Packed:
    """An encoded tensor: what travels, and the shape that both sides know."""

    payload: torch.Tensor  # uint8 [nbytes]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Size of the payload on the wire."""
        return self.payload.numel()


class Codec(ABC):
    """Packs FP32 tensors; equal tensors give equal bytes, and equal bytes equal tensors.

    Attributes:
        grain: how far a tensor may be cut without changing any decoded value: anywhere, between
            rows, or not at all.
    """

    grain: Grain

    def encode(self, tensor: torch.Tensor) -> Packed:
        """Pack a tensor of any shape; for codecs that look at rows its first dimension counts."""
        shape = tuple(tensor.shape)
        payload = torch.empty(self.nbytes(shape), dtype=torch.uint8, device=tensor.device)
        self.encode_into(tensor.float().contiguous(), payload)
        return Packed(payload, shape)

    def decode(self, packed: Packed) -> torch.Tensor:
        """The FP32 tensor that the payload stands for."""
        values = torch.empty(packed.shape, device=packed.payload.device)
        self.decode_into(packed.payload, values)
        return values

    def nbytes(self, shape: tuple[int, ...]) -> int:
        """Size of the payload of a tensor of this shape, side information and padding included."""
        size = self._nbytes(shape) if torch.Size(shape).numel() else 0
        return -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES

    @torch.no_grad()
    def encode_into(self, values: torch.Tensor, payload: torch.Tensor) -> None:
        """Write `nbytes` bytes for contiguous FP32 values."""
        if values.numel():
            self._encode(values, payload)

    @torch.no_grad()
    def decode_into(self, payload: torch.Tensor, values: torch.Tensor) -> None:
        """Fill a contiguous FP32 tensor of the shape that was encoded."""
        if values.numel():
            self._decode(payload, values)

    @abstractmethod
    def _nbytes(self, shape: tuple[int, ...]) -> int: ...

    @abstractmethod
    def _encode(self, values: torch.Tensor, payload: torch.Tensor) -> None: ...

    @abstractmethod
    def _decode(self, payload: torch.Tensor, values: torch.Tensor) -> None: ...
