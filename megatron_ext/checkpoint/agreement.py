"""Decisions that all processes of all replicas share, over the store and without collectives.

A collective would tie a background save to the training loop's process groups; notes in the store
can be exchanged from any thread.
"""

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store
from torch.distributed.checkpoint import CheckpointException

from megatron_ext.errors import PeerError, StackError
from megatron_ext.replicas import Replicas


class Council:
    """Members in fixed order, the first of which (the chair) decides for all.

    Every member calls `decide` the same number of times in the same order. Not thread-safe: a
    thread of its own needs a council of its own.
    """

    def __init__(self, replicas: Replicas, store: Store, name: str, members: range):
        """`members`: launcher ranks, this process among them. `name` is unique among councils.

        `store` is a clone of the replicas' store, because a wait blocks its connection.
        """
        self._replicas = replicas
        self._store = PrefixStore(f"council/{name}", store)
        self._members = members
        self._seat = members.index(replicas.launcher_rank)
        self._decisions = 0

    @property
    def is_chair(self) -> bool:
        """Whether this process judges."""
        return self._seat == 0

    def decide(
        self, what: str, word: Any, judge: Callable[[list[Any]], Any], patience: int = 1
    ) -> Any:
        """Hand in `word`, and return what the chair's `judge` makes of all words, in seat order.

        A StackError that `judge` raises is raised on every member. Raises PeerError naming who
        sent no word within `patience` times the replicas' time-out. What is exchanged is pickled:
        it comes from this run's own processes.
        """
        key = f"{self._decisions}"
        self._store.set(f"{key}/{self._seat}", pickle.dumps(word))
        if self.is_chair:
            verdict = self._judge(what, key, judge, patience)
            self._store.set(f"{key}/verdict", pickle.dumps(verdict))
            # Everyone has handed in this word, so everyone has read the verdict before it.
            self._store.delete_key(f"{self._decisions - 1}/verdict")
        else:
            # Longer than the chair, whose verdict may be that a third process is missing.
            self._wait(what, [f"{key}/verdict"], range(1), patience + 1)
            verdict = pickle.loads(self._store.get(f"{key}/verdict"))
        self._decisions += 1
        if isinstance(verdict, StackError):
            raise verdict
        return verdict

    def adjourn(self, what: str) -> None:
        """Call after the last decision before the processes end, each by itself.

        The chair's may host the store, so it leaves when all others have read what was decided.
        """
        self._store.set(f"left/{self._seat}", "")
        if self.is_chair:
            seats = range(len(self._members))
            self._wait(what, [f"left/{seat}" for seat in seats], seats, patience=1)

    def _judge(self, what: str, key: str, judge: Callable[[list[Any]], Any], patience: int) -> Any:
        """The verdict, or the error that stands for it."""
        seats = range(len(self._members))
        keys = [f"{key}/{seat}" for seat in seats]
        try:
            self._wait(what, keys, seats, patience)
            words = [pickle.loads(word) for word in self._store.multi_get(keys)]
            return judge(words)
        except StackError as error:
            return error
        except Exception as error:
            # A fault of the program: the others must not wait for a verdict that never comes.
            self._store.set(f"{key}/verdict", pickle.dumps(StackError(f"{what}: {error!r}")))
            raise
        finally:
            for word in keys:
                self._store.delete_key(word)

    def _wait(self, what: str, keys: list[str], seats: range, patience: int) -> None:
        timeout_seconds = patience * self._replicas.timeout_seconds
        try:
            self._store.wait(keys, timedelta(seconds=timeout_seconds))
        except dist.DistError:
            missing = [
                self._members[seat]
                for seat, key in zip(seats, keys, strict=True)
                if not self._store.check([key])
            ]
            raise PeerError(
                f"{what}: no word within {timeout_seconds:g} s from {self._replicas.names(missing)}"
            ) from None


class Failure:
    """Remembers the first failure of this process, so that it can be handed to a council.

    A process that raised at once would leave the others waiting for its word.
    """

    def __init__(self) -> None:
        self.error: str | None = None

    @contextmanager
    def catch(self) -> Iterator[None]:
        """Remember, instead of raising, what the block raises."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit, PeerError):
            raise
        except BaseException as error:  # torch's CheckpointException is no Exception
            self.error = self.error or describe(error)


def describe(error: BaseException) -> str:
    """One line that says what went wrong."""
    if isinstance(error, CheckpointException):  # torch's bundle of the errors of several ranks
        error = next(iter(error.failures.values()))[0]
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else type(error).__name__
