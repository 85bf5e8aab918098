"""Ranks, replicas and their links, with real gloo processes."""

import os

import torch
import torch.distributed as dist

from megatron_ext.replicas import ParallelConfig, join
from tests.ranks import run


def _places(rank: int, parallel: ParallelConfig) -> dict:
    with join(parallel, timeout_seconds=30) as replicas:
        inside = torch.tensor([float(rank)])
        dist.all_reduce(inside)
        across = torch.tensor([float(rank)])
        dist.all_reduce(across, group=replicas.link)
        replicas.barrier("end")
        return {
            "place": (replicas.index, replicas.rank),
            "world": (dist.get_rank(), dist.get_world_size()),
            "environment": (os.environ["RANK"], os.environ["WORLD_SIZE"]),
            "sums": (inside.item(), across.item()),
        }


def test_each_replica_is_a_world_of_its_own():
    results = run(_places, 4, ParallelConfig(replicas=2, dp=2))
    assert [r["place"] for r in results] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [r["world"] for r in results] == [(0, 2), (1, 2), (0, 2), (1, 2)]
    assert [r["environment"] for r in results] == [("0", "2"), ("1", "2")] * 2
    assert [r["sums"] for r in results] == [(1, 2), (1, 4), (5, 2), (5, 4)]
