"""How long an inner step takes, as a range: kernels, tensor and data parallelism, bubble, Muon."""

from collections.abc import Sequence
from dataclasses import dataclass

from launch.plan.memory import StageMemory
from megatron_ext.errors import ConfigError
from pretrain.flops import Device, flops_per_token, fp8_flops_per_token
from pretrain.settings import RunConfig

# Share of the dense BF16 peak that forward and backward reach inside a rank: low, expected, high.
# Published for dense models of 7B to 16B on H100s, everything included: 47 % and 49 % (Megatron-LM,
# TP 2 and 4), 28 % to 33 % (torchtitan's tokens/s, attention counted as here). The range is wide
# enough to hold them after the costs that are counted below. Small models reach less.
_KERNEL_EFFICIENCY = (0.28, 0.45, 0.62)
# What is left of it on the FP8 peak, which is twice as high: products are over sooner and operands
# must be scaled and cast. Torchtitan's 8B gains 1.28 to 1.29 by FP8 on H100s, layers' products
# being four fifths of its work.
_FP8_EFFICIENCY = 0.68
# Newton–Schulz is nothing but square matrix products.
_MUON_EFFICIENCY = 0.6
# One direction, as NCCL reaches it: NVLink 4 inside a box; a 400 Gbit/s adapter for each GPU.
_INSIDE_BOX_BYTES_PER_SECOND = 370e9
_BETWEEN_BOXES_BYTES_PER_SECOND = 40e9
GPUS_PER_BOX = 8
# Forward and backward gather and scatter the activations of attention and of feed-forward.
_TENSOR_COLLECTIVES_A_LAYER = 8
# Forward and backward send tokens to their experts, and results back.
_EXPERT_COLLECTIVES_A_LAYER = 4


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of one inner step, and what they are made of where kernels are as expected."""

    low: float
    expected: float
    high: float
    compute: float  # forward and backward, recomputation included
    tensor_parallel: float
    expert_parallel: float  # tokens to their experts and back
    bubble: float  # of the pipeline
    data_parallel: float  # not hidden
    optimizer: float


def step_seconds(config: RunConfig, stages: Sequence[StageMemory], device: Device) -> StepSeconds:
    """The time of one inner step of a replica on this device; replicas step side by side."""
    slow, expected, fast = (
        _parts(config, stages, device, efficiency) for efficiency in _KERNEL_EFFICIENCY
    )
    return StepSeconds(sum(fast), sum(expected), sum(slow), *expected)


def _parts(
    config: RunConfig, stages: Sequence[StageMemory], device: Device, efficiency: float
) -> tuple[float, ...]:
    model, parallel, train = config.model, config.parallel, config.train
    tokens = config.tokens_per_step / parallel.replicas
    work = tokens * _recomputation(config) / parallel.inner_world_size
    compute = work * _seconds_per_token(config, device, efficiency)
    element_bytes = 2 if train.precision == "bf16" else 4
    local_tokens = tokens / (parallel.dp * parallel.cp)
    tensor_bytes = (
        _TENSOR_COLLECTIVES_A_LAYER
        * (model.layers / parallel.pp)
        * local_tokens
        * model.hidden
        * element_bytes
        * (parallel.tp - 1)
        / parallel.tp
    )
    tensor = tensor_bytes / (
        _INSIDE_BOX_BYTES_PER_SECOND
        if parallel.tp <= GPUS_PER_BOX
        else _BETWEEN_BOXES_BYTES_PER_SECOND
    )
    experts = _dispatch_seconds(config, local_tokens / parallel.tp * model.hidden * element_bytes)
    forward_and_backward = compute + tensor + experts
    chunks = config.micro_batches * parallel.interleave
    bubble = forward_and_backward * (parallel.pp - 1) / chunks
    exposed = max(_data_parallel_seconds(config, stage) for stage in stages)
    if train.overlap:
        # Gradients are reduced, and weights gathered, while one micro-batch is computed.
        exposed = max(0.0, exposed - forward_and_backward / config.micro_batches)
    newton_schulz = max(stage.newton_schulz_flops for stage in stages)
    iterations = config.optimizer.newton_schulz_steps
    optimizer = newton_schulz * iterations / (device.bf16_flops * _MUON_EFFICIENCY)
    return compute, tensor, experts, bubble, exposed, optimizer


def _dispatch_seconds(config: RunConfig, token_bytes: float) -> float:
    """How long tokens travel to shared-out experts and back, beyond what tensor parallelism takes.

    `token_bytes`: of the step's tokens that lie on one rank outside of attention and experts.
    """
    model, parallel = config.model, config.parallel
    if parallel.ep == 1:
        return 0.0
    ranks = parallel.tp * parallel.ep
    # Gathered by all ranks, or sent to those of the chosen experts, where these are fewer.
    copies = min(1.0, model.experts_per_token / parallel.ep) * (ranks - 1) - (parallel.tp - 1)
    moved = _EXPERT_COLLECTIVES_A_LAYER * (model.layers / parallel.pp) * copies * token_bytes
    # Any of the other ranks is as likely.
    outside = max(0, ranks - GPUS_PER_BOX) / (ranks - 1)
    return moved * (
        outside / _BETWEEN_BOXES_BYTES_PER_SECOND + (1 - outside) / _INSIDE_BOX_BYTES_PER_SECOND
    )


def _seconds_per_token(config: RunConfig, device: Device, efficiency: float) -> float:
    """Forward and backward of one token on one GPU. Raises ConfigError if it has no FP8."""
    fp8 = fp8_flops_per_token(config.model, config.fp8)
    bf16 = flops_per_token(config.model) - fp8
    seconds = bf16 / (device.bf16_flops * efficiency)
    if fp8:
        if device.fp8_flops is None:
            raise ConfigError(
                f"fp8.format={config.fp8.format}: {device.name} has no FP8; use fp8.format=none or "
                "another --gpu"
            )
        seconds += fp8 / (device.fp8_flops * efficiency * _FP8_EFFICIENCY)
    return seconds


def _recomputation(config: RunConfig) -> float:
    """Work with recomputation for each unit of work without."""
    model, recompute = config.model, config.train.recompute
    if recompute == "none":
        return 1.0
    recomputed = flops_per_token(model) - 6 * model.vocab_size * model.hidden
    if recompute == "selective":
        feed_forwards = model.experts_per_token if model.experts else 1
        recomputed = 6 * 3 * model.layers * feed_forwards * model.hidden * model.ffn
    return 1 + recomputed / 3 / flops_per_token(model)


def _data_parallel_seconds(config: RunConfig, stage: StageMemory) -> float:
    """Reduce-scatter of gradients and all-gather of weights, by one rank."""
    parallel = config.parallel
    if parallel.tp * parallel.dp * parallel.cp <= GPUS_PER_BOX:
        return stage.data_parallel_bytes / _INSIDE_BOX_BYTES_PER_SECOND
    # A ring passes through all its ranks of a box before it leaves, by the adapters of them all.
    adapters = max(1, GPUS_PER_BOX // parallel.tp)
    speed = min(adapters * _BETWEEN_BOXES_BYTES_PER_SECOND, _INSIDE_BOX_BYTES_PER_SECOND)
    return stage.data_parallel_bytes / speed
