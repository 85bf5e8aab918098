"""Each codec as its definition reads, value by value in float64.

Slow and plain; the fast codecs are compared with it.
"""

import math

import torch


def round_trip(
    tensor: torch.Tensor,
    kind: str,
    bits: int | None = None,
    per_row: bool = False,
    keep: float | None = None,
    chunk: int | None = None,
) -> torch.Tensor:
    """decode(encode(tensor)) in float64; the options are those of `codecs.make`."""
    tensor = tensor.double()
    flat = tensor.flatten().tolist()
    if kind == "fp32":
        return tensor.clone()
    if kind == "bf16":
        return tensor.bfloat16().double()
    rows = tensor.shape[0] if per_row and tensor.dim() > 1 else 1
    length = chunk or len(flat) // rows
    groups = [flat[first : first + length] for first in range(0, len(flat), length)]
    if kind == "topk":
        decoded = [_topk(group, keep) for group in groups]
    elif kind == "linear":
        decoded = [_linear(group, 2**bits) for group in groups]
    else:
        decoded = [_statistical(group, 2**bits) for group in groups]
    values = [value for group in decoded for value in group]
    return torch.tensor(values, dtype=torch.float64).view(tensor.shape)


def _linear(values: list[float], levels: int) -> list[float]:
    least = min(values)
    width = (max(values) - least) / (levels - 1) or 1.0
    return [round((value - least) / width) * width + least for value in values]


def _statistical(values: list[float], levels: int) -> list[float]:
    mean = math.fsum(values) / len(values)
    centred = [value - mean for value in values]
    variance = math.fsum(c * c for c in centred) / max(1, len(values) - 1)
    width = 6 * math.sqrt(variance) / levels or 1.0
    codes = [min(max(round(c / width + levels / 2), 0), levels - 1) for c in centred]
    fallen: dict[int, list[float]] = {}
    for code, c in zip(codes, centred, strict=True):
        fallen.setdefault(code, []).append(c)
    level = {code: mean + math.fsum(those) / len(those) for code, those in fallen.items()}
    return [level[code] for code in codes]


def _topk(values: list[float], keep: float) -> list[float]:
    count = max(1, int(keep * len(values)))
    order = sorted(range(len(values)), key=lambda index: -abs(values[index]))
    kept = set(order[:count])
    return [value if index in kept else 0.0 for index, value in enumerate(values)]
