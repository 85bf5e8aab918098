"""The folder of a run's checkpoints: names, commit, `latest`, and what is left by accidents.

checkpoints/step-00000100/            committed, complete, never changed again
checkpoints/step-00000200.partial/    being written, or left by a save that was interrupted
checkpoints/step-00000050.removed/    being deleted
checkpoints/light-00000150/           the same of a light one: anchor and outer state only
checkpoints/step-00000170.replica-1/  what one replica saved when another was lost (see rescue.py)
checkpoints/latest                    text: the name of the newest committed folder
"""

import itertools
import os
import re
import shutil
from pathlib import Path

from megatron_ext.checkpoint.manifest import write_durably

LATEST = "latest"
PARTIAL = ".partial"
REMOVED = ".removed"
DAMAGED = ".damaged"

_STEP = re.compile(r"step-(\d{8,})")
_LIGHT = re.compile(r"light-(\d{8,})")
_PART = re.compile(r"step-(\d{8,})\.replica-(\d+)")


def name_of(step: int, light: bool = False) -> str:
    """Folder name of the checkpoint after `step` inner steps."""
    return f"{'light' if light else 'step'}-{step:08d}"


def part_name(step: int, replica: int) -> str:
    """Folder name of what one replica saved for itself after `step` inner steps."""
    return f"{name_of(step)}.replica-{replica}"


def parts(root: Path) -> list[tuple[int, int, Path]]:
    """Step, replica and path of each replica's own part, in this order."""
    if not root.is_dir():
        return []
    found = [(_PART.fullmatch(path.name), path) for path in root.iterdir() if path.is_dir()]
    return sorted((int(name[1]), int(name[2]), path) for name, path in found if name)


def step_of(folder: Path, light: bool = False) -> int | None:
    """The step in a committed folder's name; None for any other name."""
    match = (_LIGHT if light else _STEP).fullmatch(folder.name)
    return int(match.group(1)) if match else None


def committed(root: Path, light: bool = False) -> list[Path]:
    """Committed checkpoints, oldest first; the light ones on their own."""
    if not root.is_dir():
        return []
    found = [path for path in root.iterdir() if step_of(path, light) is not None and path.is_dir()]
    return sorted(found, key=lambda path: step_of(path, light) or 0)


def leftovers(root: Path) -> list[Path]:
    """Folders and files that an interrupted save or deletion left behind."""
    if not root.is_dir():
        return []
    return sorted(
        path
        for path in root.iterdir()
        if path.name == f"{LATEST}{PARTIAL}"
        or (path.suffix in (PARTIAL, REMOVED) and _is_name(path.stem))
    )


def _is_name(text: str) -> bool:
    return any(kind.fullmatch(text) for kind in (_STEP, _LIGHT, _PART))


def commit(partial: Path) -> Path:
    """Make a completely written folder count, by one rename. Returns its new path."""
    for folder in [path for path in partial.rglob("*") if path.is_dir()]:
        sync(folder)
    sync(partial)
    final = partial.with_suffix("")
    # os.rename replaces an empty folder without a word.
    if final.exists():
        raise FileExistsError(f"{final} exists already")
    partial.rename(final)
    sync(final.parent)
    return final


def point_latest(root: Path, target: Path) -> None:
    """Make `latest` name `target`, atomically."""
    temporary = root / f"{LATEST}{PARTIAL}"
    write_durably(temporary, f"{target.name}\n".encode())
    temporary.replace(root / LATEST)
    sync(root)


def read_latest(root: Path) -> str | None:
    """What `latest` says, or None if there is no such file."""
    try:
        return (root / LATEST).read_text(errors="replace").strip()
    except FileNotFoundError:
        return None


def prune(root: Path, keep_last: int, keep_every: int) -> None:
    """Remove committed checkpoints but the newest, and those of every so manyth step (0: none)."""
    for folder in committed(root)[:-keep_last]:
        if not (keep_every and step_of(folder) % keep_every == 0):
            discard(folder)


def prune_light(root: Path) -> None:
    """Remove all light checkpoints but the newest two."""
    for folder in committed(root, light=True)[:-2]:
        discard(folder)


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint so that it counts no more. Returns its new path."""
    numbers = itertools.chain([""], itertools.count(2))
    aside = next(
        path
        for number in numbers
        if not (path := folder.with_name(f"{folder.name}{DAMAGED}{number}")).exists()
    )
    folder.rename(aside)
    sync(aside.parent)
    return aside


def discard(path: Path) -> None:
    """Delete a folder or file so that an interruption leaves no half of a committed folder."""
    if path.suffix not in (PARTIAL, REMOVED):
        path = path.rename(path.with_name(path.name + REMOVED))
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def sync(path: Path) -> None:
    """Force a file's content, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
