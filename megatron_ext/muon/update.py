"""Muon's update of matrices of equal shape that lie here whole."""

import torch

from megatron_ext.muon.config import OptimizerConfig
from megatron_ext.muon.newton_schulz import Kernel, batch_size, kernel_of, newton_schulz
from megatron_ext.muon.routing import Route

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_NORMUON_EPSILON = 1e-8


def muon_step(
    masters: torch.Tensor,
    direction: torch.Tensor,
    moment: torch.Tensor | None,
    lr: float,
    route: Route,
    config: OptimizerConfig,
) -> None:
    """W ← (1 − lr·wd)·W − lr·scale·orthogonalize(direction), in place.

    Args:
        masters, direction: [n, rows, cols], FP32, of matrices that share the route.
        moment: [n, rows, 1], NorMuon's second moment, or None.
        lr: before the route's factor.
    """
    part = route.part(masters.shape[1:])
    masters, direction = masters.view(-1, *part), direction.view(-1, *part)
    if moment is not None:
        moment = moment.view(-1, part[0], 1)
    lr *= route.lr_factor
    together = min(len(masters), batch_size(part, masters.device))
    for first in range(0, len(masters), together):
        some = slice(first, first + together)
        orthogonal = _orthogonalize(direction[some], config)
        if moment is not None:
            orthogonal = _even_rows(orthogonal.float(), moment[some], config.normuon_beta2)
        decay(masters[some], orthogonal, lr * route.weight_decay, config.cautious_decay)
        masters[some].add_(orthogonal, alpha=-lr * route.scale)


def kernel(
    shape: tuple[int, int, int], route: Route, config: OptimizerConfig, device: torch.device
) -> Kernel:
    """What computes `muon_step`'s products for [n, rows, cols] matrices that share the route."""
    part = route.part(shape[1:])
    together = min(shape[0] * route.heads, batch_size(part, device))
    return kernel_of((together, *part) if together > 1 else part, config.syrk)


def decay(weight: torch.Tensor, direction: torch.Tensor, amount: float, cautious: bool) -> None:
    """Shrink a weight by `amount` of itself, in place.

    Cautiously only where the step against `direction` shrinks it too (arXiv 2510.12402, eq. 2).
    """
    if amount == 0:
        return
    if cautious:
        weight.sub_(weight * (direction * weight >= 0), alpha=amount)
    else:
        weight.mul_(1 - amount)


def _orthogonalize(matrices: torch.Tensor, config: OptimizerConfig) -> torch.Tensor:
    # A batch of one is slower than a matrix alone.
    alone = len(matrices) == 1
    orthogonal = newton_schulz(
        matrices[0] if alone else matrices,
        config.newton_schulz_steps,
        config.coefficients,
        _DTYPES[config.arithmetic],
        config.syrk,
    )
    return orthogonal[None] if alone else orthogonal


def _even_rows(orthogonal: torch.Tensor, moment: torch.Tensor, beta2: float) -> torch.Tensor:
    """Divide rows by the root of their running mean square, keep the norm of the whole.

    NorMuon (arXiv 2510.05491, algorithm 1); its factor that fixes the size of the update is here
    the norm before, so that `optimizer.scale` means the same with and without.
    """
    moment.lerp_(orthogonal.square().mean(-1, keepdim=True), 1 - beta2)
    evened = orthogonal * moment.clamp_min(_NORMUON_EPSILON).rsqrt()
    before, after = (torch.linalg.matrix_norm(each, keepdim=True) for each in (orthogonal, evened))
    return evened * (before / after.clamp_min(_NORMUON_EPSILON))
