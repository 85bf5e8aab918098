"""FP8's options, and what they mean to megatron-core."""

from typing import Any, Literal

from pydantic import NonNegativeInt, PositiveInt, model_validator

from megatron_ext.config import Section
from megatron_ext.errors import ConfigError
from megatron_ext.model.config import ModelConfig
from megatron_ext.replicas import ParallelConfig


class Fp8Config(Section):
    """8-bit floats in the matrix products of the layers; weights stay BF16, masters FP32."""

    format: Literal["none", "e4m3", "hybrid"] = "none"
    """none, e4m3 throughout, or hybrid: e4m3 forward and e5m2 for gradients."""
    recipe: Literal["tensorwise", "blockwise", "delayed", "mxfp8"] = "tensorwise"
    """How values are scaled: by the tensor's maximum, by blocks of 128, by the maximum of earlier
    steps (delayed), or by blocks of 32 (mxfp8, Blackwell only)."""
    backend: Literal["transformer_engine", "emulate"] = "transformer_engine"
    """transformer_engine, or emulate: plain layers that round as FP8 would, slowly, anywhere."""
    first_last_layers_bf16: NonNegativeInt = 0
    """Layers at the beginning, and as many at the end, that stay in BF16."""
    amax_history: PositiveInt = 16
    """Steps whose maxima delayed scaling remembers."""
    amax_algorithm: Literal["max", "most_recent"] = "max"
    """Which of the remembered maxima delayed scaling takes."""

    @property
    def enabled(self) -> bool:
        """Whether anything is computed in FP8."""
        return self.format != "none"

    @property
    def emulated(self) -> bool:
        """Whether plain layers round as FP8 would."""
        return self.enabled and self.backend == "emulate"

    @property
    def multiple(self) -> int:
        """What dimensions and tokens must be multiples of."""
        return 32 if self.recipe == "mxfp8" else 16

    @model_validator(mode="after")
    def _check(self) -> "Fp8Config":
        if self.recipe == "delayed" and self.first_last_layers_bf16:
            raise ConfigError(
                f"fp8.first_last_layers_bf16={self.first_last_layers_bf16} with fp8.recipe=delayed:"
                " delayed scaling spans all layers; use another recipe, or 0"
            )
        return self


def refuse_what_cannot_work(
    fp8: Fp8Config, model: ModelConfig, parallel: ParallelConfig, precision: str
) -> None:
    """Raises ConfigError for a model or layout that FP8 cannot compute."""
    if not fp8.enabled:
        return
    layers = {"emulate": "plain", "transformer_engine": "transformer_engine"}[fp8.backend]
    if model.implementation != layers:
        raise ConfigError(
            f"fp8.backend={fp8.backend} needs model.implementation={layers}; it is "
            f"{model.implementation}"
        )
    if precision != "bf16":
        raise ConfigError(f"fp8.format={fp8.format} needs train.precision=bf16; it is {precision}")
    if 2 * fp8.first_last_layers_bf16 > model.layers:
        raise ConfigError(
            f"fp8.first_last_layers_bf16={fp8.first_last_layers_bf16} at both ends are more than "
            f"model.layers={model.layers}"
        )
    tp = parallel.tp
    widths = {
        "model.hidden": model.hidden,
        "the rows of Q, K and V on a rank": (model.heads + 2 * model.kv_heads)
        * model.head_dim
        // tp,
        "the attention heads' width on a rank": model.hidden // tp,
        "twice model.ffn / parallel.tp": 2 * model.ffn // tp,
        "model.ffn / parallel.tp": model.ffn // tp,
    }
    for name, width in widths.items():
        if width % fp8.multiple:
            raise ConfigError(
                f"{name}, {width}, must be a multiple of {fp8.multiple} for fp8.recipe={fp8.recipe}"
            )


def core_options(fp8: Fp8Config) -> dict[str, Any]:
    """The fields of megatron-core's TransformerConfig that make Transformer Engine use FP8."""
    if not fp8.enabled or fp8.emulated:
        return {}
    ends = fp8.first_last_layers_bf16
    return {
        "fp8": fp8.format,
        "fp8_recipe": fp8.recipe,
        # The optimizer and the outer loop want weights that are not rounded to FP8.
        "fp8_param": False,
        "fp8_amax_history_len": fp8.amax_history,
        "fp8_amax_compute_algo": fp8.amax_algorithm,
        "first_last_layers_bf16": ends > 0,
        "num_layers_at_start_in_bf16": ends,
        "num_layers_at_end_in_bf16": ends,
    }
