"""Run tasks on the processes of this machine; a worker that dies is named, not waited for."""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

from data_prep.errors import DataPrepError
from data_prep.plan import Plan
from data_prep.work import WorkFolder
from data_prep.worker import Step, Worker

STALL_SECONDS = 3600  # without a word from any worker: one text may take minutes, not hours
_REPORT_SECONDS = 0.2
_PR_SET_PDEATHSIG = 1


class Task(NamedTuple):
    """`method` of Worker with its one argument; `label` is what a person reads."""

    method: str
    argument: Any
    label: str


# Called with (worker number, task label, what it did, is the task finished).
Listener = Callable[[int, str, Step, bool], None]


def run_in_process(plan: Plan, work: WorkFolder, tasks: Iterable[Task], listen: Listener) -> None:
    """One worker: this process."""
    worker = Worker(plan, work)
    for task in tasks:
        getattr(worker, task.method)(
            task.argument, lambda step, label=task.label: listen(0, label, step, False)
        )
        listen(0, task.label, Step(), True)


@contextlib.contextmanager
def executor(plan: Plan, work: WorkFolder, workers: int, kind: str = "local") -> Iterator[Callable]:
    """A function that runs tasks; its processes start before any thread of the progress display.

    `kind`: `local` for this machine's processes, `ray` for a cluster's.
    """
    if kind == "ray":
        from data_prep.ray_executor import RayPool

        with RayPool(plan, work, workers) as pool:
            yield pool.run
    elif workers == 1:
        yield lambda tasks, listen: run_in_process(plan, work, tasks, listen)
    else:
        with LocalPool(plan, work, workers) as pool:
            yield pool.run


class LocalPool:
    """Worker processes that live through all phases of a run. Use as a context manager."""

    def __init__(self, plan: Plan, work: WorkFolder, workers: int):
        context = multiprocessing.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes: list[multiprocessing.Process] = []
        for _ in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, plan, work.out, os.getpid()), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def __enter__(self) -> "LocalPool":
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def run(self, tasks: Iterable[Task], listen: Listener) -> None:
        """Do all tasks, each once, in any order.

        Raises:
            DataPrepError: the first failure of a task, or the name of a worker that died.
        """
        waiting = iter(tasks)
        busy: dict[Connection, Task] = {}
        for pipe in self._pipes:
            self._hand_out(pipe, waiting, busy)
        while busy:
            heard = wait(list(busy), timeout=STALL_SECONDS)
            if not heard:
                raise self._stall(busy)
            for pipe in heard:
                number, task = self._pipes.index(pipe), busy[pipe]
                try:
                    kind, content = pipe.recv()
                except (EOFError, OSError) as error:
                    raise self._death(number, task) from error
                if kind == "failed":
                    raise content
                listen(number, task.label, content, kind == "done")
                if kind == "done":
                    del busy[pipe]
                    self._hand_out(pipe, waiting, busy)

    def _hand_out(self, pipe: Connection, waiting: Iterable[Task], busy: dict) -> None:
        task = next(waiting, None)
        if task is None:
            return
        busy[pipe] = task
        try:
            pipe.send(task)
        except OSError as error:
            raise self._death(self._pipes.index(pipe), task) from error

    def _stall(self, busy: dict[Connection, Task]) -> DataPrepError:
        tasks = ", ".join(
            f"{task.label} by process {self._processes[self._pipes.index(pipe)].pid}"
            for pipe, task in busy.items()
        )
        return DataPrepError(
            f"no worker was heard of for {STALL_SECONDS} s; waiting for {tasks}; does the file "
            "system hang? finished units are kept: run the same command again"
        )

    def _death(self, number: int, task: Task) -> DataPrepError:
        process = self._processes[number]
        process.join(timeout=5)
        code = process.exitcode
        how = f"signal {signal.Signals(-code).name}" if code and code < 0 else f"exit code {code}"
        hint = " (out of memory? try fewer --workers)" if code == -signal.SIGKILL else ""
        return DataPrepError(
            f"worker {number} (process {process.pid}) died with {how}{hint} while on {task.label}; "
            "finished units are kept: run the same command again"
        )


def _serve(pipe: Connection, plan: Plan, out: Path, parent: int) -> None:
    """The life of a worker process."""
    _die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it and ends us
    worker = Worker(plan, WorkFolder(out))
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        reporter = _Reporter(pipe)
        try:
            getattr(worker, task.method)(task.argument, reporter)
        except Exception as error:
            pipe.send(("failed", _portable(error)))
        else:
            pipe.send(("done", reporter.pending))


class _Reporter:
    """Sums steps and sends them a few times a second."""

    def __init__(self, pipe: Connection):
        self._pipe = pipe
        self._sent = time.monotonic()
        self.pending = Step()

    def __call__(self, step: Step) -> None:
        self.pending = Step(
            *(a + b for a, b in zip(vars(self.pending).values(), vars(step).values(), strict=True))
        )
        if time.monotonic() - self._sent > _REPORT_SECONDS:
            self._pipe.send(("step", self.pending))
            self._sent = time.monotonic()
            self.pending = Step()


def _portable(error: Exception) -> Exception:
    """Our own errors and the system's travel as they are; of others the traceback must."""
    if isinstance(error, DataPrepError | OSError):
        return error
    return RuntimeError("".join(traceback.format_exception(error)))


def _die_with_parent(parent: int) -> None:
    """An orphan must not go on writing where the next run writes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)
