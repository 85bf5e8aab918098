"""`download --tokenizer`: download, tokenise and delete in batches, for sets larger than the disk.

Each batch becomes an output of its own below `OUT/.work/batches`; its inputs are deleted before the
next batch is fetched, and when all are done they are joined. A rerun goes on with the first batch
that is not finished.
"""

import dataclasses
import os
import shutil
from pathlib import Path

from data_prep import merging, outputs, run
from data_prep.download import Server, fetch_all
from data_prep.progress import Reporter
from data_prep.work import MANIFEST, WorkFolder


def stream(
    names: list[str], server: Server, request: run.Request, batch_files: int, reporter: Reporter
) -> dict:
    """Make `request.out` from the files `names` of `server`; returns the manifest.

    `request.given` is ignored. At no time do more than `batch_files` inputs lie on the disk.
    """
    work = WorkFolder(request.out)
    if (request.out / MANIFEST).exists():
        work.clear_leftovers()
        return outputs.read_manifest(request.out)
    folder = work.path / "batches"
    inputs = folder / "inputs"  # one root for all batches, so that names are those of the list
    outs = []
    ordered = sorted(names, key=os.fsencode)
    for first in range(0, len(ordered), batch_files):
        batch = ordered[first : first + batch_files]
        out = folder / f"{first // batch_files:06d}"
        outs.append(out)
        if not (out / MANIFEST).exists():
            _keep_only(inputs, batch)
            fetch_all(batch, server, inputs, reporter)
            run.tokenize(dataclasses.replace(request, given=inputs, out=out), reporter)
            shutil.rmtree(inputs)
    return merging.merge(outs, request.out, reporter, consume=True)


def _keep_only(folder: Path, names: list[str]) -> None:
    """Delete what an interrupted run left of another batch, but not a part of this one."""
    kept = {folder / name for name in names}
    for path in folder.rglob("*"):
        whole = path.with_name(path.name.removesuffix(".etag").removesuffix(".part"))
        if path.is_file() and whole not in kept:
            path.unlink()
