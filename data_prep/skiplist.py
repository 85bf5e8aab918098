"""Records to leave out, by input and number: what `dedup` writes and `tokenize --skip` reads.

A folder: `skip.json` (the inputs, with their hashes), and `<input>.npy`, the numbers of that
input's records to skip, ascending, uint64.
"""

import json
from pathlib import Path

import numpy as np

from data_prep import files
from data_prep.errors import DataError, UsageError

INDEX = "skip.json"


class SkipList:
    """A finished skip list.

    Raises:
        UsageError: `folder` holds none. DataError: it is damaged.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        path = folder / INDEX
        if not path.is_file():
            raise UsageError(f"--skip {folder}: holds no {INDEX}; make it with data_prep dedup")
        try:
            self._inputs = {row["path"]: row for row in files.read_json(path)["inputs"]}
        except (json.JSONDecodeError, UnicodeDecodeError, KeyError) as error:
            raise DataError(f"{path}: is damaged ({error})") from error
        self.fingerprint = files.sha256_of(path)

    def check_names(self, names: list[str]) -> None:
        """Refuse inputs that the list knows nothing of."""
        if unknown := [name for name in names if name not in self._inputs]:
            raise UsageError(
                f"--skip {self.folder}: was made without {unknown[0]}; run dedup on the same input"
            )

    def of(self, name: str, sha256: str) -> np.ndarray:
        """Numbers of the records of an input to skip, ascending."""
        row = self._inputs[name]
        if row["sha256"] != sha256:
            raise DataError(f"{name}: is not the file that dedup read (its hash differs)")
        path = self.folder / row["file"]
        if not path.is_file() or files.sha256_of(path) != row["file_sha256"]:
            raise DataError(f"{path}: is missing or damaged; run dedup again")
        return np.load(path)
