"""The same weights and tokens give the same bits, also with several threads in a rank."""

import pytest
import torch

from megatron_ext import host
from megatron_ext.model import ModelConfig, build
from megatron_ext.replicas import ParallelConfig, initialize_megatron, join
from tests.megatron_ext.model.step import SEED, model_config
from tests.ranks import run

SEQUENCES, REPETITIONS = 8, 20


@pytest.mark.parametrize(
    ("experts", "parallel"),
    [
        (0, ParallelConfig()),
        (4, ParallelConfig()),
        pytest.param(4, ParallelConfig(dp=4, ep=4), marks=pytest.mark.slow),
    ],
    ids=["dense", "experts", "experts sent to"],
)
def test_gradients_on_two_threads_are_equal_bit_for_bit(experts, parallel):
    # Torch cuts less than 32,768 values into no pieces.
    model = model_config(layers=1, hidden=64, sequence_length=128, experts=experts)
    different = run(_different_gradients, parallel.world_size, model, parallel, timeout=240)
    assert different == [[]] * parallel.world_size


def _different_gradients(rank: int, model: ModelConfig, parallel: ParallelConfig) -> list[str]:
    """The parameters whose gradient was not the same in each repetition."""
    torch.set_num_threads(2)
    host.prepare()
    with join(parallel, timeout_seconds=30):
        initialize_megatron(parallel, SEED)
        [chunk] = build(model, parallel, precision="fp32", recompute="none", seed=SEED)
        first, *others = [_gradients(chunk, model) for _ in range(REPETITIONS)]
        return [n for n in first if any(not torch.equal(first[n], other[n]) for other in others)]


def _gradients(chunk: torch.nn.Module, model: ModelConfig) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    shape = (SEQUENCES, model.sequence_length)
    tokens = torch.randint(model.vocab_size, shape, generator=generator)
    positions = torch.arange(model.sequence_length).expand(SEQUENCES, -1)
    chunk.zero_grad()
    chunk(tokens, positions, None, labels=tokens.roll(-1, dims=1)).sum().backward()
    return {name: p.grad.clone() for name, p in chunk.named_parameters()}
