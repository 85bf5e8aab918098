"""Builds the GPT of a rank from megatron-core's blocks."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt import gpt_model
from megatron.core.pipeline_parallel.utils import (
    is_pp_first_stage,
    is_pp_last_stage,
    is_vp_first_stage,
    is_vp_last_stage,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset
from megatron.core.utils import get_pg_rank

from megatron_ext.errors import ConfigError
from megatron_ext.model import experts
from megatron_ext.model.config import ModelConfig
from megatron_ext.model.fp8.config import Fp8Config, core_options, refuse_what_cannot_work
from megatron_ext.model.initialize import initialize
from megatron_ext.model.spec import block_submodules
from megatron_ext.replicas import ParallelConfig

Precision = Literal["fp32", "bf16"]
Recompute = Literal["none", "selective", "full"]

NO_FP8 = Fp8Config()


def build(
    model: ModelConfig,
    parallel: ParallelConfig,
    *,
    precision: Precision,
    recompute: Recompute,
    seed: int,
    fp8: Fp8Config = NO_FP8,
    fused_gradients: bool = False,
) -> list[gpt_model.GPTModel]:
    """This rank's model chunks with their initial weights, one for each interleaved stage.

    Needs megatron-core's parallel_state, and `host.prepare()` where there is no CUDA. Calling a
    chunk as `chunk(tokens, position_ids, None, labels=labels)`, all [micro_batch, sequence], gives
    the loss of each token in that shape on the last stage. `chunk.config` is shared by the chunks.
    Raises ConfigError for a combination that cannot work.
    """
    config = transformer_config(model, parallel, precision=precision, recompute=recompute, fp8=fp8)
    config.gradient_accumulation_fusion = fused_gradients
    groups = ProcessGroupCollection.use_mpu_process_groups()
    chunks = [
        build_chunk(model, config, groups, stage if parallel.interleave > 1 else None, fp8)
        for stage in range(parallel.interleave)
    ]
    initialize(chunks, model, parallel, seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return [chunk.to(device) for chunk in chunks]


def skeleton(model: ModelConfig) -> gpt_model.GPTModel:
    """The whole model on the meta device: shapes and names without values or processes."""
    config = transformer_config(model, ParallelConfig(), precision="fp32", recompute="none")
    with torch.device("meta"):
        return build_chunk(model, config, ProcessGroupCollection(), None)


def transformer_config(
    model: ModelConfig,
    parallel: ParallelConfig,
    *,
    precision: Precision,
    recompute: Recompute,
    fp8: Fp8Config = NO_FP8,
) -> TransformerConfig:
    """Megatron-core's description of the layers, of parallelism and of the schedule.

    The training loop adds its hooks (finalize_model_grads_func and the like).
    """
    _refuse_what_cannot_work(model, parallel)
    refuse_what_cannot_work(fp8, model, parallel, precision)
    experts.refuse_what_cannot_work(model, parallel, fp8)
    plain = model.implementation == "plain"
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    interleaved = parallel.interleave > 1
    return TransformerConfig(
        num_layers=model.layers,
        hidden_size=model.hidden,
        num_attention_heads=model.heads,
        num_query_groups=model.kv_heads,
        ffn_hidden_size=model.ffn,
        normalization="RMSNorm",
        layernorm_epsilon=model.norm_epsilon,
        qk_layernorm=True,
        attention_output_gate=model.attention_gate,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=parallel.tp,
        pipeline_model_parallel_size=parallel.pp,
        virtual_pipeline_model_parallel_size=parallel.interleave if interleaved else None,
        context_parallel_size=parallel.cp,
        sequence_parallel=parallel.sequence_parallel,
        bf16=precision == "bf16",
        params_dtype=dtype,
        pipeline_dtype=dtype,
        # With batched sends the interleaved schedule of two stages computes wrong numbers.
        batch_p2p_comm=not interleaved,
        overlap_p2p_comm=interleaved,
        deallocate_pipeline_outputs=True,
        # `initialize` fills the weights; they must not be drawn twice, nor on the device.
        perform_initialization=False,
        # Transformer Engine's would be drawn on the CPU all the same.
        use_cpu_initialization=plain,
        calculate_per_token_loss=True,
        deterministic_mode=_embeds_by_indexing(plain),
        transformer_impl="local" if plain else "transformer_engine",
        # The default, "full", only draws a warning that it is deprecated.
        cuda_graph_modules=[],
        **_fusions(plain),
        **_recomputation(recompute, model),
        **core_options(fp8),
        **experts.core_options(model, parallel),
    )


def build_chunk(
    model: ModelConfig,
    config: TransformerConfig,
    groups: ProcessGroupCollection,
    vp_stage: int | None,
    fp8: Fp8Config = NO_FP8,
) -> gpt_model.GPTModel:
    """This rank's chunk, or that of `vp_stage`, whose weights hold no values yet."""
    vp_size = config.virtual_pipeline_model_parallel_size
    pp_rank = get_pg_rank(groups.pp)
    first_layer = get_transformer_layer_offset(config, vp_stage, pp_rank)
    layers = range(first_layer, first_layer + get_num_layers_to_build(config, vp_stage, pp_rank))
    first = is_pp_first_stage(groups.pp) and is_vp_first_stage(vp_stage, vp_size)
    last = is_pp_last_stage(groups.pp) and is_vp_last_stage(vp_stage, vp_size)
    with _quiet(gpt_model.logger):
        return gpt_model.GPTModel(
            config,
            block_submodules(model, config, layers, fp8),
            vocab_size=model.vocab_size,
            max_sequence_length=model.sequence_length,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=model.tie_head,
            position_embedding_type="rope",
            rotary_base=model.rope_base,
            pg_collection=groups,
            vp_stage=vp_stage,
        )


