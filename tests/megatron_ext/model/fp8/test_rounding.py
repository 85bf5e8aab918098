"""Rounding to FP8 against the formats and recipes as they are written down, value by value."""

import math
from bisect import bisect_left

import pytest
import torch

from megatron_ext.model.fp8.config import Fp8Config
from megatron_ext.model.fp8.emulation import _Product
from megatron_ext.model.fp8.rounding import ROLES, Blocks, Delayed, Tensorwise, make_recipe

LENGTH = {"blockwise": 128, "mxfp8": 32}


def representable(role: str, fp8: Fp8Config) -> list[float]:
    """The numbers ≥ 0 of E4M3 (bias 7, up to 448) or E5M2 (bias 15, up to 57,344)."""
    wide = fp8.format == "hybrid" and role == "gradient"
    exponent_bits, mantissa_bits, bias = (5, 2, 15) if wide else (4, 3, 7)
    steps = 2**mantissa_bits
    subnormal = [m / steps * 2.0 ** (1 - bias) for m in range(steps)]
    normal = [
        (1 + m / steps) * 2.0 ** (e - bias)
        for e in range(1, 2**exponent_bits)
        for m in range(steps)
    ]
    largest = 57344.0 if wide else 448.0
    return [number for number in subnormal + normal if number <= largest]


def nearest(value: float, numbers: list[float]) -> float:
    """Nearest, half to even; an even mantissa stands at an even place. Too large saturates."""
    size = abs(value)
    above = min(bisect_left(numbers, size), len(numbers) - 1)
    below = max(above - 1, 0)
    low, high = numbers[below], numbers[above]
    if high - size == size - low:
        found = numbers[below] if below % 2 == 0 else numbers[above]
    else:
        found = high if high - size < size - low else low
    return math.copysign(found, value)


def by_hand(values: torch.Tensor, role: str, along: int, fp8: Fp8Config) -> torch.Tensor:
    numbers = representable(role, fp8)
    rows, cols = values.shape
    size = [rows, cols]
    if fp8.recipe in LENGTH:
        size = [1, 1]
        size[along] = LENGTH[fp8.recipe]
        if role == "weight" and fp8.recipe == "blockwise":
            size = [128, 128]
    found = torch.empty_like(values)
    for row in range(0, rows, size[0]):
        for col in range(0, cols, size[1]):
            place = (slice(row, row + size[0]), slice(col, col + size[1]))
            amax = values[place].abs().max()
            scale = torch.tensor(numbers[-1]) / amax if amax else torch.tensor(1.0)
            if fp8.recipe in LENGTH and amax:
                scale = torch.tensor(2.0 ** math.floor(math.log2(scale.item())))
            coded = [nearest(v, numbers) for v in (values[place] * scale).flatten().tolist()]
            found[place] = torch.tensor(coded).view(values[place].shape) / scale
    return found


RECIPES = ["tensorwise", "blockwise", "mxfp8"]


@pytest.mark.parametrize("role", ["input", "weight", "gradient"])
@pytest.mark.parametrize("along", [0, 1])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("number_format", ["hybrid", "e4m3"])
def test_rounding_is_bit_for_bit_the_written_definition(number_format, recipe, along, role):
    fp8 = Fp8Config(format=number_format, recipe=recipe)
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(150, 200, generator=generator)
    # Blocks of very different sizes, zeros, and numbers on the edge between two codes.
    values *= 10.0 ** torch.randint(-6, 3, (150, 1), generator=generator)
    values[:40, :64] = 0
    values[100] = torch.arange(200) / 16
    found = make_recipe(fp8, None).round(role, values, along)
    assert torch.equal(found, by_hand(values, role, along, fp8))


def test_values_beyond_the_scale_of_earlier_steps_saturate():
    delayed = Delayed(Fp8Config(format="hybrid", recipe="delayed"))
    values = torch.tensor([[1.0, 500.0, -1e6, 0.3]])
    assert delayed.round("input", values, 1).tolist() == [[1.0, 448.0, -448.0, 0.3125]]
    assert delayed.round("gradient", values, 1)[0, 2] == -57344


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
def test_delayed_scale_follows_the_history(algorithm):
    fp8 = Fp8Config(format="hybrid", recipe="delayed", amax_history=2, amax_algorithm=algorithm)
    delayed = Delayed(fp8)
    expected = {"max": [448 / 8, 448 / 8, 448 / 2, 448 / 2], "most_recent": [56, 448, 224, 224]}
    for amax, scale in zip([8.0, 1.0, 2.0, math.inf], expected[algorithm], strict=True):
        delayed.round("input", torch.tensor([[amax, -0.5]]), 1, record=True)
        delayed.finish_step()
        assert delayed.scale.tolist() == [scale, 1.0, 1.0]  # nothing was seen of the others
    delayed.round("input", torch.tensor([[1e9]]), 1)
    assert delayed.largest.tolist() == [0, 0, 0]  # evaluation leaves no trace


def test_scales_of_earlier_steps_stay_on_the_cpu_when_the_layer_moves():
    """Where NCCL cannot reach them; the meta device also refuses any wait for a value."""
    layer = torch.nn.Module()
    layer.recipe = make_recipe(Fp8Config(format="hybrid", recipe="delayed"), None)
    layer.to("meta")
    values = torch.empty(4, 16, device="meta")
    for role in ROLES:
        assert layer.recipe.round(role, values, 1, record=True).shape == values.shape
    layer.recipe.finish_step()
    for state in (layer.recipe.largest, layer.recipe.history, layer.recipe.scale):
        assert state.device.type == "meta"
    assert not layer.state_dict()  # checkpoints hold them by logical name


def test_zeros_stay_zeros_and_tiny_values_make_no_nan():
    for recipe in (
        Tensorwise(Fp8Config(format="e4m3"), None),
        Blocks(Fp8Config(format="e4m3"), 32, square_weights=False),
    ):
        values = torch.zeros(32, 32)
        assert torch.equal(recipe.round("input", values, 1), values)
        values[0, 0] = 1e-45
        assert recipe.round("input", values, 1).isfinite().all()


@pytest.mark.parametrize("name", [*RECIPES, "delayed"])
def test_every_product_has_operands_rounded_along_its_sum(name):
    fp8 = Fp8Config(format="hybrid", recipe=name)
    recipe = make_recipe(fp8, None)
    generator = torch.Generator().manual_seed(1)
    x, weight, dy = (
        torch.randn(shape, generator=generator) for shape in [(160, 96), (130, 96), (160, 130)]
    )
    x.requires_grad_()
    weight.requires_grad_()
    y = _Product.apply(x, weight, recipe, True)
    y.backward(dy)
    with torch.no_grad():
        q = recipe.round
        expected = (
            q("input", x, 1) @ q("weight", weight, 1).T,
            q("gradient", dy, 1) @ q("weight", weight, 0),
            q("gradient", dy, 0).T @ q("input", x, 0),
        )
    for found, right in zip((y, x.grad, weight.grad), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-5)
    exact = x @ weight.T
    error = (y - exact).norm() / exact.norm()
    assert 0.005 < error < 0.08  # it does round
