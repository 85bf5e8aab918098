"""What a run has written down so far, read from its folder, also while it goes on."""

import json
from pathlib import Path
from typing import Any

from megatron_ext.errors import ConfigError, DataError
from pretrain import yaml_subset


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
        return [_record(path, n, line) for n, line in enumerate(lines, 1) if line.endswith("\n")]


def _record(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        raise DataError(f"{path}:{number}: not a JSON object: {line.strip()[:60]!r}")
    return record
