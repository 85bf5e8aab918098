"""Outer optimizers: how the anchor moves, given the mean pseudogradient."""

from collections.abc import Sequence

import torch


class NesterovSGD:
    """B ← μB + Δ; θ ← θ − η·(Δ + μB), as in DiLoCo (arXiv 2311.08105) and MuLoCo (2505.23725).

    η = 1, μ = 0 moves the anchor to the mean of the replicas. With one replica this is SNOO
    (arXiv 2510.15830), and Lookahead where μ = 0.

    Attributes:
        buffers: B, one tensor for each of the anchor's; zero until the first step.
    """

    def __init__(self, lr: float, momentum: float):
        self.lr = lr
        self.momentum = momentum
        self.buffers: list[torch.Tensor] = []

    def prepare(self, anchor: Sequence[torch.Tensor]) -> None:
        """Allocate the buffers, for instance to load a checkpoint into them."""
        if not self.buffers:
            self.buffers = [torch.zeros_like(tensor) for tensor in anchor]

    @torch.no_grad()
    def step(self, anchor: Sequence[torch.Tensor], pseudogradient: Sequence[torch.Tensor]) -> None:
        """Move the anchor in place; tensor by tensor of equal shapes."""
        self.prepare(anchor)
        for theta, delta, buffer in zip(anchor, pseudogradient, self.buffers, strict=True):
            buffer.mul_(self.momentum).add_(delta)
            theta.sub_(delta, alpha=self.lr).sub_(buffer, alpha=self.lr * self.momentum)
