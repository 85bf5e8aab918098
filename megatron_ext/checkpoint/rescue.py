"""A checkpoint made of what the other replicas saved when one was lost.

A replica that waits in vain for another cannot agree with the rest on anything: they fail at the
same exchange, but each by itself, and the store between them may be what was lost. So each writes a
part of its own, `step-00000170.replica-1/`, which holds all that it needs. Whoever resumes puts the
parts of one step together: an ordinary checkpoint of fewer replicas, inside a round, from whose
masters the run goes on with as many replicas as it likes (see `loading.Load`). What the lost one
had trained on since its last outer step is lost with it.
"""

import logging
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.checkpoint import folders, manifest
from megatron_ext.checkpoint.manifest import Manifest
from megatron_ext.checkpoint.saved import Saved
from megatron_ext.checkpoint.saving import SHARED, replica_folder

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Part:
    saved: Saved
    replica: int
    rounds: tuple[int, ...]  # outer steps that each fragment had taken


def put_together(root: Path) -> Path | None:
    """Make a checkpoint of the newest parts below `root`, if any are newer than the others.

    Parts that are older, or that lack an outer step which another has, are removed with a warning.
    An interruption leaves the parts as they were. Returns the new checkpoint.

    Raises DataError if a part's manifest or counters are damaged.
    """
    found = folders.parts(root)
    newest = max((folders.step_of(path) or 0 for path in folders.committed(root)), default=-1)
    last = max((step for step, _, _ in found), default=-1)
    made = None
    if last > newest:
        parts = [_read(path, replica) for step, replica, path in found if step == last]
        # A replica that took the last outer step has in it what the others had trained until then.
        rounds = max(part.rounds for part in parts)
        chosen = [part for part in parts if part.rounds == rounds]
        made = _join(root, last, chosen)
        found = [entry for entry in found if entry[2] not in {part.saved.path for part in chosen}]
        for part in chosen:
            folders.discard(part.saved.path)
    for _, _, path in found:
        logger.warning("removing %s, which newer checkpoints have left behind", path)
        folders.discard(path)
    return made


def _read(path: Path, replica: int) -> _Part:
    saved = Saved(path)
    outer = saved.counters(replica).get("outer", {"fragments": []})
    rounds = tuple(fragment["rounds"] for fragment in outer["fragments"])
    return _Part(saved, replica, rounds)


def _join(root: Path, step: int, parts: list[_Part]) -> Path:
    partial = root / f"{folders.name_of(step)}{folders.PARTIAL}"
    files = {}
    for number, part in enumerate(parts):
        own, renumbered = f"{replica_folder(part.replica)}/", f"{replica_folder(number)}/"
        for name, record in part.saved.manifest.files.items():
            if name.startswith(own):
                target = renumbered + name.removeprefix(own)
            elif number == 0:  # what is shared is the same in all of them
                assert name.startswith(f"{SHARED}/"), name
                target = name
            else:
                continue
            _link(part.saved.path / name, partial / target)
            files[target] = record
    saved = parts[0].saved
    layout = saved.layout | {"replicas": len(parts)}
    survivors = [part.replica for part in parts]
    about = saved.manifest.about | {"layout": layout, "replicas": "all", "rescued": survivors}
    manifest.write(partial, Manifest(about, files))
    path = folders.commit(partial)
    folders.point_latest(root, path)
    lost = sorted({*range(saved.layout["replicas"])} - {*survivors})
    logger.warning(
        "%s is put together from what replicas %s saved; what replicas %s had trained on since "
        "their last outer step is lost",
        path,
        ", ".join(map(str, survivors)),
        ", ".join(map(str, lost)) or "(none)",
    )
    return path


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copyfile(source, target)
        folders.sync(target)
