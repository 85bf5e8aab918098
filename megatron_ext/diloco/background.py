"""A thread that does one thing after another, in the order in which they were handed over."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from typing import Any

import torch


class Background:
    """Unlike an executor's, its thread never keeps a process from ending.

    With a GPU it has a stream of its own. A task sees what the stream of its submitter had been
    given until then, and its result is there when its work on the GPU is done; so neither side has
    to order anything, and the submitter's stream never waits.
    """

    def __init__(self, name: str, device: torch.device | None = None):
        cuda = device is not None and device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if cuda else None
        self._tasks: queue.SimpleQueue[tuple[Future, Callable[[], Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, task: Callable[[], Any]) -> Future:
        """Do `task` after everything before it."""
        future: Future = Future()
        self._tasks.put((future, self._ordered(task)))
        return future

    def _ordered(self, task: Callable[[], Any]) -> Callable[[], Any]:
        stream = self._stream
        if stream is None:
            return task
        ready = torch.cuda.current_stream(stream.device).record_event()

        def on_own_stream() -> Any:
            stream.wait_event(ready)
            result = task()
            stream.synchronize()
            return result

        return on_own_stream

    def _work(self) -> None:
        with torch.cuda.stream(self._stream) if self._stream else nullcontext():
            while True:
                future, task = self._tasks.get()
                try:
                    future.set_result(task())
                except BaseException as error:
                    future.set_exception(error)
                del future, task
