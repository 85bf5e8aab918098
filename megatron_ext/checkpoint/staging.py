"""Copies of tensors in host memory, so that they can be written while training goes on."""

import torch
from torch import Tensor

from megatron_ext.checkpoint.state import StateTensor


class Staging:
    """Host buffers that are allocated by the first copy and used again by the next ones.

    They take as much host memory as what this rank saves; pinned, if it lives on a GPU. First use
    of fresh memory costs several times the copy itself, which is why the buffers stay.
    """

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str, tuple[int, ...]], Tensor] = {}

    def copy(self, tensors: list[StateTensor]) -> list[StateTensor]:
        """The same tensors with their values of now, in host memory, until the next `copy`."""
        copies = []
        for kind, block, tensor in tensors:
            place = (kind, block.name, block.offset)
            buffer = self._buffers.get(place)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
                self._buffers[place] = buffer
            buffer.copy_(tensor, non_blocking=True)
            copies.append((kind, block, buffer))
        if any(tensor.is_cuda for _, _, tensor in tensors):
            torch.cuda.current_stream().synchronize()
        return copies


def in_place(tensors: list[StateTensor]) -> list[StateTensor]:
    """The tensors themselves where they are in host memory already, else copies there."""
    return [(kind, block, tensor.detach().cpu()) for kind, block, tensor in tensors]
