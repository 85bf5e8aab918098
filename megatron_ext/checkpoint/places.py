"""Checkpoints of replicas that write in different places: which of them count.

Each place holds a whole checkpoint of its replica. A step counts if every replica has committed it.
"""

import logging
from collections.abc import Sequence
from pathlib import Path

from megatron_ext.checkpoint import folders
from megatron_ext.checkpoint.manifest import Manifest
from megatron_ext.checkpoint.saved import find
from megatron_ext.errors import ConfigError, DataError
from megatron_ext.replicas import Replicas

logger = logging.getLogger(__name__)


def steps(root: Path, path: Path | None) -> list[int] | str:
    """The steps committed in this place, leftovers cleared away; or what is wrong with `path`."""
    if path is not None:
        try:
            return [int(folders.step_of(find(path)[-1]) or 0)]
        except DataError as error:
            return str(error)
    for leftover in folders.leftovers(root):
        logger.warning("removing %s, left by an interrupted save", leftover)
        folders.discard(leftover)
    root.mkdir(parents=True, exist_ok=True)
    return [int(folders.step_of(folder) or 0) for folder in folders.committed(root)]


def newest(words: Sequence[list[int] | str | None], resume: str) -> int | None:
    """The newest step that all replicas committed, from the words of their first ranks.

    Raises DataError if some have checkpoints and none is common, which a lost disk would look like,
    and ConfigError for resume=none where there are any.
    """
    by_replica = [word for word in words if word is not None]
    if wrong := next((word for word in by_replica if isinstance(word, str)), None):
        raise DataError(wrong)
    common = set.intersection(*map(set, by_replica))
    if not common and any(by_replica):
        seen = "; ".join(
            f"replica {index}: {', '.join(map(str, found)) or 'none'}"
            for index, found in enumerate(by_replica)
        )
        raise DataError(
            f"no checkpoint is there that all replicas committed (steps of {seen}); bring the "
            "missing place back, or move the others' checkpoints away to begin anew"
        )
    if common and resume == "none":
        raise ConfigError(
            f"resume=none, but there are checkpoints, up to step {max(common)}; resume=auto goes "
            "on from there; else move them away or choose another run.dir"
        )
    return max(common, default=None)


def forget_later(root: Path, step: int | None) -> None:
    """Remove what only this replica committed, after the newest step that counts."""
    for folder in folders.committed(root):
        if step is not None and (folders.step_of(folder) or 0) > step:
            logger.warning("removing %s, which not all replicas committed", folder)
            folders.discard(folder)


def folder_of(root: Path, path: Path | None, step: int) -> Path:
    """The checkpoint in this place."""
    return root / folders.name_of(step) if path is None else find(path)[-1]


def misfits(content: Manifest, replicas: Replicas) -> list[str]:
    """Why the checkpoint in this place is not this replica's."""
    here = content.about["replicas"]
    if here == "all":
        return []
    if here != [replicas.index]:
        return [f"it is of replica {here[0]}, and replica {replicas.index} was started here"]
    saved = content.about["layout"]["replicas"]
    if saved != replicas.count:
        return [
            f"parallel.replicas is {replicas.count} and was {saved}, which can change only where "
            "all replicas see one place (checkpoint.shared=true)"
        ]
    return []
