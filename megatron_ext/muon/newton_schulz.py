"""Newton–Schulz orthogonalisation of whole matrices, on emerging-optimizers' tables and steps.

Source: Muon (Jordan et al., 2024); the coefficient sets are emerging-optimizers'.
"""

import math

import torch
from emerging_optimizers.orthogonalized_optimizers import muon_utils

# Sets designed as a sequence end in a fixed point and keep their last triple; the others cycle.
_HOLD_LAST = {"polar_express", "cans"}

# Above this size a single matrix fills the processor and a batch only costs memory.
_LARGEST_BATCHED_NUMEL = 2048 * 2048


def coefficients_of(name: str, steps: int) -> list[tuple[float, float, float]]:
    """The ``steps`` triples (a, b, c) of a set: X ← aX + b(XXᵀ)X + c(XXᵀ)²X."""
    mode = "repeat_last" if name in _HOLD_LAST else "cycle"
    table = muon_utils._COEFFICIENT_SETS[name]
    return list(muon_utils.get_coefficient_iterator(steps, table, mode=mode))


def orthogonalize(
    matrix: torch.Tensor,
    steps: int = 5,
    coefficients: str = "quintic",
    dtype: torch.dtype = torch.bfloat16,
) -> torch.Tensor:
    """Approximate the orthogonal polar factor UVᵀ of a matrix by Newton–Schulz iteration.

    Args:
        matrix: [rows, cols], or a batch [n, rows, cols] treated matrix by matrix.
        steps: iterations; sets longer than this are cut, shorter ones go on as their design says.
        coefficients: ``quintic``, ``simple``, ``polar_express`` or ``cans``.
        dtype: arithmetic of the iteration; normalisation is always at least FP32.

    Returns:
        The shape and dtype of ``matrix``; a zero matrix gives zeros. Any finite scale is safe: the
        input is divided by its largest absolute value before its norm is taken.
    """
    if matrix.ndim == 3:
        rows, cols = matrix.shape[-2:]
        if rows * cols > _LARGEST_BATCHED_NUMEL:
            return torch.stack([orthogonalize(m, steps, coefficients, dtype) for m in matrix])
        step = muon_utils.batched_newton_schulz_step
    else:
        step = muon_utils.newton_schulz_step
    wide = matrix.mT if matrix.size(-2) > matrix.size(-1) else matrix
    x = normalize(wide.to(torch.promote_types(matrix.dtype, torch.float32))).to(dtype)
    for a, b, c in coefficients_of(coefficients, steps):
        x = step(x, a, b, c)
    x = x.to(matrix.dtype)
    return x.mT if wide is not matrix else x


def normalize(matrix: torch.Tensor) -> torch.Tensor:
    """Divide by the Frobenius norm without overflow or underflow; zero stays zero."""
    largest = matrix.abs().amax(dim=(-2, -1), keepdim=True)
    # Where the largest value is subnormal its reciprocal overflows: divide, never multiply.
    scaled = matrix / torch.where(largest > 0, largest, torch.ones_like(largest))
    return scaled / torch.linalg.matrix_norm(scaled, keepdim=True).clamp_min(1.0)


def update_scale(shape: tuple[int, int], mode: str) -> float:
    """Factor on the orthogonal update of a [rows, cols] = [fan_out, fan_in] matrix.

    ``unit_rms_norm``: √(rows/cols) (MuLoCo's spectral norm); ``spectral``: √max(rows, cols);
    ``shape_scaling``: √max(1, rows/cols) (Jordan); ``match_adamw``: 0.2·√max(rows, cols)
    (Moonlight, arXiv 2502.16982, eq. 4).
    """
    rows, cols = shape
    match mode:
        case "unit_rms_norm":
            return math.sqrt(rows / cols)
        case "spectral":
            return math.sqrt(max(rows, cols))
        case "shape_scaling":
            return math.sqrt(max(1.0, rows / cols))
        case "match_adamw":
            return 0.2 * math.sqrt(max(rows, cols))
    raise ValueError(f"scale={mode!r}: unit_rms_norm, spectral, shape_scaling or match_adamw")


def newton_schulz_flops(shape: tuple[int, int], steps: int) -> int:
    """Multiply-adds ×2 of one orthogonalisation: per step m²n, m³ and m²n with m ≤ n."""
    m, n = min(shape), max(shape)
    return steps * 2 * m * m * (2 * n + m)
