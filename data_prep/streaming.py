"""`download --tokenizer`: download, tokenise and delete in batches, for sets larger than the disk.

Each batch becomes an output of its own below `OUT/.work/batches`; its inputs are deleted before the
next batch is fetched, and when all are done they are joined. A rerun goes on with the first batch
that is not finished.
"""

import dataclasses
import os
import shutil
from pathlib import Path

from data_prep import files, merging, outputs, run
from data_prep.download import Server, fetch_all
from data_prep.plan import differences, tokenizer_identity
from data_prep.progress import Reporter
from data_prep.tokenizers.load import load_encoder
from data_prep.work import MANIFEST, STREAM, WorkFolder, going_on, refuse_other


@dataclasses.dataclass(frozen=True)
class Batches:
    """What is fetched: all `names` of `server`, at most `files` of them on the disk at a time."""

    names: list[str]
    server: Server
    files: int
    connections: int


def stream(batches: Batches, request: run.Request, reporter: Reporter) -> dict:
    """Make `request.out` from the files of a server; returns the manifest.

    `request.given` is ignored.

    Raises:
        UsageError: `request.out` belongs to another run. DataError: a file is missing or damaged.
    """
    work = WorkFolder(request.out)
    identity = _identity(batches, request)
    if (request.out / MANIFEST).exists():
        manifest = outputs.read_manifest(request.out)
        if found := differences(_finished(manifest, batches.files), identity):
            refuse_other(request.out, found)
        work.clear_leftovers()
        return manifest
    with work.held():
        _begin(work, identity)
        outs = _tokenize(work, batches, request, reporter)
    return merging.merge(outs, request.out, reporter, consume=True)


def _identity(batches: Batches, request: run.Request) -> dict:
    """What the output depends on, and how the work on it is divided."""
    encoder = load_encoder(request.tokenizer, request.bos, request.eod, request.backend)
    return {
        "options": request.options.as_dict(),
        "tokenizer": tokenizer_identity(encoder.identity().as_dict()),
        "files": dict.fromkeys(batches.names, "listed"),
        "batch_files": batches.files,
    }


def _finished(manifest: dict, batch_files: int) -> dict:
    """The identity of a finished output, in which nothing is left of the batches."""
    options = manifest["options"].get("merged", [manifest["options"]])[-1]
    return {
        "options": options,
        "tokenizer": tokenizer_identity(manifest["tokenizer"]),
        "files": {row["path"]: "listed" for row in manifest["inputs"]},
        "batch_files": batch_files,
    }


def _begin(work: WorkFolder, identity: dict) -> None:
    """Refuse a folder with batches of another list, tokenizer or size of batch."""
    marker = work.path / STREAM
    if marker.exists():
        old = going_on(files.read_json(marker), identity)
        if found := differences(old, identity):
            refuse_other(work.out, found)
    else:
        work.refuse_strays()
    files.write_json(marker, identity)


def _tokenize(
    work: WorkFolder, batches: Batches, request: run.Request, reporter: Reporter
) -> list[Path]:
    """The outputs of all batches, those that an earlier run finished among them."""
    folder = work.path / "batches"
    inputs = folder / "inputs"  # one root for all batches, so that names are those of the list
    outs = []
    ordered = sorted(batches.names, key=os.fsencode)
    for first in range(0, len(ordered), batches.files):
        batch = ordered[first : first + batches.files]
        out = folder / f"{first // batches.files:06d}"
        outs.append(out)
        if not (out / MANIFEST).exists():
            _keep_only(inputs, batch)
            fetch_all(batch, batches.server, inputs, reporter, batches.connections)
            run.tokenize(dataclasses.replace(request, given=inputs, out=out), reporter)
            shutil.rmtree(inputs)
    return outs


def _keep_only(folder: Path, names: list[str]) -> None:
    """Delete what an interrupted run left of another batch, but not a part of this one."""
    kept = {folder / name for name in names}
    for path in folder.rglob("*"):
        whole = path.with_name(path.name.removesuffix(".etag").removesuffix(".part"))
        if path.is_file() and whole not in kept:
            path.unlink()
