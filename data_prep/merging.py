"""`merge`: join finished outputs; the shards of one run give the bytes of that run unsharded."""

import contextlib
import hashlib
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data_prep import assemble, files, outputs
from data_prep.errors import DataError, UsageError
from data_prep.indexed import IndexedFile
from data_prep.plan import differences, tokenizer_identity
from data_prep.progress import Reporter
from data_prep.selection import SPLITS
from data_prep.work import MANIFEST, MERGE, WorkFolder

_CHUNK_TOKENS = 1 << 21


@dataclass(frozen=True)
class Slice:
    """The documents of one unit inside a finished output; `row` is its line of provenance."""

    out: Path
    row: dict

    @property
    def documents(self) -> int:
        return self.row["documents"]

    @property
    def path(self) -> Path:
        return self.out / self.row["prefix"]

    def lengths(self, data: IndexedFile) -> np.ndarray:
        first = self.row["first_document"]
        if first + self.documents > len(data):
            raise DataError(f"{data.idx_path}: has fewer documents than its provenance says")
        return data.lengths[first : first + self.documents]

    def chunks(self, data: IndexedFile) -> Iterator[bytes]:
        """The tokens, as they lie in the file."""
        start = int(data.offsets[self.row["first_document"]]) // data.dtype.itemsize
        end = start + int(self.lengths(data).sum(dtype=np.int64))
        for at in range(start, end, _CHUNK_TOKENS):
            yield data.tokens[at : min(at + _CHUNK_TOKENS, end)].tobytes()


def merge(given: list[Path], out: Path, reporter: Reporter, consume: bool = False) -> dict:
    """Join the outputs `given` into `out`; returns the manifest.

    `consume` deletes each of their files as soon as it stands in `out`, so that the room needed
    beside them is that of the largest, and in the end what is left of them.

    Shards of one run are put in their order, and all must be there. Other outputs are joined in the
    order given; they must share the tokenizer, and none of their inputs.

    Raises:
        UsageError: they cannot be joined. DataError: one of them is damaged.
    """
    work = WorkFolder(out)
    if consume and (out / MANIFEST).exists() and (work.path / MERGE).exists():
        return _clear(given, work)
    manifests = {path: outputs.read_manifest(path) for path in given}
    if len({path.resolve() for path in given}) < len(given):
        raise UsageError("the same output is named twice")
    _check_tokenizers(manifests)
    shards = any(manifest["shard"] != "0/1" for manifest in manifests.values())
    manifests = _in_shard_order(manifests) if shards else manifests
    manifest = _of_shards(manifests) if shards else _of_runs(manifests)
    with work.held():
        _begin(work, manifests, consume)
        _check_room(work, manifests, consume)
        made = _Merge(manifests, work, reporter, consume).write(manifest)
        if not consume:
            work.remove()
    return _clear(given, work) if consume else made


def _clear(given: list[Path], work: WorkFolder) -> dict:
    """Delete what is left of outputs that were consumed, and nothing else that lies there."""
    for path in given:
        for name in outputs.names_in(path):
            (path / name).unlink(missing_ok=True)
        folders = [folder for folder in path.rglob("*") if folder.is_dir()]
        for folder in [*sorted(folders, key=lambda f: len(f.parts), reverse=True), path]:
            with contextlib.suppress(OSError):  # not empty, or gone already
                folder.rmdir()
    work.clear_leftovers()
    return outputs.read_manifest(work.out)


def _begin(work: WorkFolder, manifests: dict[Path, dict], consume: bool) -> None:
    """Refuse a folder that holds anything but an interrupted merge of the same outputs."""
    marker = work.path / MERGE
    identity = {str(path.absolute()): files.sha256_of(path / MANIFEST) for path in manifests}
    identity["--consume"] = str(consume)
    if marker.exists():
        if found := differences(files.read_json(marker), identity):
            raise UsageError(f"--output {work.out}: holds another merge: {'; '.join(found)}")
    elif not all(path.is_relative_to(work.path) for path in manifests):  # batches of a download
        work.refuse_strays()
    files.write_json(marker, identity)
    shutil.rmtree(work.path / "fresh", ignore_errors=True)
    for name in ("assembled", "fresh"):
        (work.path / name).mkdir(exist_ok=True)


