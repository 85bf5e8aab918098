"""Rank processes forked from one parent that has imported everything already.

Importing torch and megatron-core takes seconds and forking takes milliseconds. The parent must have
no other threads and no process group when it forks; the rendezvous store's server starts after it.
Linux only: a rank is followed through its pidfd and dies with its parent (PR_SET_PDEATHSIG).
"""

import contextlib
import ctypes
import math
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType

from torch.distributed import TCPStore

_PR_SET_PDEATHSIG = 1
_PASSED_ON = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_LOCALHOST = "127.0.0.1"


@dataclass(frozen=True)
class Exit:
    """How one rank ended."""

    rank: int
    status: int
    """Exit code, or minus the signal that killed it."""
    report: bytes
    """What the rank handed over before it ended; empty if it was killed."""


class RankProcesses:
    """`world_size` forked processes with the environment that torchrun would give them.

    Each calls `main(rank)`, which returns its exit code and its report. Use as a context manager:
    whatever still runs at its end, descendants included, is killed.
    """

    def __init__(self, main: Callable[[int], tuple[int, bytes]], world_size: int):
        self._main = main
        self._world_size = world_size
        self._selector = selectors.DefaultSelector()
        self._deadline = math.inf
        self._pids: dict[int, int] = {}
        self._reports = {rank: bytearray() for rank in range(world_size)}
        self._store: TCPStore | None = None

    def _start(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        with socket.create_server((_LOCALHOST, 0), backlog=self._world_size) as listener:
            port = listener.getsockname()[1]
            for rank in range(self._world_size):
                with _blocked_signals():
                    self._fork(rank, listener)
            # The server takes the socket over and closes it, so it gets a copy.
            self._store = TCPStore(
                _LOCALHOST,
                port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=os.dup(listener.fileno()),
            )

    def _fork(self, rank: int, listener: socket.socket) -> None:
        parent = os.getpid()
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(reading)
                port = listener.getsockname()[1]
                listener.close()
                _become_rank(parent, rank, self._world_size, port)
                code, report = self._main(rank)
                with os.fdopen(writing, "wb") as pipe:
                    pipe.write(report)
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        os.close(writing)
        os.set_blocking(reading, False)
        self._pids[rank] = pid
        self._selector.register(reading, selectors.EVENT_READ, (rank, "report"))
        self._selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (rank, "exit"))

    @property
    def running(self) -> list[int]:
        """Ranks that have not ended yet."""
        return list(self._pids)

    def limit(self, seconds: float) -> None:
        """Let `exits` go on for at most `seconds` from now."""
        self._deadline = time.monotonic() + seconds

    def exits(self) -> Iterator[Exit]:
        """Each rank's end, as it comes; stops when no rank is left or the time is over."""
        while self._pids and (left := self._deadline - time.monotonic()) > 0:
            for key, _ in self._selector.select(None if left == math.inf else left):
                rank, kind = key.data
                if kind == "report":
                    self._read(rank, key.fd)
                else:
                    yield self._reap(rank, key.fd)

    def signal(self, number: int) -> None:
        """Send a signal to every rank that still runs."""
        for pid in self._pids.values():
            os.kill(pid, number)

    def _read(self, rank: int, pipe: int) -> None:
        with contextlib.suppress(BlockingIOError):
            while part := os.read(pipe, 1 << 16):
                self._reports[rank] += part
            self._forget(pipe)

    def _reap(self, rank: int, pidfd: int) -> Exit:
        pid = self._pids.pop(rank)
        # Not reaped yet, the process still holds its group's number: no other group can have it.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        _, wait_status = os.waitpid(pid, 0)
        self._forget(pidfd)
        for key in list(self._selector.get_map().values()):
            if key.data == (rank, "report"):
                self._read(rank, key.fd)
        status = os.waitstatus_to_exitcode(wait_status)
        return Exit(rank, status, bytes(self._reports[rank]))

    def _forget(self, descriptor: int) -> None:
        self._selector.unregister(descriptor)
        os.close(descriptor)

    def __enter__(self) -> "RankProcesses":
        try:
            self._start()
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._kill()

    def _kill(self) -> None:
        self.signal(signal.SIGKILL)
        self._deadline = math.inf
        for _ in self.exits():
            pass
        for key in list(self._selector.get_map().values()):
            self._forget(key.fd)
        self._selector.close()
        self._store = None


@contextlib.contextmanager
def _blocked_signals() -> Iterator[None]:
    """No handler of the parent's may run in a child that is not yet a rank."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _become_rank(parent: int, rank: int, world_size: int, port: int) -> None:
    """Give a freshly forked process its surroundings."""
    os.setpgid(0, 0)
    _die_with_parent(parent)
    # What a rank forks (writers of a checkpoint, their manager) must not outlive it either.
    main_thread = threading.get_ident()
    forked_by: list[int] = []

    def before() -> None:
        forked_by[:] = [threading.get_ident(), os.getpid()]

    def after() -> None:
        # The kernel takes the thread that forked for the parent, and a thread may end early.
        if forked_by[0] == main_thread:
            _die_with_parent(forked_by[1])

    os.register_at_fork(before=before, after_in_child=after)
    for number in _PASSED_ON:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PASSED_ON)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR=_LOCALHOST,
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
    )
    # gloo would look the machine's own name up, which need not resolve.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _die_with_parent(parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
