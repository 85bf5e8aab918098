"""Which files to read, in which order, and the partition that each belongs to."""

import gzip
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from data_prep.errors import DataError, UsageError

LIST_SUFFIXES = (".paths", ".paths.gz", ".txt", ".list")
# What tells the outputs of one partition apart.
_OF_OUTPUT = re.compile(r"(\.validation)?(-\d{5})?$")
# Control characters, and the surrogates that stand for bytes that are not UTF-8.
_UNPRINTABLE = re.compile("[\x00-\x1f\x7f\ud800-\udfff]")


@dataclass(frozen=True)
class Source:
    """One input file.

    `name` is its path relative to the root of the input: the same base name occurs in several
    partitions of Nemotron-CC, so nothing may be keyed by base name.
    """

    path: str
    name: str
    partition: str


def find(given: Path, root: Path | None = None, where: str = "") -> list[Source]:
    """The input files below `given` (a file, a list of paths, or a tree), in order of name.

    `root` is the folder that a list's paths are relative to (default: the list's own folder).
    `where` selects by Hive keys, as in `quality=high,medium-high kind=actual`.
    """
    if not given.exists():
        raise UsageError(f"input {given}: there is no such file or folder")
    given = given.absolute()
    if given.is_dir():
        base, names = given, _names_in_tree(given)
    elif given.name.endswith(LIST_SUFFIXES):
        base = (root or given.parent).absolute()
        names = _names_in_list(given, base)
    else:
        base, names = given.parent, [given.name]
    if not names:
        raise DataError(f"input {given}: holds no files")
    outer = _hive_tail(base)
    sources = [
        Source(str(base / name), name, "/".join((*outer, *_hive(name))) or "all")
        for name in sorted(names, key=os.fsencode)
    ]
    selected = _select(sources, where)
    _refuse_odd_files(selected)
    _refuse_clashes({source.partition for source in selected})
    return selected


def refuse_inside(out: Path, given: Path) -> None:
    """An output inside the input tree would be read as input by the next run."""
    if given.is_dir() and out.resolve().is_relative_to(given.resolve()):
        raise UsageError(f"--output {out}: lies inside the input {given}; choose a folder outside")


def _names_in_tree(base: Path) -> list[str]:
    names = []
    seen: dict[tuple[int, int], str] = {}
    for folder, subfolders, files in os.walk(base, onerror=_unreadable, followlinks=True):
        _refuse_second(folder, Path(folder).stat(), seen)  # a link to a folder above never ends
        # Leading dots and underscores mark what writers leave beside data (.crc, _SUCCESS).
        subfolders[:] = [name for name in subfolders if not name.startswith((".", "_"))]
        relative = Path(folder).relative_to(base)
        names += [(relative / name).as_posix() for name in files if name[0] not in "._"]
    return names


def _unreadable(error: OSError) -> NoReturn:
    """What os.walk would pass over: the files of a folder that cannot be listed."""
    raise DataError(f"input {error.filename}: cannot be listed ({error.strerror.lower()})")


def _refuse_odd_files(sources: list[Source]) -> None:
    """Raise DataError for what would block a reader, come twice, or break a line of the manifest.

    A cache of links beside what they lead to would give every document twice.
    """
    seen: dict[tuple[int, int], str] = {}
    for source in sources:
        if odd := _UNPRINTABLE.search(source.path):
            raise DataError(
                f"input {source.path!a}: its name holds {odd[0]!a}, which neither a list nor a "
                "manifest in UTF-8 can name; rename it"
            )
        try:
            status = Path(source.path).stat()
        except OSError as error:
            raise DataError(f"input {source.path}: {error.strerror.lower()}") from error
        if not stat.S_ISREG(status.st_mode):
            raise DataError(f"input {source.path}: is no regular file")
        _refuse_second(source.path, status, seen)


