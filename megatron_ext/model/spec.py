"""Which modules a transformer layer is made of."""

from collections.abc import Callable
from functools import partial

import torch
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
from megatron_ext.model.experts import layer_of_experts
from megatron_ext.model.fp8.config import Fp8Config
from megatron_ext.model.fp8.emulation import Fp8ColumnParallelLinear, Fp8RowParallelLinear
from megatron_ext.model.norm import PostNormAdd, RMSNorm

Linear = Callable[..., torch.nn.Module]


def block_submodules(
    model: ModelConfig, config: TransformerConfig, layers: range, fp8: Fp8Config
) -> TransformerBlockSubmodules:
    """Modules of a pipeline chunk with these layers of the model, and of the final norm."""
    if model.implementation == "transformer_engine":
        submodules, norm = _transformer_engine_layer()
        kinds = [submodules] * len(layers)
    else:
        norm = RMSNorm
        plain = _plain_layer(ColumnParallelLinear, RowParallelLinear, model.experts > 0)
        kinds = [plain] * len(layers)
    if fp8.emulated:
        rounding = _plain_layer(
            partial(Fp8ColumnParallelLinear, fp8=fp8), partial(Fp8RowParallelLinear, fp8=fp8)
        )
        ends = fp8.first_last_layers_bf16
        inner = range(ends, model.layers - ends)
        kinds = [rounding if layer in inner else plain for layer in layers]
    if model.sandwich_norm:
        post_norm = ModuleSpec(module=PostNormAdd, params={"config": config, "norm": norm})
        for submodules in kinds:
            submodules.self_attn_bda = submodules.mlp_bda = post_norm
    specs = [ModuleSpec(module=TransformerLayer, submodules=submodules) for submodules in kinds]
    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=norm)


def _plain_layer(column: Linear, row: Linear, experts: bool = False) -> TransformerLayerSubmodules:
    """A layer of plain modules; `column` and `row` make its linear layers."""
    mlp = MLPSubmodules(linear_fc1=column, linear_fc2=row)
    return TransformerLayerSubmodules(
        input_layernorm=RMSNorm,
        self_attention=ModuleSpec(
            module=SelfAttention,
            params={"attn_mask_type": AttnMaskType.causal},
            submodules=SelfAttentionSubmodules(
                linear_qkv=column,
                core_attention=CoreAttention,
                linear_proj=row,
                q_layernorm=RMSNorm,
                k_layernorm=RMSNorm,
            ),
        ),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=RMSNorm,
        mlp=layer_of_experts(mlp) if experts else partial(MLP.as_mlp_submodule, submodules=mlp),
        mlp_bda=get_bias_dropout_add,
    )


def _transformer_engine_layer() -> tuple[TransformerLayerSubmodules, type]:
    # These modules exist only where Transformer Engine is installed.
    from megatron.core.extensions.transformer_engine import TENorm
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_with_transformer_engine_submodules,
    )

    return get_gpt_layer_with_transformer_engine_submodules(qk_layernorm=True), TENorm