def _embeds_by_indexing(plain: bool) -> bool:
    """Core's deterministic mode: of these layers it decides how the embedding is read.

    The backward of indexing gives the same bits each time on a GPU, that of F.embedding on threads
    of a CPU. Transformer Engine decides by the environment: NVTE_ALLOW_NONDETERMINISTIC_ALGO=0.
    """
    return plain and torch.cuda.is_available()


def _fusions(plain: bool) -> dict[str, bool]:
    """Fused kernels are compiled at their first call, which needs a GPU to be worth it."""
    cuda = torch.cuda.is_available()
    return {
        "bias_activation_fusion": cuda,
        "bias_dropout_fusion": cuda,
        "cross_entropy_loss_fusion": cuda,
        "apply_rope_fusion": not plain,
    }


def _recomputation(recompute: Recompute, model: ModelConfig) -> dict:
    """Selective recomputes the feed-forward layer, which holds about half of the activations.

    Core's default, core attention, would save nothing: fused kernels store no S × S matrix.
    """
    if recompute == "selective":
        module = "moe" if model.experts else "mlp"
        return {"recompute_granularity": "selective", "recompute_modules": [module]}
    if recompute == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    return {}


def _refuse_what_cannot_work(model: ModelConfig, parallel: ParallelConfig) -> None:
    if parallel.cp > 1 and model.implementation == "plain":
        raise ConfigError(
            f"parallel.cp={parallel.cp} with model.implementation=plain: plain attention needs "
            "the whole sequence; use parallel.cp=1 or model.implementation=transformer_engine"
        )
    if model.document_masking and model.implementation != "plain":
        raise ConfigError(
            f"model.document_masking=true with model.implementation={model.implementation}: only "
            "plain attention knows document boundaries; use model.implementation=plain"
        )
    if model.implementation == "transformer_engine" and not HAVE_TE:
        raise ConfigError(
            "model.implementation=transformer_engine: Transformer Engine is not installed here; "
            "install it or use model.implementation=plain"
        )
    query_heads = model.heads * (2 if model.attention_gate else 1)
    qkv_rows = (query_heads + 2 * model.kv_heads) * model.head_dim
    if qkv_rows % parallel.tp:
        gate = ", the gate" if model.attention_gate else ""
        raise ConfigError(
            f"parallel.tp={parallel.tp} does not divide the {qkv_rows} rows of Q{gate}, K and V "
            f"that model.heads={model.heads} and model.kv_heads={model.kv_heads} of width "
            f"{model.head_dim} make; use another of them"
        )


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Keep back what core says at each construction.

    GPTModel announces that HybridModel will replace it one day, and modules warn about defaults
    and, without processes, that they do not know their rank.
    """
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
