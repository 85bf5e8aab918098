"""The GPT that is trained: how it is built, and what its parameters are in whole."""

from megatron_ext.model.attention import documents
from megatron_ext.model.build import build, parameter_count, skeleton, transformer_config
from megatron_ext.model.config import ModelConfig
from megatron_ext.model.logical import LogicalParameter, Segment, describe, logical_shapes

__all__ = [
    "LogicalParameter",
    "ModelConfig",
    "Segment",
    "build",
    "describe",
    "documents",
    "logical_shapes",
    "parameter_count",
    "skeleton",
    "transformer_config",
]
