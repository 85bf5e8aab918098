"""How much arithmetic training takes, and how much of a device's it uses."""

from megatron_ext.model.config import ModelConfig
from megatron_ext.model.logical import kind_of, logical_shapes

# Dense BF16 peaks in FLOP/s, from NVIDIA's data sheets, by the beginning of the device's name.
_PEAK_FLOPS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
}


def flops_per_token(model: ModelConfig) -> float:
    """FLOPs of forward and backward for one token, recomputation not counted.

    6 for each weight of a matrix and of the head, and 6·layers·sequence·hidden for causal
    attention: QKᵀ and its product with V take 2·hidden each for every pair of tokens, half of the
    pairs are in the past, and backward takes twice as much as forward.
    """
    shapes = logical_shapes(model)
    weights = sum(
        rows * cols
        for name, (rows, *rest) in shapes.items()
        for cols in rest
        if kind_of(name) in ("matrix", "head")
    )
    if model.tie_head:
        weights += model.vocab_size * model.hidden
    return 6 * weights + 6 * model.layers * model.sequence_length * model.hidden


def utilisation(
    tokens_per_second: float, model: ModelConfig, devices: int, name: str
) -> float | None:
    """Model FLOPs utilisation (MFU) of all devices together; None where the peak is unknown.

    Raises ValueError above 1, which no device can do: then a count or a peak is wrong.
    """
    peak = next((flops for start, flops in _PEAK_FLOPS.items() if name.startswith(start)), None)
    if peak is None:
        return None
    mfu = tokens_per_second * flops_per_token(model) / (devices * peak)
    if mfu > 1:
        raise ValueError(f"an MFU of {mfu:.0%} on {devices} × {name} is impossible")
    return mfu