def _check_room(work: WorkFolder, manifests: dict[Path, dict], consume: bool) -> None:
    """Raise DataPrepError where what is still to be written will not fit the disk."""
    rows = [row for manifest in manifests.values() for row in manifest["outputs"]]
    disk = work.out.stat().st_dev
    moved = consume and all(path.stat().st_dev == disk for path in manifests)
    largest_or_all = max if moved else sum  # what was moved is deleted, file by file
    needed = largest_or_all(row["bytes"] for row in rows) + sum(r["index"]["bytes"] for r in rows)
    there = sum(p.stat().st_size for p in (work.path / "assembled").rglob("*") if p.is_file())
    advice = (
        "give --consume, which deletes what is joined" if not consume else "choose another disk"
    )
    files.check_room(work.out, needed - (0 if moved else there), advice)


def _check_tokenizers(manifests: dict[Path, dict]) -> None:
    first, *others = manifests
    for other in others:
        ours, theirs = (tokenizer_identity(manifests[path]["tokenizer"]) for path in (first, other))
        if found := differences(ours, theirs, "tokenizer."):
            raise UsageError(f"{other} cannot be joined with {first}: " + "; ".join(found))


def _in_shard_order(manifests: dict[Path, dict]) -> dict[Path, dict]:
    first = next(iter(manifests))
    common = ("options", "root", "format")
    for path, manifest in manifests.items():
        ours, theirs = ({key: m[key] for key in common} for m in (manifests[first], manifest))
        if found := differences(ours, theirs):
            raise UsageError(f"{path} is a shard of another run than {first}: " + "; ".join(found))
    places = {path: tuple(map(int, m["shard"].split("/"))) for path, m in manifests.items()}
    count = places[first][1]
    if any(of != count for _, of in places.values()):
        raise UsageError("shards of runs with different numbers of shards cannot be joined")
    indices = [index for index, _ in places.values()]
    if missing := sorted(set(range(count)) - set(indices)):
        shown = ", ".join(f"{index}/{count}" for index in missing[:10])
        raise UsageError(f"shards {shown} are missing: name all {count} outputs of the run")
    if len(indices) > count:
        raise UsageError("a shard is named twice")
    return dict(sorted(manifests.items(), key=lambda item: places[item[0]]))


def _of_shards(manifests: dict[Path, dict]) -> dict:
    """The manifest of the whole run, outputs apart: a file may be spread over several shards."""
    rows: dict[str, dict] = {}
    for manifest in manifests.values():
        for row in manifest["inputs"]:
            whole = rows.setdefault(
                row["path"], {**row, **dict.fromkeys(_COUNTS, 0), "skipped": {}}
            )
            if whole["sha256"] != row["sha256"]:
                raise UsageError(f"input {row['path']}: was changed between two shards")
            for key in _COUNTS:
                whole[key] += row[key]
            whole["skipped"] = dict(
                sorted((Counter(whole["skipped"]) + Counter(row["skipped"])).items())
            )
    first = next(iter(manifests.values()))
    inputs = [rows[name] for name in sorted(rows, key=os.fsencode)]
    return {**first, "shard": "0/1", "inputs": inputs}


_COUNTS = ("records", "documents", "repaired", "tokens")


def _of_runs(manifests: dict[Path, dict]) -> dict:
    """A manifest with the inputs of all, named relative to the folder that holds all roots."""
    root = os.path.commonpath([manifest["root"] for manifest in manifests.values()])
    seen: dict[str, Path] = {}
    inputs = []
    for path, manifest in manifests.items():
        for row in manifest["inputs"]:
            if row["documents"] and (other := seen.setdefault(row["sha256"], path)) != path:
                raise UsageError(
                    f"input {row['path']} of {path} is in {other} too: its documents would double"
                )
            inputs.append(
                {**row, "path": os.path.relpath(f"{manifest['root']}/{row['path']}", root)}
            )
    first = next(iter(manifests.values()))
    options = [manifest["options"] for manifest in manifests.values()]
    same = all(one == options[0] for one in options)
    merged = options[0] if same else {"merged": options}
    return {**first, "options": merged, "root": root, "inputs": inputs}


