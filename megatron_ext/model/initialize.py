"""Initial weights that depend on the seed and on nothing else.

Each logical matrix is drawn whole, on the CPU, from a generator of its own that is seeded by
(seed, global name); a rank draws the matrices that it holds a part of and keeps its part. So the
weights are bit-equal for every layout and device. The distribution is that of the MuLoCo authors'
Llama (depth-scaled, as in their `init_weights`).
"""

import hashlib
import math
import re
from collections.abc import Iterable

import torch
from megatron.core import parallel_state

from megatron_ext.model.config import ModelConfig
from megatron_ext.model.logical import describe, logical_shapes
from megatron_ext.replicas import ParallelConfig

_STD = 0.02
_HEAD_TRUNCATION = 3.0  # standard deviations


def draw(name: str, model: ModelConfig, seed: int) -> torch.Tensor:
    """The initial value of one whole logical parameter: FP32, on the CPU.

    Norms are 1. Matrices are normal with standard deviation 0.02, and 0.02 / sqrt(2 (l + 1)) for
    the attention output, and each up and down, of layer l = 0, 1, …. The embedding is normal with
    deviation 1; the head has 1 / sqrt(hidden), truncated at three deviations. A tied matrix is
    drawn as a head: as an embedding of deviation 1 it would give logits of deviation sqrt(hidden).
    """
    shape = logical_shapes(model)[name]
    if name.endswith("norm"):
        return torch.ones(shape)
    weight, generator = torch.empty(shape), _generator(seed, name)
    if name == "head" or (name == "embedding" and model.tie_head):
        std = model.hidden**-0.5
        limit = _HEAD_TRUNCATION * std
        return torch.nn.init.trunc_normal_(weight, 0.0, std, -limit, limit, generator)
    return weight.normal_(0.0, _std(name), generator=generator)


def initialize(
    model_chunks: Iterable[torch.nn.Module],
    model: ModelConfig,
    parallel: ParallelConfig,
    seed: int,
) -> None:
    """Give this rank's parameters, of any dtype, their part of the drawn matrices."""
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    with torch.no_grad():
        for parameter, logical in describe(model_chunks, model, parallel).items():
            wholes = {name: draw(name, model, seed) for name in logical.names}
            for segment in logical.segments_of(tp_rank):
                parameter[segment.local_slices].copy_(wholes[segment.name][segment.slices])


def _std(name: str) -> float:
    if name == "embedding":
        return 1.0
    layer, part = re.fullmatch(r"layers\.(\d+)\.(.+)", name).groups()
    if part == "attention.o" or part.endswith((".up", ".down")):
        return _STD / math.sqrt(2 * (int(layer) + 1))
    return _STD


def _generator(seed: int, name: str) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
