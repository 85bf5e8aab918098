"""Run tasks on a Ray cluster whose nodes share the file system; the units are those of one machine.

Ray repeats a task whose node was lost. That is sound because a unit is published by one rename, and
a twin that came first stays.
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from data_prep.errors import DataPrepError, UsageError
from data_prep.executor import STALL_SECONDS, Task
from data_prep.plan import Plan
from data_prep.work import WorkFolder
from data_prep.worker import Step, Worker


class RayPool:
    """At most `workers` tasks at a time, on the cluster of RAY_ADDRESS or a local one.

    Use as a context manager.

    Raises:
        UsageError: Ray is not installed. DataPrepError: the cluster cannot be reached.
    """

    def __init__(self, plan: Plan, work: WorkFolder, workers: int):
        try:
            import ray
        except ImportError as error:
            raise UsageError("--executor ray: needs the package ray (pip install ray)") from error
        self._ray = ray
        self._workers = workers
        code = str(Path(__file__).parents[1])
        path = os.pathsep.join(filter(None, (code, os.environ.get("PYTHONPATH"))))
        try:
            ray.init(
                address=os.environ.get("RAY_ADDRESS"),
                log_to_driver=False,
                logging_level="error",
                runtime_env={"env_vars": {"PYTHONPATH": path}},
            )
        except ConnectionError as error:
            raise DataPrepError(f"--executor ray: no cluster answers ({error})") from error
        self._do = ray.remote(num_cpus=1, max_retries=-1)(_do)
        self._shared = ray.put((plan, work.out.absolute()))

    def __enter__(self) -> "RayPool":
        return self

    def __exit__(self, *_: object) -> None:
        self._ray.shutdown()

    def run(self, tasks: Iterable[Task], listen: Callable) -> None:
        """Do all tasks, each once, in any order; see executor.LocalPool.run."""
        waiting = iter(tasks)
        running: dict = {}
        while True:
            while len(running) < self._workers and (task := next(waiting, None)):
                running[self._do.remote(self._shared, task.method, task.argument)] = task
            if not running:
                return
            done, _ = self._ray.wait(list(running), timeout=STALL_SECONDS)
            if not done:
                labels = ", ".join(task.label for task in list(running.values())[:3])
                raise DataPrepError(
                    f"--executor ray: nothing was finished for {STALL_SECONDS} s; waiting for "
                    f"{labels}; are the cluster's nodes alive?"
                )
            for reference in done:
                task = running.pop(reference)
                listen(0, task.label, self._result(reference), True)

    def _result(self, reference: object) -> Step:
        try:
            return self._ray.get(reference)
        except self._ray.exceptions.RayTaskError as error:
            raise error.cause from None


def _do(shared: tuple[Plan, Path], method: str, argument: object) -> Step:
    """One task, on whatever node."""
    plan, out = shared
    steps = [Step()]
    getattr(Worker(plan, WorkFolder(out)), method)(argument, steps.append)
    return Step(*(sum(values) for values in zip(*(vars(s).values() for s in steps), strict=True)))