def _slices(manifests: dict[Path, dict], manifest: dict) -> dict[tuple[str, str], list[Slice]]:
    """Slices by (split, partition), with inputs numbered as in the joined manifest."""
    number_of = {row["path"]: number for number, row in enumerate(manifest["inputs"])}
    found: dict[tuple[str, str], list[Slice]] = {}
    for out, own in manifests.items():
        splits = {row["prefix"]: row["split"] for row in own["outputs"]}
        for row in outputs.read_provenance(out):
            source = own["inputs"][row["input"]]
            name = os.path.relpath(f"{own['root']}/{source['path']}", manifest["root"])
            renumbered = {**row, "input": number_of[name]}
            key = (splits[row["prefix"]], source["partition"])
            found.setdefault(key, []).append(Slice(out, renumbered))
    return found


def _moved(group: list[Slice], prefix: str) -> list[dict]:
    rows, first = [], 0
    for piece in group:
        rows.append({**piece.row, "prefix": prefix, "first_document": first})
        first += piece.documents
    return rows


class _Merge:
    """Writes the joined outputs of `manifests`."""

    def __init__(
        self, manifests: dict[Path, dict], work: WorkFolder, reporter: Reporter, consume: bool
    ):
        self.manifests = manifests
        self.work = work
        self.reporter = reporter
        self.consume = consume
        self.rows = {
            out / row["prefix"]: row for out, own in manifests.items() for row in own["outputs"]
        }

    def write(self, manifest: dict) -> dict:
        """Join, publish, and return the manifest; `manifest` is it without the outputs."""
        slices = _slices(self.manifests, manifest)
        limit = min(
            options["documents_per_output"]
            for options in manifest["options"].get("merged", [manifest["options"]])
        )
        self.reporter.phase("merge", sum(row["bytes"] for row in self.rows.values()))
        made, provenance = [], []
        for (split, partition), found in sorted(
            slices.items(), key=lambda item: (SPLITS.index(item[0][0]), os.fsencode(item[0][1]))
        ):
            name = partition if split == "train" else f"{partition}.{split}"
            groups = list(assemble.grouped(found, limit))
            for number, group in enumerate(groups):
                prefix = name if len(groups) == 1 else f"{name}-{number:05d}"
                made.append(self._join(group, prefix, split))
                provenance += _moved(group, prefix)
        first = next(iter(self.manifests))
        return outputs.publish(
            self.work,
            outputs.Publication(
                manifest=manifest,
                outputs=made,
                provenance=provenance,
                rejects=[out / outputs.REJECTS for out in self.manifests],
                tokenizer=first / self.manifests[first]["tokenizer"]["path"],
            ),
        )

    def _join(self, group: list[Slice], prefix: str, split: str) -> assemble.Output:
        if output := assemble.begin(self.work, prefix):
            return output
        bin_path = assemble.path_of(self.work, prefix, ".bin")
        whole = self._whole_files(group) if self.consume else None
        if whole:
            remedy = "make that output again"
            sha256 = assemble.append(whole, bin_path, self.reporter.advance, remedy)
        else:
            sha256 = self._copy(group, bin_path)
        opened = {piece.path: IndexedFile(piece.path, with_tokens=not whole) for piece in group}

        def lengths() -> Iterator[np.ndarray]:
            for piece in group:
                yield piece.lengths(opened[piece.path])

        documents = sum(piece.documents for piece in group)
        dtype = opened[group[0].path].dtype
        return assemble.finish(self.work, prefix, split, dtype, lengths, documents, sha256)

    def _whole_files(self, group: list[Slice]) -> list[assemble.Part] | None:
        """The files that `group` is made of, in order; None where it takes only part of one."""
        documents: Counter[Path] = Counter()
        for piece in group:
            documents[piece.path] += piece.documents
        if any(count != self.rows[path]["documents"] for path, count in documents.items()):
            return None
        return [
            assemble.Part(path.with_name(path.name + ".bin"), r["bytes"], r["tokens"], r["sha256"])
            for path in documents
            if (r := self.rows[path])
        ]

    def _copy(self, group: list[Slice], path: Path) -> str:
        """Write the tokens of `group` to `path`; returns their hash."""
        opened = {piece.path: IndexedFile(piece.path) for piece in group}
        digest = hashlib.sha256()
        with path.open("wb") as file:
            for piece in group:
                for chunk in piece.chunks(opened[piece.path]):
                    digest.update(chunk)
                    file.write(chunk)
                    self.reporter.advance(len(chunk))
        return digest.hexdigest()
