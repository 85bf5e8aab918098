"""FLOPs of training in closed form, and model FLOPs utilisation."""

import pytest

from megatron_ext.model.config import ModelConfig
from megatron_ext.model.fp8.config import Fp8Config
from pretrain.config import load
from pretrain.flops import (
    DEVICES,
    device_of,
    flops_per_token,
    fp8_flops_per_token,
    utilisation,
)

BF16 = Fp8Config()


def model_of(**changes) -> ModelConfig:
    values = {"layers": 3, "hidden": 8, "heads": 2, "ffn": 20, "vocab_size": 32}
    return ModelConfig(**(values | {"sequence_length": 16} | changes))


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("tie_head", [False, True])
def test_flops_equal_a_count_of_every_product(kv_heads, tie_head):
    model = model_of(kv_heads=kv_heads, tie_head=tie_head)
    hidden, head_dim, sequence = 8, 4, 16
    forward = 0
    for _ in range(model.layers):
        for rows in (hidden, kv_heads * head_dim, kv_heads * head_dim, hidden):  # Q, K, V, O
            forward += 2 * rows * hidden * sequence
        forward += 3 * 2 * model.ffn * hidden * sequence
        # Each query meets the keys up to its own position; a half pair on the diagonal is left out.
        pairs = sum(position + 0.5 for position in range(sequence))
        forward += 2 * (2 * pairs * hidden)
    forward += 2 * model.vocab_size * hidden * sequence
    assert flops_per_token(model) * sequence == pytest.approx(3 * forward)


def test_flops_of_experts_count_those_that_compute_a_token_and_the_router():
    dense, experts = model_of(), model_of(experts=16, experts_per_token=3)
    feed_forward, router = 3 * dense.ffn * dense.hidden, 16 * dense.hidden
    more = 6 * dense.layers * (2 * feed_forward + router)
    assert flops_per_token(experts) == pytest.approx(flops_per_token(dense) + more)


def test_flops_of_15b_are_about_six_a_parameter():
    model = load("15b").config.model
    parameters = (
        15_229_089_792 - model.vocab_size * model.hidden
    )  # the embedding multiplies nothing
    attention = 6 * model.layers * model.sequence_length * model.hidden
    assert flops_per_token(model) == pytest.approx(6 * parameters + attention, rel=1e-3)


def test_mfu_is_the_share_of_the_dense_peak():
    model = load("1.76b").config.model
    speed = 0.5 * 8 * 989e12 / flops_per_token(model)
    assert utilisation(speed, model, 8, "NVIDIA H100 80GB HBM3", BF16) == pytest.approx(0.5)


def test_mfu_above_one_is_refused_with_its_numbers():
    model = load("1.76b").config.model
    speed = 1.01 * 989e12 / flops_per_token(model)
    with pytest.raises(ValueError, match=r"101% on 1 × NVIDIA H200 is impossible.*9\.89e\+14"):
        utilisation(speed, model, 1, "NVIDIA H200", BF16)


def test_mfu_of_fp8_is_of_the_bf16_peak_and_refused_above_the_fp8_peak():
    model, fp8 = load("1.76b").config.model, Fp8Config(format="hybrid")
    speed = 989e12 / flops_per_token(model)
    assert utilisation(1.5 * speed, model, 1, "NVIDIA H200", fp8) == pytest.approx(1.5)
    with pytest.raises(ValueError, match=r"202% on 1 × NVIDIA H200 is impossible.*FP8 peak"):
        utilisation(2.02 * speed, model, 1, "NVIDIA H200", fp8)
    # A device without FP8 cannot exceed its BF16 peak, whatever the options say.
    with pytest.raises(ValueError, match="BF16 peak"):
        utilisation(1.01 * 312e12 / flops_per_token(model), model, 1, "NVIDIA A100", fp8)


def test_fp8_counts_products_with_the_weights_of_its_layers():
    model = model_of(layers=4)
    matrices = 6 * 4 * (4 * 8 * 8 + 3 * 20 * 8)
    assert fp8_flops_per_token(model, Fp8Config(format="e4m3")) == matrices
    ends = Fp8Config(format="e4m3", first_last_layers_bf16=1)
    assert fp8_flops_per_token(model, ends) == matrices / 2
    assert fp8_flops_per_token(model, Fp8Config(format="e4m3", backend="emulate")) == 0
    assert fp8_flops_per_token(model, BF16) == 0


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H20", "h20"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA B200", "b200"),
    ],
)
def test_devices_are_told_apart_by_the_drivers_name(name, key):
    assert device_of(name) == DEVICES[key]


@pytest.mark.parametrize("name", ["NVIDIA H1000", "AMD Instinct MI300X", "NVIDIA GeForce RTX 4090"])
def test_unknown_device_has_no_mfu(name):
    assert utilisation(1.0, model_of(), 1, name, BF16) is None


def test_peaks_are_dense():
    """FP8 doubles BF16; a table that mixes dense and sparse peaks would not show that."""
    for device in DEVICES.values():
        if device.fp8_flops:
            assert device.fp8_flops / device.bf16_flops == pytest.approx(2, rel=0.05)
