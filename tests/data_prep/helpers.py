"""Inputs to write and outputs to read back, for the tests of data_prep."""

import contextlib
import gzip
import importlib.util
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import zstandard

from data_prep.cli import main
from data_prep.indexed import IndexedFile
from data_prep.outputs import read_manifest

REPOSITORY = Path(__file__).parents[2]
# Real vocabularies, from the mistral-common package.
VOCABULARIES = Path(importlib.util.find_spec("mistral_common").origin).parent / "data"
SENTENCEPIECE = VOCABULARIES / "tokenizer.model.v1"
TEKKEN = VOCABULARIES / "tekken_240911.json"


def json_lines(texts: Iterable[str]) -> bytes:
    """Records as Nemotron-CC has them."""
    rows = [
        {"text": text, "language": "eng", "warc_record_id": f"<{number}>", "url": None}
        for number, text in enumerate(texts)
    ]
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def write(path: Path, content: bytes, cuts: Iterable[int] = ()) -> Path:
    """Write `content`, compressed as the name says, with frames that end at `cuts`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(compressed(content, path.suffix, cuts))
    return path


def compressed(content: bytes, suffix: str, cuts: Iterable[int] = ()) -> bytes:
    edges = [0, *sorted(cuts), len(content)]
    frames = [content[first:last] for first, last in itertools.pairwise(edges)]
    if suffix == ".gz":
        return b"".join(gzip.compress(frame, mtime=0) for frame in frames)
    if suffix in (".zst", ".zstd"):
        return b"".join(zstandard.ZstdCompressor().compress(frame) for frame in frames)
    return content


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    out: str
    err: str


def command(capsys, *arguments: object) -> Ended:
    """Run a command in this process."""
    capsys.readouterr()
    code = main([str(argument) for argument in arguments])
    printed = capsys.readouterr()
    return Ended(code, printed.out, printed.err)


def process(*arguments: object, **environment: str) -> subprocess.Popen:
    """Start a command in a process and a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "data_prep", *map(str, arguments)],
        cwd=REPOSITORY,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        # A shell's background job would ignore Ctrl-C, and its children too.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def documents(out: Path, split: str | None = None) -> list[list[int]]:
    """Token ids of all documents of an output, in order of its manifest."""
    return [
        ids
        for row in read_manifest(out)["outputs"]
        if split in (None, row["split"])
        for ids in each(IndexedFile(out / row["prefix"]))
    ]


def each(data: IndexedFile) -> list[list[int]]:
    return [data[number].tolist() for number in range(len(data))]


def tree(out: Path) -> dict[str, bytes]:
    """Every file below `out`, with its content."""
    return {
        path.relative_to(out).as_posix(): path.read_bytes()
        for path in sorted(out.rglob("*"))
        if path.is_file()
    }


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[None]:
    """Mount a file system of limited size at `folder`; skips where that is not permitted."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a file system of limited size needs the right to mount")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)
