"""FLOPs of training in closed form, and model FLOPs utilisation."""

import pytest

from megatron_ext.model.config import ModelConfig
from pretrain.config import load
from pretrain.flops import DEVICES, device_of, flops_per_token, utilisation


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
    assert utilisation(speed, model, 8, "NVIDIA H100 80GB HBM3") == pytest.approx(0.5)


def test_mfu_above_one_is_refused_with_its_numbers():
    model = load("1.76b").config.model
    speed = 1.01 * 989e12 / flops_per_token(model)
    with pytest.raises(ValueError, match=r"101% on 1 × NVIDIA H200 is impossible.*9\.89e\+14"):
        utilisation(speed, model, 1, "NVIDIA H200")


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
    assert utilisation(1.0, model_of(), 1, name) is None


def test_peaks_are_dense():
    """FP8 doubles BF16; a table that mixes dense and sparse peaks would not show that."""
    for device in DEVICES.values():
        if device.fp8_flops:
            assert device.fp8_flops / device.bf16_flops == pytest.approx(2, rel=0.05)
