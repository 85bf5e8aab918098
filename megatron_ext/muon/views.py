"""Flat tensors and the shapes in them."""

from collections.abc import Sequence

import torch


def views(flat: torch.Tensor, shapes: Sequence[tuple[int, ...]]) -> list[torch.Tensor]:
    """Consecutive stretches of a flat tensor in the given shapes, which fill it."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    return [part.view(shape) for part, shape in zip(flat.split(sizes), shapes, strict=True)]


def total_numel(shapes: Sequence[tuple[int, ...]]) -> int:
    """Elements of all shapes together."""
    return sum(torch.Size(shape).numel() for shape in shapes)
