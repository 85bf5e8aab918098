"""The GPT that is trained: how it is built, and what its parameters are in whole."""

from megatron_ext.lazy import lazy

__getattr__ = lazy(
    __name__,
    {
        "LogicalParameter": "logical",
        "ModelConfig": "config",
        "Segment": "logical",
        "build": "gpt",
        "describe": "logical",
        "documents": "attention",
        "logical_shapes": "logical",
        "parameter_count": "logical",
        "skeleton": "gpt",
        "transformer_config": "gpt",
    },
)
