"""Ends a run early, at a step that all processes agree on, when a signal asks any of them to."""

import logging
import signal
from types import FrameType, TracebackType

from megatron_ext.diloco.config import OuterConfig
from megatron_ext.replicas import Replicas

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_ASKED, _LAST = "stop/asked", "stop/last-step"


class Stopping:
    """Listens for SIGTERM and SIGUSR1 inside a `with` block.

    A process that was asked to stop leaves a note in the store. The first process reads it and,
    before it begins step s, announces the last step. Nobody can have taken that step by then:
    inside a replica no step ends without everybody's share of the gradient norm, and a replica runs
    ahead of another for a round at most, and the delay of what it waits for.
    """

    def __init__(self, replicas: Replicas, outer: OuterConfig):
        self._store = replicas.store
        self._announces = replicas.launcher_rank == 0
        self._ahead = 0
        if replicas.count > 1:
            self._ahead = 2 * outer.interval if outer.delay else outer.interval
        self._signal: int | None = None
        self._last: int | None = None

    def begin(self, step: int) -> None:
        """Call before inner step `step`."""
        if self._signal is not None:
            self._store.set(_ASKED, signal.Signals(self._signal).name)
            self._signal = None
        if self._announces and self._last is None and self._store.check([_ASKED]):
            self._last = step + self._ahead
            self._store.set(_LAST, str(self._last))
            name = self._store.get(_ASKED).decode()
            logger.warning(
                "%s: the run saves after step %d and ends; the same command goes on from there",
                name,
                self._last,
            )

    def due(self, step: int) -> bool:
        """Whether the run ends after inner step `step`, the same in all processes."""
        if self._last is None and self._store.check([_LAST]):
            self._last = int(self._store.get(_LAST))
        return step == self._last

    def __enter__(self) -> "Stopping":
        self._handlers = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signal = number
