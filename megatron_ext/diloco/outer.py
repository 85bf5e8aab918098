"""Outer optimizers: how the anchor moves, given the mean pseudogradient.

Each takes lists of tensors, changes the anchor in place and keeps its state by kind in `state`, one
tensor for each of the anchor's; `prepare` allocates it, for instance to load a checkpoint into it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from megatron_ext.blocks import Block
from megatron_ext.diloco.config import OuterConfig
from megatron_ext.model.logical import kind_of
from megatron_ext.muon.newton_schulz import orthogonalize, update_scale

Tensors = Sequence[torch.Tensor]


class OuterOptimizer(ABC):
    """What the outer loop needs of one.

    Attributes:
        lr, momentum: may change from step to step.
        steps: taken so far.
        kinds: names of its state in checkpoints.
        state: tensors by kind; zero until the first step.
    """

    kinds: tuple[str, ...] = ("outer_momentum",)

    def __init__(self, lr: float, momentum: float = 0.0):
        self.lr = lr
        self.momentum = momentum
        self.steps = 0
        self.state: dict[str, list[torch.Tensor]] = {}

    def prepare(self, anchor: Tensors) -> None:
        """Allocate the state."""
        if not self.state:
            self.state = {kind: [torch.zeros_like(t) for t in anchor] for kind in self.kinds}

    @torch.no_grad()
    def step(self, anchor: Tensors, pseudogradient: Tensors) -> None:
        """Move the anchor in place; tensor by tensor of equal shapes."""
        self.prepare(anchor)
        self.steps += 1
        buffers = zip(*self.state.values(), strict=True) if self.kinds else [()] * len(anchor)
        for theta, delta, own in zip(anchor, pseudogradient, buffers, strict=True):
            self._move(theta, delta, *own)

    @abstractmethod
    def _move(self, theta: torch.Tensor, delta: torch.Tensor, *state: torch.Tensor) -> None:
        """Move one tensor."""


class NesterovSGD(OuterOptimizer):
    """B ← μB + Δ; θ ← θ − η·(Δ + μB), as in DiLoCo (arXiv 2311.08105) and MuLoCo (2505.23725).

    η = 1, μ = 0 moves the anchor to the mean of the replicas. With one replica this is SNOO
    (arXiv 2510.15830), and Lookahead where μ = 0.
    """

    def _move(self, theta: torch.Tensor, delta: torch.Tensor, *state: torch.Tensor) -> None:
        (buffer,) = state
        buffer.mul_(self.momentum).add_(delta)
        theta.sub_(delta, alpha=self.lr).sub_(buffer, alpha=self.lr * self.momentum)


class SGD(OuterOptimizer):
    """B ← μB + Δ; θ ← θ − ηB."""

    def _move(self, theta: torch.Tensor, delta: torch.Tensor, *state: torch.Tensor) -> None:
        (buffer,) = state
        buffer.mul_(self.momentum).add_(delta)
        theta.sub_(buffer, alpha=self.lr)


class Mean(OuterOptimizer):
    """θ ← θ − Δ: the anchor becomes the mean of the replicas. Keeps no state."""

    kinds = ()

    def __init__(self) -> None:
        super().__init__(lr=1.0)

    def _move(self, theta: torch.Tensor, delta: torch.Tensor, *state: torch.Tensor) -> None:
        theta.sub_(delta)


class AdamW(OuterOptimizer):
    """AdamW on pseudogradients (Loshchilov & Hutter, 2019, algorithm 2), without decay.

    The first moment's decay is the momentum.
    """

    kinds = ("outer_momentum", "outer_square")

    def __init__(self, lr: float, momentum: float, beta2: float, epsilon: float):
        super().__init__(lr, momentum)
        self._beta2 = beta2
        self._epsilon = epsilon

    def _move(self, theta: torch.Tensor, delta: torch.Tensor, *state: torch.Tensor) -> None:
        first, second = state
        first.lerp_(delta, 1 - self.momentum)
        second.mul_(self._beta2).addcmul_(delta, delta, value=1 - self._beta2)
        scale = (second / (1 - self._beta2**self.steps)).sqrt_().add_(self._epsilon)
        theta.addcdiv_(first, scale, value=-self.lr / (1 - self.momentum**self.steps))


class Muon(NesterovSGD):
    """Muon on the pseudogradients of matrices: B ← μB + Δ; θ ← θ − η·scale·orthogonalize(B).

    Embeddings, head and norms keep Nesterov, with a learning rate of their own. The scale is that
    of the inner optimizer's default, √(rows / columns).
    """

    def __init__(self, lr: float, momentum: float, matrix_lr: float, are_matrices: Sequence[bool]):
        """`matrix_lr` keeps its ratio to the learning rate where that one changes.

        `are_matrices`: for each of the anchor's tensors, whether it is orthogonalised.
        """
        super().__init__(lr, momentum)
        self._matrix_lr_ratio = matrix_lr / lr
        self._are_matrices = are_matrices

    @torch.no_grad()
    def step(self, anchor: Tensors, pseudogradient: Tensors) -> None:
        self.prepare(anchor)
        self.steps += 1
        (buffers,) = self.state.values()
        for theta, delta, buffer, is_matrix in zip(
            anchor, pseudogradient, buffers, self._are_matrices, strict=True
        ):
            if not is_matrix:
                self._move(theta, delta, buffer)
                continue
            buffer.mul_(self.momentum).add_(delta)
            update = orthogonalize(buffer, dtype=torch.float32)
            scale = update_scale(tuple(theta.shape), "unit_rms_norm")
            theta.sub_(update, alpha=self.lr * self._matrix_lr_ratio * scale)


def make(config: OuterConfig, units: Sequence[Block]) -> OuterOptimizer:
    """The outer optimizer that the configuration asks for."""
    lr, momentum = config.lr, config.momentum
    makers: dict[str, Callable[[], OuterOptimizer]] = {
        "nesterov": lambda: NesterovSGD(lr, momentum),
        "sgd": lambda: SGD(lr, momentum),
        "adamw": lambda: AdamW(lr, momentum, config.adam_beta2, config.adam_epsilon),
        "muon": lambda: Muon(lr, momentum, config.matrix_lr, [_is_matrix(unit) for unit in units]),
        "mean": Mean,
    }
    return makers[config.optimizer]()


def _is_matrix(unit: Block) -> bool:
    return kind_of(unit.name) == "matrix" and min(unit.shape) > 1
