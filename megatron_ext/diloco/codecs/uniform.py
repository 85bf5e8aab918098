"""Codecs with equally wide bins: linear over the range, statistical over ±3 standard deviations.

Both are those of MuLoCo (arXiv 2505.23725) as its published code defines them; the side information
differs in form (the bin's width instead of the maximum, whole levels instead of mean and offsets),
not in what it decodes to.
"""

from collections.abc import Iterator

import torch

from megatron_ext.diloco.codecs.base import CHUNK_NUMEL, Codec
from megatron_ext.diloco.codecs.bits import byte_table, look_up, pack_codes

# Standard deviations that the statistical bins span.
_RANGE = 6.0


class Uniform(Codec):
    """Codes of 2, 4 or 8 bits, with side information for each group: a row, or all values.

    A vector is one row. Rounding is half to even.
    """

    words: int  # FP32 words of side information for a group

    def __init__(self, bits: int, per_row: bool):
        self.bits = bits
        self.levels = 2**bits
        self.per_row = per_row
        self.grain = "row" if per_row else "tensor"

    def _nbytes(self, shape: tuple[int, ...]) -> int:
        groups, _ = self._grouped(shape)
        return 4 * self.words * groups + -(-torch.Size(shape).numel() * self.bits // 8)

    def _encode(self, values: torch.Tensor, payload: torch.Tensor) -> None:
        grouped = values.view(self._grouped(values.shape))
        side, codes = self._split(payload, len(grouped))
        scale = self._measure(grouped)
        per_byte = 8 // self.bits
        for rows, columns, first in self._chunks(grouped):
            chunk = grouped[rows, columns]
            binned = torch.zeros(
                -(-chunk.numel() // per_byte) * per_byte, dtype=torch.uint8, device=values.device
            )
            binned[: chunk.numel()].view(chunk.shape).copy_(self._bin(chunk, scale, rows))
            begin = first // per_byte
            pack_codes(binned, self.bits, codes[begin : begin + len(binned) // per_byte])
        side.copy_(self._side(scale))

    def _decode(self, payload: torch.Tensor, values: torch.Tensor) -> None:
        grouped = values.view(self._grouped(values.shape))
        side, codes = self._split(payload, len(grouped))
        names = torch.arange(self.levels, dtype=torch.float32, device=values.device)
        table = byte_table(names if self.per_row else self._levels(side[0], names), self.bits)
        for rows, columns, first in self._chunks(grouped):
            chunk = grouped[rows, columns]
            look_up(table, codes[first * self.bits // 8 :], chunk.view(-1))
            if self.per_row:
                self._place(chunk, side[rows])

    def _grouped(self, shape: tuple[int, ...]) -> tuple[int, int]:
        numel = torch.Size(shape).numel()
        rows = shape[0] if self.per_row and len(shape) > 1 else 1
        return rows, numel // rows

    def _split(self, payload: torch.Tensor, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Side information [groups, words], and codes."""
        side_bytes = 4 * self.words * groups
        return payload[:side_bytes].view(torch.float32).view(groups, self.words), payload[
            side_bytes:
        ]

    def _chunks(self, grouped: torch.Tensor) -> Iterator[tuple[slice, slice, int]]:
        """Rows, columns and first element of stretches that begin at whole bytes."""
        groups, length = grouped.shape
        if groups == 1:
            for first in range(0, length, CHUNK_NUMEL):
                yield slice(0, 1), slice(first, first + CHUNK_NUMEL), first
            return
        step = max(8, CHUNK_NUMEL // length // 8 * 8)
        for row in range(0, groups, step):
            yield slice(row, row + step), slice(None), row * length

    def _measure(self, grouped: torch.Tensor) -> dict[str, torch.Tensor]:
        """What places the bins, each [groups, 1]."""
        raise NotImplementedError

    def _bin(
        self, chunk: torch.Tensor, scale: dict[str, torch.Tensor], rows: slice
    ) -> torch.Tensor:
        """Codes of a chunk, as whole floats."""
        raise NotImplementedError

    def _side(self, scale: dict[str, torch.Tensor]) -> torch.Tensor:
        """The side information [groups, words]."""
        raise NotImplementedError

    def _levels(self, side: torch.Tensor, names: torch.Tensor) -> torch.Tensor:
        """Decoded values [levels] of a group whose side information is `side` [words]."""
        raise NotImplementedError

    def _place(self, codes: torch.Tensor, side: torch.Tensor) -> None:
        """Replace codes [rows, columns] in place by values; `side` is [rows, words]."""
        raise NotImplementedError


class Linear(Uniform):
    """Bins from minimum to maximum: s = (max − min)/(n − 1); code·s + min."""

    words = 2

    def _measure(self, grouped: torch.Tensor) -> dict[str, torch.Tensor]:
        # Two passes, each ten times as fast as torch.aminmax over a dimension.
        least, most = grouped.amin(1, keepdim=True), grouped.amax(1, keepdim=True)
        width = (most - least) / (self.levels - 1)
        return {"least": least, "width": torch.where(width == 0, 1.0, width)}

    def _bin(
        self, chunk: torch.Tensor, scale: dict[str, torch.Tensor], rows: slice
    ) -> torch.Tensor:
        codes = (chunk - scale["least"][rows]).div_(scale["width"][rows]).round_()
        # Rounding errors can carry the maximum past the last bin.
        return codes.clamp_(max=self.levels - 1)

    def _side(self, scale: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.cat([scale["least"], scale["width"]], dim=1)

    def _levels(self, side: torch.Tensor, names: torch.Tensor) -> torch.Tensor:
        return names * side[1] + side[0]

    def _place(self, codes: torch.Tensor, side: torch.Tensor) -> None:
        codes.mul_(side[:, 1:]).add_(side[:, :1])


class Statistical(Uniform):
    """Bins of 6σ/n around the mean, each decoded to the mean of the values that fell in it."""

    def __init__(self, bits: int, per_row: bool):
        super().__init__(bits, per_row)
        self.words = self.levels

    def _measure(self, grouped: torch.Tensor) -> dict[str, torch.Tensor]:
        groups, length = grouped.shape
        mean = grouped.mean(1, keepdim=True)
        squares = torch.zeros(groups, 1, dtype=torch.float64, device=grouped.device)
        for rows, columns, _ in self._chunks(grouped):
            centred = grouped[rows, columns] - mean[rows]
            squares[rows] += torch.linalg.vector_norm(centred, dim=1, keepdim=True).double() ** 2
        width = (squares / max(1, length - 1)).sqrt().float() * (_RANGE / self.levels)
        width = torch.where(width.isfinite() & (width > 0), width, 1.0)
        fallen = torch.zeros(2, groups, self.levels, dtype=torch.float64, device=grouped.device)
        return {"mean": mean, "width": width, "sums": fallen[0], "counts": fallen[1]}

    def _bin(
        self, chunk: torch.Tensor, scale: dict[str, torch.Tensor], rows: slice
    ) -> torch.Tensor:
        centred = chunk - scale["mean"][rows]
        codes = (centred / scale["width"][rows]).add_(self.levels / 2).round_()
        codes.clamp_(0, self.levels - 1)
        bins = codes.long()
        sums = torch.zeros(len(chunk), self.levels, device=chunk.device)
        scale["sums"][rows] += sums.scatter_add(1, bins, centred)
        ones = torch.ones((), device=chunk.device).expand(chunk.shape)
        scale["counts"][rows] += sums.scatter_add(1, bins, ones)
        return codes

    def _side(self, scale: dict[str, torch.Tensor]) -> torch.Tensor:
        return (scale["sums"] / scale["counts"].clamp(min=1) + scale["mean"]).float()

    def _levels(self, side: torch.Tensor, names: torch.Tensor) -> torch.Tensor:
        return side

    def _place(self, codes: torch.Tensor, side: torch.Tensor) -> None:
        codes.copy_(side.gather(1, codes.long()))
