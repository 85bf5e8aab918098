"""A layer's mixture of experts: megatron-core's modules, and what they can do here.

Each token goes to the `experts_per_token` experts that its router finds likeliest, whose outputs
are added, weighted by their probabilities among all experts (Switch Transformer, arXiv 2101.03961;
OLMoE, arXiv 2409.02060). No token is dropped. Every rank holds its tensor-parallel slice of every
expert, like that of a dense layer; under expert parallelism only of its share of them, and tokens
travel between the `parallel.ep` ranks that hold the others.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules

from megatron_ext.errors import ConfigError
from megatron_ext.model.config import ModelConfig
from megatron_ext.model.fp8.config import Fp8Config
from megatron_ext.replicas import ParallelConfig


def layer_of_experts(expert: MLPSubmodules) -> Callable[..., torch.nn.Module]:
    """Builds a layer's experts, each a feed-forward layer of these modules, and their router."""
    return partial(
        MoELayer, submodules=MoESubmodules(experts=partial(SequentialMLP, submodules=expert))
    )


def core_options(model: ModelConfig, parallel: ParallelConfig) -> dict[str, Any]:
    """The fields of megatron-core's TransformerConfig that concern experts."""
    if not model.experts:
        return {}
    return {
        "num_moe_experts": model.experts,
        "expert_model_parallel_size": parallel.ep,
        "moe_ffn_hidden_size": model.ffn,
        "moe_router_topk": model.experts_per_token,
        # Of one chosen expert the softmax over the chosen is 1, which teaches the router nothing.
        "moe_router_pre_softmax": True,
        "moe_router_dtype": "fp32",
        # By sequence, so that it depends neither on the micro-batch nor on the layout
        # (DeepSeek-V3, arXiv 2412.19437, eq. 17-20).
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_aux_loss_coeff": model.router_balance,
        "moe_token_dispatcher_type": _dispatcher(model, parallel),
    }


def _dispatcher(model: ModelConfig, parallel: ParallelConfig) -> str:
    """How tokens get to their experts: gathered by all ranks, or sent to those that they chose.

    Of T tokens on each of tp × ep ranks, "allgather" brings a rank (tp · ep - 1) · T; "alltoall"
    brings experts_per_token / ep times as many, but one for each choice.
    """
    # Over tensor parallelism its pieces are gathered in unequal sizes, which gloo cannot do.
    possible = parallel.tp == 1 or torch.cuda.is_available()
    return "alltoall" if possible and model.experts_per_token < parallel.ep else "allgather"


def refuse_what_cannot_work(model: ModelConfig, parallel: ParallelConfig, fp8: Fp8Config) -> None:
    """Raises ConfigError for a layout or an implementation that experts do not have here."""
    if not model.experts:
        if parallel.ep > 1:
            raise ConfigError(
                f"parallel.ep={parallel.ep} with model.experts=0: a dense model has no experts to "
                "share out; use parallel.ep=1"
            )
        return
    if model.experts % parallel.ep:
        raise ConfigError(
            f"parallel.ep={parallel.ep} does not divide model.experts={model.experts}: each rank "
            "holds as many experts as the others; use a divisor"
        )
    if model.implementation != "plain":
        raise ConfigError(
            f"model.experts={model.experts} with model.implementation={model.implementation}: "
            "experts are plain here; use model.implementation=plain"
        )
    if fp8.enabled:
        raise ConfigError(
            f"model.experts={model.experts} with fp8.format={fp8.format}: experts are not computed "
            "in FP8 here; use fp8.format=none"
        )
    if parallel.tp > 1 and not parallel.sequence_parallel:
        raise ConfigError(
            f"model.experts={model.experts} with parallel.tp={parallel.tp} needs "
            "parallel.sequence_parallel=true: otherwise every rank would route every token"
        )
