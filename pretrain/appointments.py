"""Saves, and ends of a run, at a step that all processes of all replicas agree on."""

import logging
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, TracebackType
from typing import Literal

from megatron_ext.diloco.config import OuterConfig
from megatron_ext.replicas import Replicas
from pretrain import running

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""They ask the run to save and end."""
SAVE_SIGNAL = signal.SIGUSR2
"""Asks it to save and go on."""
SAVE_FILE = "save"
"""A file of this name in the run's folder asks for the same; it is removed."""

What = Literal["save", "end"]


class Appointments:
    """Listens for signals inside a `with` block, for files, and for the clock.

    A process that a signal reaches leaves a note in the store. The first process reads it, looks
    for the files and at the clock and, before it begins step s, announces the step after which all
    save, or save and end. Nobody can have taken that step by then: inside a replica no step ends
    without everybody's share of the gradient norm, and a replica runs ahead of another for a round
    at most, and the delay of what it waits for.
    """

    def __init__(
        self, replicas: Replicas, outer: OuterConfig, folder: Path, every_minutes: float = 0.0
    ):
        """`folder`: of the run. `every_minutes`: 0 asks for no saves by the clock."""
        self._store = replicas.store
        self._announces = replicas.launcher_rank == 0
        self._alone = replicas.count == 1
        self._is_cut_off = False
        self._ahead = 0
        if replicas.count > 1:
            self._ahead = 2 * outer.interval if outer.delay else outer.interval
        self._folder = folder
        self._file = folder / SAVE_FILE
        self._every_seconds = 60 * every_minutes
        self._saved_seconds = time.monotonic()
        self._signals: set[int] = set()
        self._count = 0  # announcements that this process knows
        self._steps: dict[int, What] = {}

    def begin(self, step: int) -> None:
        """Call before inner step `step`."""
        with self._store_may_be_lost():
            self._pass_on(step)

    def _pass_on(self, step: int) -> None:
        if self._is_cut_off:
            return
        while self._signals:
            number = self._signals.pop()
            what = "save" if number == SAVE_SIGNAL else "end"
            self._store.set(f"appointments/asked/{what}", signal.Signals(number).name)
        if not self._announces:
            return
        pending = self._steps.values()
        if "end" not in pending and (why := self._asked("end") or self._stop_file(step)):
            self._announce(
                step,
                "end",
                f"{why}: the run saves after step {{}} and ends; the same "
                "command goes on from there",
            )
        elif not pending and (why := self._asked("save") or self._file_or_clock()):
            self._announce(step, "save", f"{why}: the run saves after step {{}} and goes on")

    def due(self, step: int) -> What | None:
        """What all processes do after inner step `step`, the same in each of them."""
        with self._store_may_be_lost():
            self._read()
        return self._steps.pop(step, None)

    def _read(self) -> None:
        while not self._is_cut_off and self._store.check([f"appointments/{self._count}"]):
            after, what = self._store.get(f"appointments/{self._count}").decode().split()
            self._count += 1
            self._steps[int(after)] = what

    @contextmanager
    def _store_may_be_lost(self) -> Iterator[None]:
        """The store ends with replica 0. The others learn it together, at their next exchange."""
        try:
            yield
        except RuntimeError:
            if self._alone:
                raise
            self._is_cut_off = True

    def _asked(self, what: What) -> str | None:
        key = f"appointments/asked/{what}"
        if not self._store.check([key]):
            return None
        why = self._store.get(key).decode()
        self._store.delete_key(key)
        return why

    def _stop_file(self, step: int) -> str | None:
        if not running.stop_is_requested(self._folder):
            return None
        running.take_stop(self._folder, step + self._ahead)
        return "launch stop"

    def _file_or_clock(self) -> str | None:
        if self._file.exists():
            self._file.unlink(missing_ok=True)
            return str(self._file)
        if self._every_seconds and time.monotonic() - self._saved_seconds >= self._every_seconds:
            return f"{self._every_seconds / 60:g} minutes"
        return None

    def _announce(self, step: int, what: What, message: str) -> None:
        after = step + self._ahead
        self._store.set(f"appointments/{self._count}", f"{after} {what}")
        self._count += 1
        self._steps[after] = what
        self._saved_seconds = time.monotonic()
        logger.warning(message.format(after))

    def __enter__(self) -> "Appointments":
        numbers = (*SIGNALS, SAVE_SIGNAL)
        self._handlers = {number: signal.signal(number, self._note) for number in numbers}
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
        self._signals.add(number)
