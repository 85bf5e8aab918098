"""What a run has written down so far, read from its folder, also while it goes on."""

import json
import os
from pathlib import Path
from typing import Any

from megatron_ext.errors import ConfigError, DataError
from pretrain import yaml_subset

# More than a line takes.
_TAIL_BYTES = 1 << 14


class RunFolder:
    """The records of one run."""

    def __init__(self, path: Path):
        """Raises ConfigError if `path` is no run's folder."""
        if not (path / "config.yaml").is_file():
            raise ConfigError(f"{path} is no run's folder: there is no config.yaml in it")
        self.path = path

    def config(self) -> dict[str, Any]:
        """The run's options by section."""
        return yaml_subset.read(self.path / "config.yaml")

    def records(self, name: str) -> list[dict[str, Any]]:
        """The lines of `name`.jsonl; [] where there are none, as of rounds without an outer loop.

        Raises DataError for a line that is no JSON object.
        """
        path = self.path / f"{name}.jsonl"
        if not path.is_file():
            return []
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        # The run may be writing the last one.
        return [
            record_of(f"{path}:{number}", line)
            for number, line in enumerate(lines, 1)
            if line.endswith("\n")
        ]

    def last(self, name: str) -> dict[str, Any] | None:
        """The last whole line of `name`.jsonl, without reading what stands before it."""
        path = self.path / f"{name}.jsonl"
        if not path.is_file():
            return None
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            tail, length = b"", _TAIL_BYTES
            # Two ends of lines enclose the last whole one, unless it is the first.
            while tail.count(b"\n") < 2 and len(tail) < size:
                file.seek(-min(length, size), os.SEEK_END)
                tail, length = file.read(min(length, size)), 2 * length
        whole = tail.splitlines(keepends=True)
        if whole and not whole[-1].endswith(b"\n"):
            whole.pop()
        return record_of(str(path), whole[-1].decode()) if whole else None


def record_of(place: str, line: str) -> dict[str, Any]:
    """A line's JSON object. Raises DataError, which says where it stands, if it is none."""
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise DataError(f"{place}: not a JSON object: {line.strip()[:60]!r}")
    return record
