"""`OUT/.work`: the lock, the plan, and the receipts of what is finished.

.work/lock                       held while a run works; the kernel frees it when the run dies
.work/plan.json                  the plan that everything else here belongs to
.work/scans/<input>.json         one receipt per scanned input
.work/units/<input>/<unit>/      one folder per finished unit, put there by a single rename:
                                 receipt.json, <split>.bin, <split>.lengths, rejects.jsonl
                                 (and <split>.hashes with --max-tokens)
.work/fresh/                     what is being written
.work/assembled/                 outputs that are being put together from the units
"""

import contextlib
import json
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

from data_prep import files
from data_prep.errors import UsageError
from data_prep.lock import Lock
from data_prep.plan import Plan, Scan, Unit, differences

MANIFEST = "manifest.json"
# What says, in `.work`, which command works here: tokenize and dedup, merge, download.
PLAN, MERGE, STREAM = "plan.json", "merge.json", "stream.json"
SAMPLING = "sampling.json"


class WorkFolder:
    """Work in progress below an output folder."""

    def __init__(self, out: Path):
        self.out = out
        self.path = out / ".work"
        self._lock = Lock(self.path / "lock", out)

    # --- one run at a time

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Hold the output folder while a run works; one that finished nothing leaves nothing.

        Raises:
            UsageError: another run holds it, or nothing can be written there.
            DataPrepError: the disk is full.
        """
        existed = self.out.exists()
        with files.telling_a_full_disk(self.out), self._lock:
            try:
                yield
            except BaseException:
                if not self._holds("scans", "units", "assembled", "batches"):
                    shutil.rmtree(self.path, ignore_errors=True)
                    if not existed:
                        with contextlib.suppress(OSError):  # it holds something else by now
                            self.out.rmdir()
                raise

    def _holds(self, *folders: str) -> bool:
        """Whether there is any file in these folders."""
        found = (path for name in folders for path in (self.path / name).rglob("*"))
        return any(path.is_file() for path in found)

    def remove(self) -> None:
        """Delete all work; the lock's file goes last."""
        for entry in self.path.iterdir():
            if entry.is_dir():
                shutil.rmtree(entry)
            elif entry.name != "lock":
                entry.unlink()
        (self.path / "lock").unlink()
        self.path.rmdir()

    def clear_leftovers(self) -> None:
        """Remove what a run left that ended while it was clearing up."""
        if self.path.exists():
            with self._lock:
                self.remove()

    def drop_units(self) -> None:
        """Drop what was tokenised, to do it again; in one step, lest half a unit stays."""
        dropped = (self.path / "units").rename(self.path / "fresh" / "dropped")
        (self.path / "units").mkdir()
        shutil.rmtree(dropped)

    def forget(self) -> None:
        """Drop what is finished: the same run again could only end as this one does."""
        for name in ("scans", "units"):
            shutil.rmtree(self.path / name)

    # --- the plan

    def begin(self, plan: Plan) -> None:
        """Adopt the work of an interrupted run of the same plan, or begin.

        A plan of which no unit was finished gives way to any other.

        Raises:
            UsageError: the folder holds work of another plan; says what differs.
        """
        path = self.path / PLAN
        identity = plan.identity()
        if path.exists():
            old = going_on(files.read_json(path), identity)
            for index, item in enumerate(plan.inputs):
                # Of an input that was never read to its end, nothing has been used.
                if item.name in old["inputs"] and self.scan(index) is None:
                    old["inputs"][item.name] = identity["inputs"][item.name]
            found = differing(old, identity, self._changed(plan))
            if found and self._holds("units"):
                refuse_other(self.out, found)
            if found:
                shutil.rmtree(self.path / "scans")
                (self.path / SAMPLING).unlink(missing_ok=True)
        else:
            self.refuse_strays()
        shutil.rmtree(self.path / "fresh", ignore_errors=True)
        for name in ("scans", "units", "fresh", "assembled"):
            (self.path / name).mkdir(exist_ok=True)
        files.write_json(path, identity)
        (self.path / "mtimes.json").write_text(
            json.dumps([item.mtime_ns for item in plan.inputs]), encoding="utf-8"
        )

    def refuse_strays(self) -> None:
        """Refuse a folder that holds data of unknown origin, or another command's work.

        Raises:
            UsageError: names a file of it.
        """
        strays = [
            *(path for name in (PLAN, MERGE, STREAM) if (path := self.path / name).exists()),
            *self.out.glob("**/*.bin"),
            *self.out.glob("**/*.idx"),
        ]
        if strays:
            raise UsageError(
                f"{self.out}: holds {strays[0].relative_to(self.out)} already, which is not of "
                "this run; choose another output folder"
            )

    def _changed(self, plan: Plan) -> list[str]:
        """Inputs touched since they were scanned, whose content is no longer what was read."""
        path = self.path / "mtimes.json"
        known = json.loads(path.read_text()) if path.exists() else []
        changed = []
        for index, (item, mtime_ns) in enumerate(zip(plan.inputs, known, strict=False)):
            scan = self.scan(index)
            touched = item.mtime_ns != mtime_ns
            if scan and touched and files.sha256_of(Path(item.path)) != scan.sha256:
                changed.append(item.name)
        return changed

    # --- the bound below which sampling hashes are tokenised (--max-tokens)

    def set_sampling(self, below: int) -> None:
        files.write_json(self.path / SAMPLING, {"below": below})

    def sampling(self) -> int:
        """It; 0 before it was chosen."""
        path = self.path / SAMPLING
        return files.read_json(path)["below"] if path.exists() else 0

    # --- receipts

    def scan(self, index: int) -> Scan | None:
        path = self._scan_path(index)
        return Scan.from_dict(files.read_json(path)) if path.exists() else None

    def commit_scan(self, index: int, scan: Scan) -> None:
        files.write_json(self._scan_path(index), scan.as_dict())

    def _scan_path(self, index: int) -> Path:
        return self.path / "scans" / f"{index:06d}.json"

    def unit_folder(self, unit: Unit) -> Path:
        return self.path / "units" / unit.name

    def receipt(self, unit: Unit) -> dict | None:
        path = self.unit_folder(unit) / "receipt.json"
        return files.read_json(path) if path.exists() else None

    def fresh_folder(self, unit: Unit) -> Path:
        """An empty folder of this process's own to write a unit into."""
        name = f"{unit.name.replace('/', '-')}-{socket.gethostname()}-{os.getpid()}"
        folder = self.path / "fresh" / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def commit_unit(self, unit: Unit, fresh: Path, receipt: dict) -> None:
        """Publish a finished unit with one rename; a twin that came first stays."""
        files.write_json(fresh / "receipt.json", receipt)
        target = self.unit_folder(unit)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            fresh.rename(target)
        except OSError:
            if self.receipt(unit) is None:
                raise
            shutil.rmtree(fresh)
        files.sync_folder(target.parent)


def differing(old: dict, new: dict, changed: list[str]) -> list[str]:
    """In what two identities, and the content of the inputs named `changed`, differ."""
    return differences(old, new) + [f"inputs.{name}: content changed" for name in changed]


def refuse_other(out: Path, found: list[str]) -> NoReturn:
    """Raise UsageError with what was found to differ."""
    more = f"; and {len(found) - 20} more" if len(found) > 20 else ""
    raise UsageError(
        f"{out}: belongs to another run, and was left as it is; choose another output folder, "
        "or delete this one. What differs: " + "; ".join(found[:20]) + more
    )


def going_on(old: dict, new: dict) -> dict:
    """`old` as a resumed run may see it: a stopped run may go on with `--bad-records skip`.

    Units that were finished under `stop` held no bad record, so they are the same under `skip`.
    """
    options = {**old["options"], "max_bad": new["options"]["max_bad"]}
    if options["bad_records"] == "stop":
        options["bad_records"] = new["options"]["bad_records"]
    return {**old, "options": options}
