"""How much arithmetic training takes, and how much of a device's it uses."""

import re
from dataclasses import dataclass

from megatron_ext.model.config import ModelConfig
from megatron_ext.model.fp8.config import Fp8Config
from megatron_ext.model.logical import kind_of, logical_shapes


@dataclass(frozen=True)
class Device:
    """What one GPU can do, without sparsity, as its maker's data sheet says."""

    name: str  # how the driver's name of it begins
    bf16_flops: float  # FLOP/s
    fp8_flops: float | None  # FLOP/s; None where it has no FP8
    memory_bytes: int
    source: str

    def peak_flops(self, fp8: Fp8Config) -> float:
        """The fastest that a run may compute on it, FLOP/s."""
        return (fp8.enabled and self.fp8_flops) or self.bf16_flops


# NVIDIA prints peaks with sparsity, which are twice these, and memory in units of 10⁹ bytes.
DEVICES = {
    "a100": Device("NVIDIA A100", 312e12, None, 80 * 10**9, "A100 data sheet, SXM 80 GB"),
    "l40s": Device("NVIDIA L40S", 362e12, 733e12, 48 * 10**9, "L40S data sheet"),
    "h100": Device("NVIDIA H100", 989e12, 1979e12, 80 * 10**9, "H100 data sheet, SXM"),
    "h100-pcie": Device("NVIDIA H100 PCIe", 756e12, 1513e12, 80 * 10**9, "H100 data sheet, PCIe"),
    "h100-nvl": Device("NVIDIA H100 NVL", 835e12, 1671e12, 94 * 10**9, "H100 data sheet, NVL"),
    "h20": Device("NVIDIA H20", 148e12, 296e12, 96 * 10**9, "H20 specification"),
    "h200": Device("NVIDIA H200", 989e12, 1979e12, 141 * 10**9, "H200 data sheet, SXM"),
    "h200-nvl": Device("NVIDIA H200 NVL", 835e12, 1671e12, 141 * 10**9, "H200 data sheet, NVL"),
    "b200": Device("NVIDIA B200", 2250e12, 4500e12, 180 * 10**9, "DGX B200 data sheet, 1/8"),
}


def device_of(name: str) -> Device | None:
    """The device that the driver calls `name`; None where it is unknown.

    Of several entries that match, the longest is meant: "NVIDIA H100 PCIe" is no "NVIDIA H100".
    """
    known = [
        device for device in DEVICES.values() if re.match(rf"{re.escape(device.name)}(?!\w)", name)
    ]
    return max(known, key=lambda device: len(device.name), default=None)


def flops_per_token(model: ModelConfig) -> float:
    """FLOPs of forward and backward for one token, recomputation not counted.

    6 for each weight of the head and of the matrices that compute the token (of the experts those
    that its router chose), and 6·layers·sequence·hidden for causal attention: QKᵀ and its product
    with V take 2·hidden each for every pair of tokens, half of the pairs are in the past, and
    backward takes twice as much as forward. Document masking computes fewer pairs; the formula
    counts them all.
    """
    weights = _active_weights(model) + model.vocab_size * model.hidden
    return 6 * weights + 6 * model.layers * model.sequence_length * model.hidden


def fp8_flops_per_token(model: ModelConfig, fp8: Fp8Config) -> float:
    """Those of `flops_per_token` that Transformer Engine computes in FP8: products with weights.

    Attention, the head, and layers that stay in BF16 are not among them; emulated FP8 is none.
    """
    if not fp8.enabled or fp8.emulated:
        return 0.0
    share = 1 - 2 * fp8.first_last_layers_bf16 / model.layers
    return 6 * share * _active_weights(model)


def _active_weights(model: ModelConfig) -> float:
    """Weights of all layers' matrices and routers that compute one token."""
    active = model.experts_per_token / model.experts if model.experts else 1.0
    shapes = logical_shapes(model).items()
    return sum(
        rows * rest[0] * (active if ".experts." in name else 1)
        for name, (rows, *rest) in shapes
        if kind_of(name) in ("matrix", "router")
    )


def utilisation(
    tokens_per_second: float, model: ModelConfig, devices: int, name: str, fp8: Fp8Config
) -> float | None:
    """Model FLOPs utilisation (MFU) of all devices together, of their dense BF16 peak.

    A run in FP8 is measured by the BF16 peak too, so that its gain shows. None where the peak of
    the device called `name` is unknown. Raises ValueError above the peak, which no device can do:
    then a count or a peak is wrong.
    """
    device = device_of(name)
    if device is None:
        return None
    mfu = tokens_per_second * flops_per_token(model) / (devices * device.bf16_flops)
    peak = device.peak_flops(fp8)
    if mfu > peak / device.bf16_flops:
        kind = "BF16" if peak == device.bf16_flops else "FP8"
        raise ValueError(
            f"an MFU of {mfu:.0%} on {devices} × {name} is impossible: "
            f"{tokens_per_second:,.0f} tokens/s at {flops_per_token(model):.3g} FLOPs each, "
            f"with a dense {kind} peak of {peak:.3g} FLOP/s ({device.source})"
        )
    return mfu
