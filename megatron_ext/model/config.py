"""The shape of the model."""

from typing import Any, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from megatron_ext.config import Section
from megatron_ext.errors import ConfigError


class ModelConfig(Section):
    """A decoder with RMSNorm, QK norm, rotary positions and SwiGLU; no biases."""

    layers: PositiveInt
    """Number of transformer layers."""
    hidden: PositiveInt
    """Width of the residual stream."""
    heads: PositiveInt
    """Attention heads; hidden / heads is the width of one."""
    kv_heads: PositiveInt | None = Field(None, json_schema_extra={"derived": "= model.heads"})
    """Key and value heads; fewer than heads is grouped-query attention."""
    ffn: PositiveInt
    """Width of the gated feed-forward layer, or of each expert."""
    experts: NonNegativeInt = 0
    """Experts in the place of each layer's feed-forward layer; 0 is a dense model."""
    experts_per_token: PositiveInt = 2
    """Experts that compute each token: those its router finds likeliest."""
    router_balance: NonNegativeFloat = 0.01
    """What training adds to the loss, times each layer's imbalance of experts: in each sequence
    experts · Σ (share of the choices · mean probability), which is 1 where all are even."""
    vocab_size: PositiveInt
    """Rows of the embedding; at least the tokenizer's vocabulary."""
    sequence_length: PositiveInt
    """Tokens in one training sequence."""
    sandwich_norm: bool = True
    """Normalise also what attention and feed-forward add to the residual stream."""
    attention_gate: bool = False
    """Gate what each head gives by a sigmoid of the layer's input (arXiv 2505.06708, G1)."""
    tie_head: bool = False
    """Use the embedding as output head."""
    norm_epsilon: PositiveFloat = 1e-6
    """Epsilon of every RMSNorm."""
    rope_base: PositiveInt = 500_000
    """Base of the rotary frequencies."""
    implementation: Literal["plain", "transformer_engine"] = "plain"
    """Layers in plain PyTorch, or NVIDIA's Transformer Engine (needs a GPU)."""
    document_masking: bool = False
    """Keep attention inside each document of a packed sequence."""

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.heads

    @model_validator(mode="before")
    @classmethod
    def _default_kv_heads(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("kv_heads") is None:
            return {**values, "kv_heads": values.get("heads")}
        return values

    @model_validator(mode="after")
    def _check(self) -> "ModelConfig":
        if self.hidden % self.heads:
            raise ConfigError(
                f"model.hidden={self.hidden} must be a multiple of model.heads={self.heads}"
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"model.hidden={self.hidden} / model.heads={self.heads} gives heads of width "
                f"{self.head_dim}; rotary positions need an even width"
            )
        if self.heads % self.kv_heads:
            raise ConfigError(
                f"model.heads={self.heads} must be a multiple of model.kv_heads={self.kv_heads}"
            )
        if self.experts == 1:
            raise ConfigError("model.experts=1 leaves no choice; use 0 for a dense model")
        if 0 < self.experts < self.experts_per_token:
            raise ConfigError(
                f"model.experts_per_token={self.experts_per_token} must not exceed "
                f"model.experts={self.experts}"
            )
        return self
