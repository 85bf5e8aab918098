"""What a finished output folder holds beside the indexed files."""

import importlib.metadata
import json
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import yaml

from data_prep import files
from data_prep.assemble import Output, Target
from data_prep.cleaning import packages_of
from data_prep.errors import DataError, UsageError
from data_prep.plan import FORMAT, Plan, Scan, Unit
from data_prep.work import MANIFEST, WorkFolder

PROVENANCE = "provenance.jsonl"
REJECTS = "rejects.jsonl"
BLEND = "blend.yaml"
TOKENIZER_FOLDER = "tokenizer"


@dataclass(frozen=True)
class Result:
    """All that a run has made, ready to be published."""

    plan: Plan
    scans: dict[int, Scan]
    done: list[tuple[Unit, dict]]  # units with their receipts, in output order
    targets: list[Target]
    library: str
    below: int  # sampling hashes that were taken


@dataclass(frozen=True)
class Publication:
    """What goes into an output folder; the files themselves lie in `.work/assembled`."""

    manifest: dict  # without "outputs"
    outputs: list[Output]
    provenance: list[dict]
    rejects: list[Path]
    tokenizer: Path


def publish(work: WorkFolder, publication: Publication) -> dict:
    """Move everything to its place; the manifest comes last and makes it valid.

    Each step may be repeated after a crash. Returns the manifest.
    """
    out = work.out
    for output in publication.outputs:
        for suffix in (".bin", ".idx"):
            name = output.prefix + suffix
            source = work.path / "assembled" / name
            if source.exists():
                (out / name).parent.mkdir(parents=True, exist_ok=True)
                source.replace(out / name)
        files.sync_folder((out / output.prefix).parent)
    scratch = work.path / "fresh"
    _join_rejects(out, publication.rejects, scratch)
    rows = "".join(map(files.json_line, publication.provenance))
    files.write_text(out / PROVENANCE, rows, scratch)
    kept = out / TOKENIZER_FOLDER / publication.tokenizer.name
    kept.parent.mkdir(exist_ok=True)
    Path(shutil.copyfile(publication.tokenizer, scratch / kept.name)).replace(kept)
    manifest = {
        **publication.manifest,
        "tokenizer": {
            **publication.manifest["tokenizer"],
            "path": kept.relative_to(out).as_posix(),
        },
        "outputs": [_output_row(output) for output in publication.outputs],
    }
    mixed = yaml.safe_dump(blend(manifest), sort_keys=False, width=1000)
    files.write_text(out / BLEND, mixed, scratch)
    files.write_json(out / MANIFEST, manifest, scratch)
    return manifest


def describe(result: Result) -> dict:
    """The manifest of a run, outputs apart. Equal runs give equal ones: it holds no times."""
    return {
        **{key: value for key, value in result.plan.identity().items() if key != "inputs"},
        "tokenizer": result.plan.tokenizer,
        "versions": {
            "data_prep": "1",
            "library": result.library,
            "numpy": _version("numpy"),
            **{package: _version(package) for package in packages_of(result.plan.options)},
        },
        "root": result.plan.root,
        "sampled_below": result.below,
        "skip_path": result.plan.skip_path,
        "inputs": _input_rows(result),
    }


def _output_row(output: Output) -> dict:
    return {
        "path": f"{output.prefix}.bin",
        "bytes": output.bytes,
        "sha256": output.sha256,
        "documents": output.documents,
        "tokens": output.tokens,
        "dtype": output.dtype,
        "split": output.split,
        "prefix": output.prefix,
        "index": {
            "path": f"{output.prefix}.idx",
            "bytes": output.index_bytes,
            "sha256": output.index_sha256,
        },
    }


def _input_rows(result: Result) -> list[dict]:
    rows: dict[int, dict] = {}
    for index, scan in result.scans.items():
        item = result.plan.inputs[index]
        rows[index] = {
            "path": item.name,
            "partition": item.partition,
            "bytes": item.bytes,
            "sha256": scan.sha256,
            "records": 0,
            "documents": 0,
            "skipped": Counter(),
            "repaired": 0,
            "tokens": 0,
        }
    for unit, receipt in result.done:
        row = rows[unit.input]
        row["records"] += receipt["records"]
        row["skipped"].update(receipt["skipped"])
        row["repaired"] += receipt["repaired"]
        for part in receipt["parts"].values():
            row["documents"] += part["documents"]
            row["tokens"] += part["tokens"]
    for row in rows.values():
        row["skipped"] = dict(sorted(row["skipped"].items()))
    return [rows[index] for index in sorted(rows)]


def provenance(result: Result) -> list[dict]:
    """Which unit of which input each run of documents came from (see locate).

    `input` counts in the manifest's list of inputs.
    """
    position = {index: number for number, index in enumerate(sorted(result.scans))}
    rows = []
    for target in result.targets:
        first = 0
        for piece in target.pieces:
            rows.append(
                {
                    "prefix": target.prefix,
                    "first_document": first,
                    "documents": piece.documents,
                    "input": position[piece.unit.input],
                    "start": piece.unit.start,
                    "end": piece.unit.end,
                    "first_record": piece.unit.first_record,
                }
            )
            first += piece.documents
    return rows


def blend(manifest: dict) -> dict:
    """What training reads: weights by tokens, which sum to 1 in each list."""
    tokenizer = manifest["tokenizer"]
    described = {
        key: tokenizer[key] for key in ("kind", "path", "fingerprint", "vocab_size", "eod")
    }
    made: dict = {"format": 1, "tokenizer": described}
    for split in ("train", "validation"):
        rows = [row for row in manifest["outputs"] if row["split"] == split]
        tokens = sum(row["tokens"] for row in rows)
        if rows:
            made[split] = [
                {
                    "prefix": row["prefix"],
                    "weight": row["tokens"] / tokens,
                    "documents": row["documents"],
                    "tokens": row["tokens"],
                }
                for row in rows
            ]
    return made


def _join_rejects(out: Path, parts: list[Path], scratch: Path) -> None:
    """One file in output order, absent where there is nothing to say."""
    if content := "".join(part.read_text(encoding="utf-8") for part in parts if part.exists()):
        files.write_text(out / REJECTS, content, scratch)


def _version(package: str) -> str:
    return importlib.metadata.version(package)


def read_manifest(out: Path) -> dict:
    """The manifest of a finished output.

    Raises:
        UsageError: there is none. DataError: it is damaged.
    """
    path = out / MANIFEST
    if not path.is_file():
        raise UsageError(f"{out}: holds no {MANIFEST}, so it is no finished output of data_prep")
    try:
        manifest = files.read_json(path)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: is damaged ({error})") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise DataError(f"{path}: is no manifest of data_prep's format {FORMAT}")
    return manifest


def names_in(out: Path) -> list[str]:
    """The files that make up a finished output, its manifest last; empty where there is none."""
    if not (out / MANIFEST).is_file():
        return []
    manifest = read_manifest(out)
    rows = manifest["outputs"]
    tokens = [entry["path"] for row in rows for entry in (row, row["index"])]
    return [*tokens, PROVENANCE, REJECTS, BLEND, manifest["tokenizer"]["path"], MANIFEST]


def read_blend(path: Path) -> dict:
    """A blend file. Raises DataError where it is damaged."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: is no YAML ({error})") from error
    if not isinstance(found, dict) or found.get("format") != 1:
        raise DataError(f"{path}: is no blend of format 1")
    return found


def read_provenance(out: Path) -> list[dict]:
    """The rows of `provenance`. Raises DataError where they are missing or damaged."""
    path = out / PROVENANCE
    try:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: is missing or damaged ({error})") from error
