"""What megatron-core does on a machine without CUDA after `host.prepare()`."""

from pathlib import Path

import pytest
import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.tensor_parallel import get_cuda_rng_tracker

from megatron_ext import host
from megatron_ext.replicas import ParallelConfig, initialize_megatron, join
from tests.megatron_ext.model.step import megatron_step, model_config, reference_step
from tests.ranks import run

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without CUDA")


@pytest.mark.parametrize("overlap", [False, True])
def test_ddp_reduces_and_gathers_shards(overlap):
    model = model_config()
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=overlap,
        overlap_param_gather=overlap,
        bucket_size=10_000,  # elements, so that there are several buckets
    )
    parallel = ParallelConfig(tp=2, dp=2, sequence_parallel=True)
    step, expected = megatron_step(model, parallel, ddp=ddp), reference_step(model)
    assert step.loss == pytest.approx(expected.loss, rel=1e-6)
    assert step.norm == pytest.approx(expected.norm, rel=1e-6)


def _drawn_in_fork(rank: int, seed: int) -> tuple[bool, list[torch.Tensor]]:
    host.prepare()
    parallel = ParallelConfig(tp=2)
    with join(parallel, timeout_seconds=30):
        initialize_megatron(parallel, seed)
        before = torch.get_rng_state()
        draws = []
        for _ in range(2):
            with get_cuda_rng_tracker().fork():
                draws.append(torch.rand(4))
        return torch.equal(before, torch.get_rng_state()), draws


def test_random_states_are_tracked_on_the_cpu():
    (restored, first), (_, second) = run(_drawn_in_fork, 2, 5)
    assert restored
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first[0], second[0]), "tensor-parallel ranks draw the same"
    (_, again), _ = run(_drawn_in_fork, 2, 5)
    assert torch.equal(first[0], again[0])
    assert torch.equal(first[1], again[1])


def _save_and_load(rank: int, folder: Path) -> torch.Tensor:
    host.prepare()
    with join(ParallelConfig(dp=2), timeout_seconds=30):
        initialize_megatron(ParallelConfig(dp=2), 1)

        def sharded(values: torch.Tensor) -> dict:
            return {"x": ShardedTensor.from_rank_offsets("x", values, (0, rank, 2))}

        dist_checkpointing.save(sharded(torch.full((3,), float(rank))), folder)
        return dist_checkpointing.load(sharded(torch.zeros(3)), folder)["x"]


def test_dist_checkpointing_saves_and_loads(tmp_path):
    zeros, ones = run(_save_and_load, 2, tmp_path)
    assert zeros.tolist() == [0, 0, 0]
    assert ones.tolist() == [1, 1, 1]


def test_zeros_on_cuda_are_zeros_on_the_cpu():
    host.prepare()
    assert torch.zeros(2, device="cuda").device.type == "cpu"
    assert torch.zeros(2, device=torch.device("cuda", 0)).device.type == "cpu"
    assert torch.zeros(2, device="meta").device.type == "meta"


def test_device_contexts_still_work():
    host.prepare()
    with torch.device("meta"):
        assert torch.zeros(2).device.type == "meta"


def test_calling_it_again_changes_nothing():
    host.prepare()
    zeros = torch.zeros
    host.prepare()
    assert torch.zeros is zeros
