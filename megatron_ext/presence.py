"""Who takes part in a run, who is alive, and how far each process has come.

Every process leaves three notes under its launcher rank in the rendezvous store: a counter that a
background thread advances once a second, the last inner step that it began, and, when it ends, why.
A process that was killed or stopped therefore falls silent within seconds, while one that merely
computes for long does not.
"""

import threading
import time
from collections.abc import Iterable

from torch.distributed import Store

BEAT_SECONDS = 1.0


class Presence:
    """This process's notes in the store, and what it reads from the others'."""

    def __init__(self, store: Store, rank: int, world_size: int):
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._stop = threading.Event()
        self._store_is_lost = False
        store.set(f"step/{rank}", "-1")
        store.set(f"beat/{rank}", "0")
        # A blocking wait holds the connection, so the thread has one of its own.
        self._thread = threading.Thread(
            target=_beat, args=(store.clone(), rank, self._stop), name="heartbeat", daemon=True
        )
        self._thread.start()

    def progress(self, step: int) -> None:
        """Note that this process begins inner step `step`; costs some 20 µs.

        Without the store nothing is noted: it is the next exchange with others that fails.
        """
        if self._store_is_lost:
            return
        try:
            self._store.set(f"step/{self._rank}", str(step))
        except RuntimeError:
            self._store_is_lost = True

    def leave(self, reason: str = "") -> None:
        """Note that this process ends, because of `reason` or ("") in good order."""
        self._stop.set()
        self._thread.join()
        self._store.set(f"left/{self._rank}", reason)

    def steps(self, ranks: Iterable[int]) -> dict[int, int]:
        """The last noted step of each rank that ever reported; -1 before the first step."""
        return {
            rank: int(self._store.get(f"step/{rank}"))
            for rank in ranks
            if self._store.check([f"step/{rank}"])
        }

    def failures(self) -> dict[int, str]:
        """Ranks that have ended because of an error, with its message."""
        left = {rank: self._left(rank) for rank in range(self._world_size)}
        return {rank: reason for rank, reason in left.items() if reason}

    def silent(self) -> list[int]:
        """Ranks that neither ended with a note nor gave a sign of life for 2.5 beats.

        Takes those 2.5 seconds.
        """
        running = [rank for rank in range(self._world_size) if self._left(rank) is None]
        before = self._beats(running)
        time.sleep(2.5 * BEAT_SECONDS)
        after = self._beats(running)
        return [
            rank for rank in running if before[rank] == after[rank] and self._left(rank) is None
        ]

    def _left(self, rank: int) -> str | None:
        key = f"left/{rank}"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _beats(self, ranks: list[int]) -> dict[int, bytes]:
        return dict(zip(ranks, self._store.multi_get([f"beat/{r}" for r in ranks]), strict=True))


def _beat(store: Store, rank: int, stop: threading.Event) -> None:
    count = 0
    try:
        while not stop.wait(BEAT_SECONDS):
            count += 1
            store.set(f"beat/{rank}", str(count))
    except RuntimeError:
        # The store is gone: whoever needs it next says so, with its address.
        return
