"""The checkpoints of a run: save, find, load."""

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.checkpoint import folders, places, rescue
from megatron_ext.checkpoint.agreement import Council
from megatron_ext.checkpoint.loading import InnerState, Load, load_weights, verify
from megatron_ext.checkpoint.saved import find
from megatron_ext.checkpoint.saving import Form, Save, Written
from megatron_ext.checkpoint.staging import Staging, in_place
from megatron_ext.checkpoint.state import StateTensor, TrainingState
from megatron_ext.errors import ConfigError, DataError, StackError, TrainingError
from megatron_ext.replicas import Replicas

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """How a save ended: `written`, or in the background perhaps `error`."""

    step: int
    written: Written | None = None
    error: StackError | None = None


class Checkpoints:
    """The checkpoints below one folder, which all processes of all replicas share.

    Every process of every replica makes one and calls the same methods in the same order.
    """

    def __init__(
        self,
        folder: Path,
        replicas: Replicas,
        keep_last: int = 2,
        keep_every: int = 0,
        observe: Callable[[str], None] = lambda event: None,
        one_place: bool = True,
    ):
        """`observe` is told of each stage of a save as it is passed, on the saving thread.

        `keep_last`, `keep_every`: see `CheckpointConfig`. `one_place`: all replicas see the same
        `folder`; else each sees one of its own.
        """
        self._one_place = one_place
        self._root = folder
        self._replicas = replicas
        self._prune = lambda root: folders.prune(root, keep_last, keep_every)
        self._observe = observe
        self._staging = Staging()
        self._background: _Background | None = None
        size, index = replicas.world_size, replicas.index
        self._inside = range(index * size, (index + 1) * size)
        own_store, store = replicas.own_store.clone(), replicas.store.clone()
        self._in_replica = Council(replicas, own_store, "checkpoint", self._inside)
        self._everyone = Council(replicas, store, "checkpoint", range(replicas.count * size))

    def find(self, resume: str) -> Path | None:
        """The checkpoint to go on from, or None to begin anew. Also clears away leftovers.

        `resume` is "auto" (the newest, if there is any), "none", or the path of a checkpoint or of
        a folder of checkpoints. Raises ConfigError if beginning anew, or from an older checkpoint,
        would sooner or later collide with checkpoints that are there; DataError if the path holds
        no checkpoint.
        """
        what = "search for checkpoints"
        if self._one_place:
            return self._everyone.decide(what, None, lambda _: self._find(resume))
        is_first = self._replicas.rank == 0
        path = Path(resume) if resume not in ("auto", "none") else None
        here = places.steps(self._root, path) if is_first else None
        step = self._everyone.decide(what, here, lambda words: places.newest(words, resume))
        if is_first and path is None:
            places.forget_later(self._root, step)
            self._mend_latest(next(reversed(folders.committed(self._root)), None))
        self._everyone.decide("search done", None, lambda _: None)
        return None if step is None else places.folder_of(self._root, path, step)

    def resume(
        self, how: str, state: TrainingState, inner: InnerState = "clone", fallback: bool = False
    ) -> Path | None:
        """Find what `how` means, load it, and return where it was; None where a run begins anew.

        With `fallback` and `how` "auto", a damaged checkpoint is set aside, and the one before it
        is taken. Raises what `find` and `load` raise.
        """
        while (path := self.find(how)) is not None:
            try:
                self.load(path, state, inner)
                return path
            except DataError as error:
                if not fallback or how != "auto":
                    raise
                self._set_aside(path, str(error))
        return None

    def load(self, path: Path, state: TrainingState, inner: InnerState = "clone") -> None:
        """Check every file of a checkpoint, then fill the state's live tensors from it.

        The run may be cut otherwise (TP, PP, CP, DP) than the one that saved, and have another
        number of replicas; see `Load` for the rules, and `inner`. Raises DataError naming the
        damaged file, and ConfigError if the checkpoint does not hold this run's state.
        """
        content = verify(path, self._replicas, self._everyone, self._one_place)
        load = Load(path, content, self._replicas, inner)
        load.run(state, self._in_replica, self._everyone)

    def load_weights(self, path: Path, masters: Iterable[StateTensor]) -> Path:
        """Check every file of a checkpoint, then fill the masters with its global weights.

        `path` is a checkpoint's, or a folder of checkpoints, whose newest is taken. Nothing else of
        it is taken over. Returns which one it was. Raises what `load` raises.
        """
        chosen = self._everyone.decide("search for weights", None, lambda _: find(path)[-1])
        verify(chosen, self._replicas, self._everyone, self._one_place)
        load_weights(chosen, list(masters), self._in_replica, self._everyone)
        return chosen

    def save(self, state: TrainingState, step: int) -> Outcome:
        """Save; returns once the checkpoint is committed.

        Raises TrainingError on every process if any of them could not write; what was saved
        earlier is untouched then.
        """
        self._report(self.wait())
        save = self._save(step)
        save.stage(state, in_place)
        return Outcome(step, save.write_and_commit(self._in_replica, self._everyone))

    def save_light(self, state: TrainingState, step: int) -> Outcome:
        """Save what all replicas share, and the counters, beside the complete checkpoints.

        `find` takes such a one by its path only. Raises what `save` raises.
        """
        self._report(self.wait())
        save = self._save(step, light=True)
        save.stage(state, in_place)
        return Outcome(step, save.write_and_commit(self._in_replica, self._everyone))

    def save_in_background(self, state: TrainingState, step: int) -> None:
        """Copy the state, and write it on another thread while training goes on.

        Waits for the background save before it, whose failure, if nobody asked `poll` or `wait`
        for it, is logged.
        """
        self._report(self.wait())
        save = self._save(step)
        save.stage(state, self._staging.copy)
        self._background = _Background(
            step,
            lambda: save.write_and_commit(self._in_replica, self._everyone),
        )

    def rescue(self, state: TrainingState, step: int) -> Written | None:
        """Save what this replica holds, by itself, because another one is lost; then end.

        `find` makes a checkpoint of what the replicas rescued (see rescue.py); None where they have
        no place in common. Raises PeerError if a rank of this replica is lost too, and
        TrainingError if it could not write.
        """
        if not self._one_place:
            return None
        # A background save may be waiting in the councils that were made for saves.
        council = Council(self._replicas, self._replicas.own_store.clone(), "rescue", self._inside)
        # A rank may have seen the loss a time-out before the others.
        council.decide(f"rescue of step {step}", None, lambda _: None, patience=2)
        name = folders.part_name(step, self._replicas.index)
        form = Form(name, together=False, latest=False)
        save = Save(self._root, step, form, self._replicas, self._observe, lambda root: None)
        save.stage(state, in_place)
        try:
            return save.write_and_commit(council, council)
        finally:
            council.adjourn(f"rescue of step {step}")

    def poll(self) -> Outcome | None:
        """How the background save ended, if it has ended since it was last asked for."""
        if self._background is None or self._background.is_alive():
            return None
        return self.wait()

    def wait(self) -> Outcome | None:
        """Wait for the background save to end; None if there is none. Call it before exiting."""
        if self._background is None:
            return None
        background, self._background = self._background, None
        background.join()
        return background.outcome

    def _save(self, step: int, light: bool = False) -> Save:
        prune = folders.prune_light if light else self._prune
        form = Form(folders.name_of(step, light), light, self._one_place, latest=not light)
        return Save(self._root, step, form, self._replicas, self._observe, prune)

    def _report(self, outcome: Outcome | None) -> None:
        if outcome is not None and outcome.error is not None and self._everyone.is_chair:
            logger.error("%s", outcome.error)

    def _set_aside(self, path: Path, damage: str) -> None:
        def judge(_: list[None]) -> None:
            if path == folders.committed(path.parent)[0]:
                raise DataError(f"{damage}; there is no other checkpoint to fall back to")
            logger.warning("%s; it is set aside", damage)
            if self._one_place:
                folders.set_aside(path)

        self._everyone.decide(f"setting {path} aside", None, judge)
        if not self._one_place and self._replicas.rank == 0:
            folders.set_aside(path)

    def _find(self, resume: str) -> Path | None:
        for leftover in folders.leftovers(self._root):
            logger.warning("removing %s, left by an interrupted save", leftover)
            folders.discard(leftover)
        self._root.mkdir(parents=True, exist_ok=True)
        rescue.put_together(self._root)
        newest = next(reversed(folders.committed(self._root)), None)
        self._mend_latest(newest)
        if resume == "auto":
            return newest
        chosen = None if resume == "none" else find(Path(resume))[-1]
        # Another start than the newest would leave two histories in one folder.
        if newest is not None and (chosen is None or not self._is_ahead(chosen, newest)):
            raise ConfigError(
                f"resume={resume}, but run.dir holds checkpoints, up to {newest}; resume=auto goes "
                "on from there; else move them away or choose another run.dir"
            )
        return chosen

    def _is_ahead(self, chosen: Path, newest: Path) -> bool:
        """Whether it is the newest, or a light one of the same run that came after it."""
        if not chosen.resolve().is_relative_to(self._root.resolve()):
            return False
        step = folders.step_of(chosen, light=True)
        return chosen.samefile(newest) or (step is not None and step > folders.step_of(newest))

    def _mend_latest(self, newest: Path | None) -> None:
        """`latest` is for people and scripts; what counts is which folders are committed."""
        said = folders.read_latest(self._root)
        if said == (newest.name if newest else None):
            return
        if newest is None:
            logger.warning("%s/latest names %s, which is not there", self._root, said)
            folders.discard(self._root / folders.LATEST)
            return
        logger.warning(
            "%s/latest %s; the newest checkpoint is %s, and latest is set to it",
            self._root,
            "is missing" if said is None else f"says {said!r}",
            newest.name,
        )
        folders.point_latest(self._root, newest)


class _Background(threading.Thread):
    def __init__(self, step: int, work: Callable[[], Written]):
        # Whoever exits without waiting discards the save, as a kill would.
        super().__init__(name=f"checkpoint-{step}", daemon=True)
        self._work = work
        self.outcome = Outcome(step)
        self.start()

    def run(self) -> None:
        step = self.outcome.step
        try:
            self.outcome = Outcome(step, written=self._work())
        except StackError as error:
            self.outcome = Outcome(step, error=error)
        except Exception as error:
            what = f"checkpoint of step {step}"
            logger.exception("%s", what)
            self.outcome = Outcome(step, error=TrainingError(f"{what} failed: {error!r}"))
