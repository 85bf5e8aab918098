"""A thread that does one thing after another, in the order in which they were handed over."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


class Background:
    """Unlike an executor's, its thread never keeps a process from ending."""

    def __init__(self, name: str):
        self._tasks: queue.SimpleQueue[tuple[Future, Callable[[], Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, task: Callable[[], Any]) -> Future:
        """Do `task` after everything before it."""
        future: Future = Future()
        self._tasks.put((future, task))
        return future

    def _work(self) -> None:
        while True:
            future, task = self._tasks.get()
            try:
                future.set_result(task())
            except BaseException as error:
                future.set_exception(error)
            del future, task
