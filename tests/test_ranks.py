"""The harness of the distributed tests: a failing rank must fail the test."""

import os
import signal
import time

import pytest
import torch

from megatron_ext.errors import DataError, PeerError
from tests.ranks import children_left, run


def test_results_come_in_rank_order():
    assert run(lambda rank, text: f"{text} {rank}", 3, "rank") == ["rank 0", "rank 1", "rank 2"]


def test_large_results_come_whole():
    (result,) = run(lambda rank: torch.arange(1_000_000), 1)
    assert torch.equal(result, torch.arange(1_000_000))


def _raise(rank: int) -> None:
    if rank == 0:
        raise PeerError("rank 1 failed")
    time.sleep(0.2)
    raise DataError("shard 7 is damaged")


def test_exception_of_the_rank_that_is_the_cause_is_raised():
    with pytest.raises(DataError, match="shard 7 is damaged") as caught:
        run(_raise, 2)
    assert "in rank 1" in caught.value.__notes__[0]
    assert "in _raise" in caught.value.__notes__[0]


def _kill(rank: int) -> None:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def test_dead_rank_fails_the_test_and_ends_the_others():
    with pytest.raises(RuntimeError, match="rank 1 ended with SIGKILL"):
        run(_kill, 2)
    assert children_left() == []


def test_hanging_rank_fails_the_test_and_ends_the_others():
    with pytest.raises(TimeoutError, match=r"ranks \[1\] still ran after 0.5 s"):
        run(lambda rank: time.sleep(60 * rank), 2, timeout=0.5)
    assert children_left() == []


def test_ranks_can_differentiate_after_their_parent_did():
    torch.ones(3, requires_grad=True).sum().backward()

    def gradient(rank: int) -> float:
        weight = torch.ones(3, requires_grad=True)
        (weight * rank).sum().backward()
        return weight.grad.sum().item()

    assert run(gradient, 2) == [0, 3]
