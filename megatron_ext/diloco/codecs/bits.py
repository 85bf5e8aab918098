"""Small integers in and out of bytes, the first in the lowest bits."""

import math

import torch

# One element of this type is as wide as the values, or codes, of one byte.
_WIDE = {4: torch.float32, 8: torch.int64, 16: torch.complex128}


def pack_codes(codes: torch.Tensor, bits: int, out: torch.Tensor) -> None:
    """Pack uint8 codes of 2, 4 or 8 bits; `codes` fill all of `out`, which is uint8."""
    if bits == 8:
        out.copy_(codes)
    elif bits == 4:
        pairs = codes.view(torch.int16)  # 0x0B0A -> 0xBA
        out.copy_((pairs >> 4).bitwise_or_(pairs))
    else:
        fours = codes.view(torch.int32)  # 0x0D0C0B0A -> one byte
        packed = (fours >> 6).bitwise_or_(fours)
        out.copy_(packed.bitwise_or_(packed >> 12))


def byte_table(values: torch.Tensor, bits: int) -> torch.Tensor:
    """For each byte the `values` [2^bits] of the codes in it: [256] of one wide element each."""
    shifts = torch.arange(0, 8, bits, device=values.device)
    codes = torch.arange(256, device=values.device)[:, None] >> shifts & (2**bits - 1)
    table = values[codes]
    return table.view(_WIDE[table.shape[1] * table.element_size()]).flatten()


def look_up(table: torch.Tensor, packed: torch.Tensor, out: torch.Tensor) -> None:
    """Write what `byte_table` says of each byte to FP32 `out`, which may end within a byte."""
    per_byte = table.element_size() // out.element_size()
    whole = out.numel() // per_byte
    wide = out[: whole * per_byte].view(table.dtype)
    torch.index_select(table, 0, packed[:whole].int(), out=wide)
    if rest := out.numel() - whole * per_byte:
        last = table[packed[whole : whole + 1].int()].view(out.dtype)
        out[whole * per_byte :].copy_(last[:rest])


def index_bits(length: int) -> int:
    """Bits that tell the positions 0 … length − 1 apart."""
    return max(1, math.ceil(math.log2(length)))


def pack_integers(integers: torch.Tensor, bits: int) -> torch.Tensor:
    """Non-negative int64 [n] below 2^bits → uint8 [⌈n·bits / 8⌉]."""
    stream = (integers[:, None] >> torch.arange(bits, device=integers.device) & 1).flatten()
    padded = torch.nn.functional.pad(stream, (0, -stream.numel() % 8)).view(-1, 8)
    weights = 1 << torch.arange(8, device=integers.device)
    return (padded * weights).sum(1).to(torch.uint8)


def unpack_integers(packed: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The inverse of `pack_integers`: int64 [count]."""
    stream = (packed[:, None] >> torch.arange(8, device=packed.device) & 1).flatten()
    weights = 1 << torch.arange(bits, device=packed.device)
    return (stream[: count * bits].view(count, bits) * weights).sum(1)