def _refuse_clashes(partitions: set[str]) -> None:
    """Raise DataError where one partition's output would have the name of another's part."""
    for name in sorted(partitions):
        other = _OF_OUTPUT.sub("", name)
        if other != name and other in partitions:
            raise DataError(
                f"partition {name}: is named as an output of partition {other} may be; rename it"
            )


def _refuse_second(path: str, status: os.stat_result, seen: dict[tuple[int, int], str]) -> None:
    file = (status.st_dev, status.st_ino)
    if file in seen:
        raise DataError(
            f"input {path}: is {seen[file]} by another name (a link?), so its documents would "
            "come twice; remove one of them"
        )
    seen[file] = path


def _names_in_list(path: Path, base: Path) -> list[str]:
    names = listed_names(path)
    if missing := [name for name in names if not (base / name).is_file()]:
        shown = ", ".join(missing[:3]) + (", …" if len(missing) > 3 else "")
        raise DataError(
            f"list {path}: {len(missing)} of {len(names)} files are not below {base}: {shown}; "
            "download them, or name the folder they are relative to with --root"
        )
    return names


def choose_names(names: list[str], where: str) -> list[str]:
    """Those of a list's names that `where` selects."""
    found = [Source("", name, "/".join(_hive(name))) for name in names]
    return [source.name for source in _select(found, where)]


def listed_names(path: Path) -> list[str]:
    """The paths in a list, plain or gzip.

    Raises:
        UsageError: there is no such list. DataError: it is damaged, empty, or names a file twice.
    """
    if not path.is_file():
        raise UsageError(f"list {path}: there is no such file")
    raw = path.read_bytes()
    try:
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise DataError(f"list {path}: cannot be read ({error})") from error
    names = [line.strip() for line in text.split("\n") if line.strip()]
    if duplicates := len(names) - len(set(names)):
        raise DataError(f"list {path}: {duplicates} paths occur more than once")
    if escaping := [name for name in names if name.startswith("/") or ".." in name.split("/")]:
        raise DataError(f"list {path}: {escaping[0]!r} does not lie below the list's folder")
    return names


def _hive(name: str) -> list[str]:
    return [part for part in Path(name).parent.parts if "=" in part]


def _hive_tail(base: Path) -> list[str]:
    """Hive folders that end `base` itself, so that naming a subtree keeps its partition."""
    tail: list[str] = []
    for part in reversed(base.parts):
        if "=" not in part:
            break
        tail.insert(0, part)
    return tail


def keys_of(partition: str) -> dict[str, str]:
    """The Hive keys of a partition, with their values."""
    return dict(part.split("=", 1) for part in partition.split("/") if "=" in part)


def parse_where(where: str, option: str = "--where") -> dict[str, set[str]]:
    """`quality=high,low kind=actual` as `{"quality": {"high", "low"}, "kind": {"actual"}}`."""
    wanted: dict[str, set[str]] = {}
    for term in where.split():
        key, equals, values = term.partition("=")
        if not (key and equals and all(values.split(","))):
            raise UsageError(f"{option}: {term!r} is not of the form key=value[,value…]")
        wanted.setdefault(key, set()).update(values.split(","))
    return wanted


def _select(sources: list[Source], where: str) -> list[Source]:
    keys = [keys_of(source.partition) for source in sources]
    wanted = parse_where(where)
    for key, values in wanted.items():
        present = {found[key] for found in keys if key in found}
        if not present:
            known = ", ".join(sorted({key for found in keys for key in found})) or "none"
            raise UsageError(f"--where: no input has the key {key!r} (keys in the paths: {known})")
        if unknown := sorted(values - present):
            there = ", ".join(sorted(present))
            raise UsageError(f"--where: no input has {key}={unknown[0]} (there are: {there})")
    selected = [
        source
        for source, found in zip(sources, keys, strict=True)
        if all(found.get(key) in values for key, values in wanted.items())
    ]
    if not selected:
        raise UsageError(f"--where {where!r}: no input file matches all of its terms")
    return selected
