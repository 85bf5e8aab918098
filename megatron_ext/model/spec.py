"""Which modules a transformer layer is made of."""

from functools import partial

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_ext.model.attention import CoreAttention
from megatron_ext.model.config import ModelConfig
from megatron_ext.model.norm import PostNormAdd, RMSNorm


def block_submodules(
    model: ModelConfig, config: TransformerConfig, layers: int
) -> TransformerBlockSubmodules:
    """Modules of a pipeline chunk of `layers` layers, and of the final norm."""
    if model.implementation == "transformer_engine":
        submodules, norm = _transformer_engine_layer()
    else:
        submodules, norm = _plain_layer(), RMSNorm
    if model.sandwich_norm:
        post_norm = ModuleSpec(module=PostNormAdd, params={"config": config, "norm": norm})
        submodules.self_attn_bda = submodules.mlp_bda = post_norm
    layer = ModuleSpec(module=TransformerLayer, submodules=submodules)
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=norm)


def _plain_layer() -> TransformerLayerSubmodules:
    mlp = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
    return TransformerLayerSubmodules(
        input_layernorm=RMSNorm,
        self_attention=ModuleSpec(
            module=SelfAttention,
            params={"attn_mask_type": AttnMaskType.causal},
            submodules=SelfAttentionSubmodules(
                linear_qkv=ColumnParallelLinear,
                core_attention=CoreAttention,
                linear_proj=RowParallelLinear,
                q_layernorm=RMSNorm,
                k_layernorm=RMSNorm,
            ),
        ),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=RMSNorm,
        mlp=partial(MLP.as_mlp_submodule, submodules=mlp),
        mlp_bda=get_bias_dropout_add,
    )


def _transformer_engine_layer() -> tuple[TransformerLayerSubmodules, type]:
    # These modules exist only where Transformer Engine is installed.
    from megatron.core.extensions.transformer_engine import TENorm
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_with_transformer_engine_submodules,
    )

    return get_gpt_layer_with_transformer_engine_submodules(qk_layernorm=True), TENorm
