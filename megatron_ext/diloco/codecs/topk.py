"""Top-k: the largest values by magnitude, and where they stand."""

import torch

from megatron_ext.diloco.codecs.base import Codec
from megatron_ext.diloco.codecs.bits import index_bits, pack_integers, unpack_integers


class TopK(Codec):
    """Keeps max(1, ⌊keep · length⌋) values of the whole tensor, or of each chunk, as FP32.

    A position takes as few bits as the chunk's length needs: 12 in a chunk of 4,096.
    """

    grain = "tensor"

    def __init__(self, keep: float, chunk: int | None = None):
        self.keep = keep
        self.chunk = chunk

    def kept(self, length: int) -> int:
        """Values that are kept of a chunk of this length."""
        return max(1, int(self.keep * length))

    def _nbytes(self, shape: tuple[int, ...]) -> int:
        return sum(
            4 * count * self.kept(length) + -(-count * self.kept(length) * index_bits(length) // 8)
            for _, count, length in self._runs(torch.Size(shape).numel())
        )

    def _encode(self, values: torch.Tensor, payload: torch.Tensor) -> None:
        position = 0
        flat = values.view(-1)
        for first, count, length in self._runs(flat.numel()):
            chunks = flat[first : first + count * length].view(count, length)
            places = chunks.abs().topk(self.kept(length), dim=1).indices.sort(dim=1).values
            kept = chunks.gather(1, places).flatten().view(torch.uint8)
            for part in (kept, pack_integers(places.flatten(), index_bits(length))):
                payload[position : position + len(part)] = part
                position += len(part)

    def _decode(self, payload: torch.Tensor, values: torch.Tensor) -> None:
        position = 0
        flat = values.view(-1).zero_()
        for first, count, length in self._runs(flat.numel()):
            kept, bits = count * self.kept(length), index_bits(length)
            # A copy, because words of the second run need not be aligned in the payload.
            numbers = payload[position : position + 4 * kept].clone().view(torch.float32)
            position += 4 * kept
            index_bytes = -(-kept * bits // 8)
            places = unpack_integers(payload[position : position + index_bytes], bits, kept)
            position += index_bytes
            chunks = flat[first : first + count * length].view(count, length)
            chunks.scatter_(1, places.view(count, -1), numbers.view(count, -1))

    def _runs(self, numel: int) -> list[tuple[int, int, int]]:
        """(first element, number of chunks, length of a chunk): full chunks, then the rest."""
        length = min(self.chunk or numel, numel)
        full, rest = divmod(numel, length)
        return [(0, full, length)] + ([(full * length, 1, rest)] if rest else [])
