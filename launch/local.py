"""All processes of a run on this machine: forked without a GPU, by torchrun with GPUs."""

import contextlib
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType

import torch

from launch.processes import Exit, RankProcesses
from megatron_ext.checkpoint.folders import read_latest
from megatron_ext.errors import ConfigError, PeerError, StackError
from megatron_ext.replicas import ParallelConfig
from pretrain import exit
from pretrain.appointments import SAVE_SIGNAL, SIGNALS
from pretrain.config import Resolved, check_machine

SETTLE_SECONDS = 0.5
"""How long the cause of a failure may come after its first consequence."""
GRACE_SECONDS = 10.0
"""From SIGINT to SIGKILL."""
SAVE_SECONDS = 900.0
"""How long ranks that were asked to stop may go on to a step that they agree on, and save."""


class RankFailure(StackError):
    """A rank failed; carries its exit code."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


@dataclass(frozen=True)
class _Report:
    """What a failing rank tells its parent."""

    message: str
    is_echo: bool
    """It failed only because another process did."""
    same_everywhere: bool
    traceback: str


class _Interrupted(Exception):
    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


def launch(resolved: Resolved, arguments: list[str], debug: bool, verifies: bool) -> None:
    """Run on this machine; returns when all ranks ended well.

    `arguments` are what gave `resolved`, for processes that must read them anew. `verifies`: the
    optimizer's step is verified instead of a model trained.

    Raises StackError with the exit code of the rank that failed first, and its one-line reason.
    """
    check_machine(resolved.config)
    if torch.cuda.is_available():
        command = ["verify-optimizer"] if verifies else []
        _replace_by_torchrun(resolved, [*command, *arguments], debug)

    # Imported once, for all ranks.
    from pretrain.loop import train
    from pretrain.verify_optimizer import verify_optimizer

    task = verify_optimizer if verifies else train
    try:
        supervise(partial(task, resolved), resolved.config.parallel, debug)
    except RankFailure as failure:
        if verifies or failure.exit_code != 128 + signal.SIGINT:
            raise
        latest = read_latest(Path(resolved.config.run.dir) / "checkpoints")
        where = f"goes on from {latest}" if latest else "starts anew: no checkpoint was written"
        raise RankFailure(f"{failure}; the same command {where}", failure.exit_code) from None


def _replace_by_torchrun(resolved: Resolved, arguments: list[str], debug: bool) -> None:
    # CUDA does not survive a fork, so each rank imports for itself.
    processes, gpus = resolved.config.parallel.world_size, torch.cuda.device_count()
    if processes > gpus:
        raise ConfigError(
            f"the layout needs {processes} processes with a GPU each, and this machine has {gpus}"
        )
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    # By default it passes SIGTERM on and gives the ranks 30 s, which may be less than a round.
    torchrun += ["--signals-to-handle=SIGTERM,SIGUSR1,SIGINT,SIGHUP,SIGQUIT"]
    torchrun += [f"--shutdown-timeout={SAVE_SECONDS:.0f}"]
    command = [sys.executable, *torchrun, "--module", "pretrain", *arguments]
    os.execv(sys.executable, [*command, "--debug"] if debug else command)


def supervise(train: Callable[[], None], parallel: ParallelConfig, debug: bool = False) -> None:
    """Call `train` in one forked process for each rank and watch over them.

    The first failure ends all. Raises RankFailure, which names the rank whose failure was the
    cause. SIGTERM and SIGUSR1 are passed on, so that the ranks save and end in good order, which is
    no failure; SIGINT, or another signal after them, ends the ranks. SIGUSR2 is passed on, so that
    they save, and ends nothing.
    """
    failures: list[Exit] = []
    main = partial(_rank, train, parallel.world_size)
    with _interruptible(), RankProcesses(main, parallel.world_size) as ranks, _saves_of(ranks):
        try:
            for end in ranks.exits():
                if end.status != 0 and not failures:
                    ranks.limit(SETTLE_SECONDS)
                if end.status != 0:
                    failures.append(end)
            _end(ranks, signal.SIGKILL)
        except _Interrupted as interrupt:
            if _end(ranks, interrupt.number):
                return
            raise
    if failures:
        raise _failure(failures, parallel.inner_world_size, debug)


def _rank(train: Callable[[], None], world_size: int, rank: int) -> tuple[int, bytes]:
    cores = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, cores // world_size))
    # Until the rank trains, and listens, there is nothing to save.
    signal.signal(SAVE_SIGNAL, signal.SIG_IGN)
    try:
        train()
    except BaseException as error:
        report = _Report(
            message=exit.describe(error),
            is_echo=isinstance(error, PeerError),
            same_everywhere=isinstance(error, ConfigError),
            traceback=traceback.format_exc(),
        )
        code = error.exit_code if isinstance(error, StackError) else 1
        return code, pickle.dumps(report)
    return 0, b""


def _end(ranks: RankProcesses, number: int) -> bool:
    """Ask what still runs to end; the end of the `with` block kills what does not.

    Returns whether all have ended, and well.
    """
    ranks.signal(number)
    # A stopped process can end only when it goes on.
    ranks.signal(signal.SIGCONT)
    ranks.limit(GRACE_SECONDS if number == signal.SIGINT else SAVE_SECONDS)
    # Not `all` of the generator, which would stop at the first failure.
    ended_well = [end.status == 0 for end in ranks.exits()]
    return all(ended_well) and not ranks.running


def _failure(failures: list[Exit], inner_world_size: int, debug: bool) -> RankFailure:
    """The cause among the failures, told once, by the lowest rank that saw it."""
    reports = {end.rank: pickle.loads(end.report) if end.report else None for end in failures}
    causes = [end for end in failures if not (reports[end.rank] and reports[end.rank].is_echo)]
    first = (causes or failures)[0]
    replica = first.rank // inner_world_size
    alike = [
        end.rank
        for end in causes or failures
        if end.status == first.status and end.rank // inner_world_size == replica
    ]
    rank = min(alike)
    name = f"replica {replica} rank {rank % inner_world_size}"
    report = reports[rank]
    if report is None:
        if first.status < 0:
            how = f"was killed by {signal.Signals(-first.status).name}"
        else:
            how = f"ended with exit code {first.status}"
        return RankFailure(f"{name} {how}; the other processes were ended", 1)
    if debug:
        print(report.traceback, file=sys.stderr, end="")
    message = report.message if report.same_everywhere else f"{name}: {report.message}"
    return RankFailure(message, first.status)


@contextlib.contextmanager
def _saves_of(ranks: RankProcesses) -> Iterator[None]:
    """Pass requests to save on to the ranks."""
    handler = signal.signal(SAVE_SIGNAL, lambda number, frame: ranks.signal(number))
    try:
        yield
    finally:
        signal.signal(SAVE_SIGNAL, handler)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Let signals interrupt the block, so that it can pass them on."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise _Interrupted(number)

    handlers = {n: signal.signal(n, interrupt) for n in (signal.SIGINT, *SIGNALS)}
    try:
        yield
    except _Interrupted as interrupted:
        name = signal.Signals(interrupted.number).name
        raise RankFailure(f"stopped by {name}", 128 + interrupted.number) from None
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
