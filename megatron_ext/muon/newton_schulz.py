"""Newton–Schulz orthogonalisation of whole matrices, on emerging-optimizers' tables and steps.

Source: Muon (Jordan et al., 2024); the coefficient sets are emerging-optimizers'.
"""

import math
from typing import Literal

import torch
from emerging_optimizers import triton_kernels
from emerging_optimizers.orthogonalized_optimizers import muon_utils

from megatron_ext.errors import ConfigError

# Sets designed as a sequence end in a fixed point and keep their last triple; the others cycle.
_HOLD_LAST = {"polar_express", "cans"}

# Above this size a single matrix fills the processor, and a batch only costs memory.
_LARGEST_BATCHED_NUMEL = {"cpu": 256 * 256, "cuda": 2048 * 2048}

# Rows that the symmetric kernel loads must be multiples of 16 bytes.
_SYRK_MULTIPLE = 8

# GPUs for which emerging-optimizers vouches for that kernel.
_SYRK_CAPABILITIES = ((8, 0), (9, 0), (10, 0), (10, 3))

Kernel = Literal["plain", "batched", "syrk"]

_STEPS = {
    "plain": muon_utils.newton_schulz_step,
    "batched": muon_utils.batched_newton_schulz_step,
    "syrk": muon_utils.newton_schulz_step_tsyrk,
}

# Bounds the memory of a batch, about 16 bytes for each element.
_BATCH_NUMEL = 2**26


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
    return newton_schulz(matrix, steps, coefficients, dtype).to(matrix.dtype)


def newton_schulz(
    matrix: torch.Tensor, steps: int, coefficients: str, dtype: torch.dtype, syrk: bool = False
) -> torch.Tensor:
    """As `orthogonalize`, with the result left in `dtype`, contiguous.

    `syrk`: compute only half of each symmetric product, where `kernel_of` says so; `refuse_syrk`
    tells which machines cannot.
    """
    x = normalize(matrix).to(dtype)
    tall = matrix.size(-2) > matrix.size(-1)
    if tall:
        x = x.mT
    # The products are slower on a transposed view than the one copy.
    x = x.contiguous()
    step = _STEPS[kernel_of(tuple(x.shape), syrk)]
    for a, b, c in coefficients_of(coefficients, steps):
        x = step(x, a, b, c)
    return x.mT.contiguous() if tall else x


def kernel_of(shape: tuple[int, ...], syrk: bool) -> Kernel:
    """What computes the products for a matrix [rows, cols], or for a batch [n, rows, cols].

    emerging-optimizers' symmetric kernel takes a single BF16 matrix, and loads rows of whole
    multiples of 16 bytes: other matrices have plain products also where `syrk` asks for it.
    """
    if len(shape) == 3:
        return "batched"
    return "syrk" if syrk and all(size % _SYRK_MULTIPLE == 0 for size in shape) else "plain"


def refuse_syrk(device: torch.device) -> None:
    """Raise ConfigError where the symmetric kernel cannot run."""
    if device.type != "cuda":
        raise ConfigError("optimizer.syrk=true needs a GPU; use optimizer.syrk=false")
    capability = torch.cuda.get_device_capability(device)
    if not triton_kernels.HAS_TRITON_340 or capability not in _SYRK_CAPABILITIES:
        raise ConfigError(
            "optimizer.syrk=true needs Triton 3.4 and a GPU of compute capability 8.0, 9.0, 10.0 "
            f"or 10.3; this one has {capability[0]}.{capability[1]}; use optimizer.syrk=false"
        )


def normalize(matrix: torch.Tensor) -> torch.Tensor:
    """Divide by the Frobenius norm, in FP32 at least; zero stays zero, nothing over- or underflows.

    Works matrix by matrix on a batch.
    """
    matrix = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    largest = matrix.abs().amax(dim=(-2, -1), keepdim=True)
    # Where the largest value is subnormal its reciprocal overflows: divide, never multiply.
    scaled = matrix / torch.where(largest > 0, largest, 1)
    return scaled.div_(torch.linalg.matrix_norm(scaled, keepdim=True).clamp_min_(1))


def batch_size(shape: tuple[int, int], device: torch.device) -> int:
    """How many matrices of this shape to orthogonalise at once."""
    numel = shape[0] * shape[1]
    if numel > _LARGEST_BATCHED_NUMEL[device.type]:
        return 1
    return max(1, _BATCH_NUMEL // numel)


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
