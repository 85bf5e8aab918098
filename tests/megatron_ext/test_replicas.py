"""Ranks, replicas and their links, with real gloo processes."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from megatron_ext import host
from megatron_ext.errors import ConfigError, DataError, PeerError
from megatron_ext.replicas import ParallelConfig, initialize_megatron, join
from tests.ranks import run

pytestmark = pytest.mark.usefixtures("fast_heartbeat")


def _places(rank: int, parallel: ParallelConfig) -> dict:
    with join(parallel, timeout_seconds=30) as replicas:
        inside = torch.tensor([float(rank)])
        dist.all_reduce(inside)
        across = torch.tensor([float(rank)])
        replicas.link.allreduce([across]).wait()
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


def _too_few(rank: int) -> str:
    with pytest.raises(ConfigError) as caught:
        join(ParallelConfig(replicas=2, tp=2, pp=2), timeout_seconds=30)
    return str(caught.value)


def test_wrong_world_size_names_the_factors():
    (message,) = set(run(_too_few, 2))
    assert "2 processes were started" in message
    assert "parallel.replicas=2 × parallel.tp=2 × parallel.pp=2" in message
    assert "needs 8" in message


def test_a_process_without_a_launcher_is_alone():
    (result,) = run(_alone, 1)
    assert result == (0, 1, 1, None)


def _alone(rank: int) -> tuple:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]
    with join(ParallelConfig()) as replicas:
        replicas.barrier("end")
        return replicas.index, replicas.count, dist.get_world_size(), replicas.link


def _late(rank: int) -> str | None:
    replicas = join(ParallelConfig(replicas=2, dp=2), timeout_seconds=1)
    replicas.progress(97)
    if rank == 3:
        time.sleep(2.5)
        return None
    with pytest.raises(PeerError) as caught:
        replicas.barrier("checkpoint step 100")
    return str(caught.value)


def test_barrier_that_times_out_names_who_is_missing():
    expected = (
        "checkpoint step 100: no word within 1 s from replica 1 rank 1 (last seen at step 97)"
    )
    assert run(_late, 4)[:3] == [expected] * 3


def _many_barriers(rank: int) -> int:
    with join(ParallelConfig(dp=3), timeout_seconds=30) as replicas:
        for count in range(50):
            replicas.barrier(f"number {count}")
        return replicas.store.num_keys()


def test_barriers_leave_no_keys_behind():
    assert max(run(_many_barriers, 3)) < 60


def _train(rank: int, victim: int, number: int, parallel: ParallelConfig) -> str:
    """Steps of one all-reduce in the replica and one between replicas; `victim` gets a signal."""
    with join(parallel, timeout_seconds=5) as replicas:
        for step in range(100):
            replicas.progress(step)
            if rank == victim and step == 20:
                os.kill(os.getpid(), number)
            try:
                with replicas.guard(f"step {step}"):
                    dist.all_reduce(torch.ones(4))
                    replicas.link.allreduce([torch.ones(4)]).wait()
            except PeerError as error:
                return str(error)
    return "trained to the end"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_killed_or_stopped_rank_is_named_by_all_others(number):
    started = time.monotonic()
    parallel = ParallelConfig(replicas=2, dp=2)
    results = run(_train, 4, 2, number, parallel, may_die=[2])
    assert time.monotonic() - started < 20
    assert results.pop(2) is None
    for message in results:
        assert "replica 1 rank 0 (last seen at step 20)" in message
        assert message.startswith("step 20: no sign of life from replica 1 rank 0")


def _one_fails(rank: int) -> str:
    with join(ParallelConfig(dp=2), timeout_seconds=5) as replicas:
        if rank == 1:
            raise DataError("shard 7 is damaged")
        try:
            with replicas.guard("gradients"):
                dist.all_reduce(torch.ones(4))
        except PeerError as error:
            raise PeerError(f"rank 0 says: {error}") from None
    return "no failure"


def test_cause_of_a_peers_failure_is_told():
    with pytest.raises(DataError, match="shard 7 is damaged"):
        run(_one_fails, 2)
    (message, _) = run(_survivor, 2)
    assert message == ("gradients: replica 0 rank 1 (not yet training) failed: shard 7 is damaged")


def _survivor(rank: int) -> str:
    try:
        return _one_fails(rank)
    except (PeerError, DataError) as error:
        return str(error).removeprefix("rank 0 says: ")


def _one_is_behind(rank: int) -> str:
    with join(ParallelConfig(dp=2), timeout_seconds=1) as replicas:
        replicas.progress(8 if rank == 0 else 7)
        if rank == 1:
            time.sleep(5)
            return ""
        with pytest.raises(PeerError) as caught, replicas.guard("gradients"):
            dist.all_reduce(torch.ones(4))
        return str(caught.value)


def test_rank_that_is_alive_but_behind_is_named():
    message, _ = run(_one_is_behind, 2)
    assert message == "gradients: waited in vain for replica 0 rank 1 (last seen at step 7)"


def test_errors_that_are_not_a_peers_pass_the_guard():
    with pytest.raises(RuntimeError, match="must match"):
        run(_bad_shapes, 1)


def _without_store(rank: int) -> list[str]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    os.environ.update(MASTER_PORT=str(store.port))
    replicas = join(ParallelConfig(), timeout_seconds=5)
    replicas.barrier("first")
    del store
    messages = []
    for wait in (lambda: replicas.barrier("second"), lambda: _fail_in(replicas)):
        with pytest.raises(PeerError) as caught:
            wait()
        messages.append(str(caught.value))
    replicas.close()
    return messages


def _fail_in(replicas) -> None:
    with replicas.guard("gradients"):
        raise dist.DistNetworkError("connection lost")


def test_loss_of_the_store_is_told_as_such():
    (messages,) = run(_without_store, 1)
    for what, message in zip(("second", "gradients"), messages, strict=True):
        assert message.startswith(f"{what}: the rendezvous store no longer answers")


def _bad_shapes(rank: int) -> None:
    with join(ParallelConfig()) as replicas, replicas.guard("nothing"):
        torch.ones(2) + torch.ones(3)


@pytest.mark.parametrize(
    "parallel",
    [
        ParallelConfig(replicas=2, tp=2, pp=2),
        ParallelConfig(tp=2, pp=2, dp=2),
        ParallelConfig(pp=2, interleave=2, dp=2),
    ],
    ids=str,
)
def test_megatron_sees_a_world_that_is_one_replica(parallel):
    inner = parallel.inner_world_size
    for rank, place in enumerate(run(_megatron_place, parallel.world_size, parallel)):
        assert place["world"] == inner
        assert place["tp"] == rank % parallel.tp
        # megatron-core's default order: tp, cp, dp, pp from inside out.
        assert place["dp"] == rank % inner // parallel.tp % parallel.dp
        assert place["pp"] == rank % inner // parallel.tp // parallel.dp
        assert place["chunks"] == (parallel.interleave if parallel.interleave > 1 else None)


def _megatron_place(rank: int, parallel: ParallelConfig) -> dict:
    host.prepare()
    with join(parallel, timeout_seconds=30):
        initialize_megatron(parallel, seed=1)
        return {
            "world": dist.get_world_size(),
            "tp": parallel_state.get_tensor_model_parallel_rank(),
            "dp": parallel_state.get_data_parallel_rank(),
            "pp": parallel_state.get_pipeline_model_parallel_rank(),
            "chunks": parallel_state.get_virtual_pipeline_model_parallel_world_size(),
        }
