"""Newton–Schulz against float64, on benign and on hostile matrices."""

import pytest
import torch

from megatron_ext.errors import ConfigError
from megatron_ext.muon import orthogonalize
from megatron_ext.muon import reference as slow
from megatron_ext.muon.config import OptimizerConfig
from megatron_ext.muon.newton_schulz import newton_schulz, refuse_syrk, update_scale

SHAPES = [(64, 64), (96, 64), (64, 176), (7, 200), (200, 3)]


def cosine(left: torch.Tensor, right: torch.Tensor) -> float:
    return torch.cosine_similarity(left.double().flatten(), right.flatten(), dim=0).item()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    ("coefficients", "dtype", "least"),
    [
        ("quintic", torch.float32, 0.9999),
        ("simple", torch.float32, 0.9999),
        ("polar_express", torch.float32, 0.9999),
        ("cans", torch.float32, 0.9999),
        ("quintic", torch.bfloat16, 0.999),
        ("simple", torch.bfloat16, 0.999),
        ("polar_express", torch.bfloat16, 0.999),
    ],
)
@pytest.mark.parametrize("steps", [5, 8])
def test_gaussian_matrices_follow_the_float64_iteration(shape, coefficients, dtype, least, steps):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    update = orthogonalize(matrix, steps, coefficients, dtype)
    assert update.shape == matrix.shape
    assert update.dtype == matrix.dtype
    assert cosine(update, slow.orthogonalize(matrix, steps, coefficients)) >= least


@pytest.mark.parametrize("shape", [(96, 64), (64, 96)], ids=str)
def test_singular_values_come_out_near_one(shape):
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    values = torch.linalg.svdvals(orthogonalize(matrix, dtype=torch.float32))
    assert values.min() > 0.9
    assert values.max() < 1.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_gives_what_its_matrices_give_alone(dtype):
    batch = torch.randn(5, 48, 32, generator=torch.Generator().manual_seed(3))
    alone = torch.stack([orthogonalize(matrix, dtype=dtype) for matrix in batch])
    assert torch.equal(orthogonalize(batch, dtype=dtype), alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_zero_matrix_gives_a_zero_update(dtype):
    assert torch.equal(orthogonalize(torch.zeros(8, 5), dtype=dtype), torch.zeros(8, 5))


def rank_one() -> torch.Tensor:
    return torch.outer(torch.linspace(-1, 1, 40), torch.linspace(1, 2, 24))


def ill_conditioned() -> torch.Tensor:
    generator = torch.Generator().manual_seed(4)
    left, _ = torch.linalg.qr(torch.randn(40, 24, generator=generator, dtype=torch.float64))
    right, _ = torch.linalg.qr(torch.randn(24, 24, generator=generator, dtype=torch.float64))
    return (left * torch.logspace(0, -6, 24, dtype=torch.float64) @ right).float()


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e18, 1e30])
@pytest.mark.parametrize("matrix", [rank_one, ill_conditioned], ids=lambda make: make.__name__)
def test_hostile_matrices_at_any_scale_give_the_update_of_the_scaled_iteration(matrix, scale):
    hostile = matrix() * scale
    update = orthogonalize(hostile, dtype=torch.float32)
    assert update.isfinite().all()
    expected = slow.orthogonalize(hostile, 5, "quintic")
    torch.testing.assert_close(update.double(), expected, rtol=1e-3, atol=1e-4)
    assert orthogonalize(hostile).isfinite().all()


@pytest.mark.parametrize(
    ("mode", "scale"),
    [("unit_rms_norm", 2.0), ("spectral", 20.0), ("shape_scaling", 2.0), ("match_adamw", 4.0)],
)
def test_update_scales(mode, scale):
    assert update_scale((400, 100), mode) == pytest.approx(scale)


def test_cans_in_bf16_is_refused_because_rounding_makes_it_diverge():
    with pytest.raises(ConfigError, match=r"optimizer\.coefficients=cans .* use fp32"):
        OptimizerConfig(lr=0.1, coefficients="cans", arithmetic="bf16")
    matrix = torch.randn(96, 64, generator=torch.Generator().manual_seed(1))
    assert cosine(orthogonalize(matrix, 8, "cans"), slow.orthogonalize(matrix, 8, "cans")) < 0.5


def test_the_symmetric_kernel_is_refused_where_it_cannot_run():
    with pytest.raises(ConfigError, match=r"optimizer\.syrk=true needs a GPU"):
        refuse_syrk(torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"optimizer\.syrk=true is a bf16 kernel"):
        OptimizerConfig(lr=0.1, syrk=True, arithmetic="fp32")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("shape", [(512, 512), (512, 1408), (1408, 512), (100, 100)], ids=str)
def test_the_symmetric_kernel_gives_the_update_of_plain_products(shape):
    matrix = torch.randn(shape, device="cuda")
    update = newton_schulz(matrix, 5, "quintic", torch.bfloat16, syrk=True)
    assert cosine(update.cpu(), slow.orthogonalize(matrix.cpu(), 5, "quintic")) >= 0.999
