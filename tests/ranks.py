"""Real gloo ranks for tests: forked from pytest, which has imported torch and megatron-core."""

import faulthandler
import pickle
import signal
import traceback
from collections.abc import Callable, Collection
from typing import Any

import psutil
import torch

from launch.processes import Exit, RankProcesses
from megatron_ext.errors import PeerError

SETTLE_SECONDS = 3.0


def run(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60,
    may_die: Collection[int] = (),
) -> list[Any]:
    """Call `fn(rank, *args)` in `world_size` processes; return their results in rank order.

    A rank finds RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT set, and joins by
    `megatron_ext.replicas.join`. The exception of a rank is raised here, with the rank's traceback
    as a note. A rank that dies, or still runs after `timeout` seconds, fails the test and ends the
    others. A rank in `may_die` may be killed, or stop for ever; its result is then None.
    """
    results: list[Any] = [None] * world_size
    failures: list[Exit] = []
    torch.set_num_threads(1)
    with RankProcesses(lambda rank: _call(fn, rank, args, timeout), world_size) as ranks:
        ranks.limit(timeout + 1)
        for end in ranks.exits():
            if end.status == 0:
                results[end.rank] = pickle.loads(end.report)
            elif end.status > 0 or end.rank not in may_die:
                failures.append(end)
                # The first to end need not be the cause: let the others say what they saw.
                ranks.limit(SETTLE_SECONDS)
            if not set(ranks.running) - set(may_die):
                break
        hanging = sorted(set(ranks.running) - set(may_die))
    if failures:
        raise _cause(failures)
    if hanging:
        raise TimeoutError(f"ranks {hanging} still ran after {timeout} s; see stderr for where")
    return results


def children_left() -> list[psutil.Process]:
    """What this process has started and still runs, but for multiprocessing's own tracker."""
    children = psutil.Process().children(recursive=True)
    return [c for c in children if "multiprocessing.resource_tracker" not in " ".join(c.cmdline())]


def _call(
    fn: Callable[..., Any], rank: int, args: tuple[Any, ...], timeout: float
) -> tuple[int, bytes]:
    faulthandler.dump_traceback_later(timeout, file=2)
    try:
        return 0, pickle.dumps(fn(rank, *args))
    except BaseException as error:
        error.add_note(f"in rank {rank}:\n{traceback.format_exc()}")
        try:
            pickle.loads(report := pickle.dumps(error))
        except Exception:
            report = pickle.dumps(RuntimeError("\n".join([repr(error), *error.__notes__])))
        return 1, report


def _cause(failures: list[Exit]) -> BaseException:
    """The first failure that is not just the echo of another rank's."""
    errors = [
        pickle.loads(end.report)
        if end.report
        else RuntimeError(f"rank {end.rank} ended with {describe_status(end.status)}")
        for end in failures
    ]
    return next((error for error in errors if not isinstance(error, PeerError)), errors[0])


def describe_status(status: int) -> str:
    """ "SIGKILL" or "exit code 1"."""
    return signal.Signals(-status).name if status < 0 else f"exit code {status}"
