"""`blend`: choose and weigh the outputs that training draws from, and see what that means."""

import os
import re
from pathlib import Path

import yaml

from data_prep import files, outputs
from data_prep.errors import UsageError

# Named blends of Nemotron-CC (arXiv 2412.02595): which values of which Hive keys take part.
NAMED: dict[str, dict[str, set[str]]] = {
    "all": {},
    # Nemotron-CC-HQ, for horizons of about 1 T tokens (section 3).
    "nemotron-cc-hq": {"quality": {"high"}, "kind2": {"actual", "diverse_qa_pairs"}},
    # The two phases of the 15 T horizon (appendix E).
    "long-phase-1": {"quality": {"high", "medium-high", "medium"}},
    "long-phase-2": {"quality": {"high"}},
}


def make(out: Path, name: str, weights: dict[str, float], path: Path) -> dict:
    """A blend of the finished output `out`, for a file at `path`.

    Weights are by tokens among the outputs of the named blend; `weights` replaces those of single
    training prefixes (or adds prefixes), and 0 leaves one out. Each list then sums to 1.

    Raises:
        UsageError: an unknown name or prefix, or nothing that is left.
    """
    manifest = outputs.read_manifest(out)
    if name not in NAMED:
        raise UsageError(f"--use {name!r}: there are {', '.join(NAMED)}")
    known = {row["prefix"] for row in manifest["outputs"] if row["split"] == "train"}
    if unknown := sorted(set(weights) - known):
        raise UsageError(
            f"--set {unknown[0]!r}: is no training prefix ({', '.join(sorted(known))})"
        )
    blend = outputs.blend(manifest)
    folder = os.path.relpath(out, path.parent)
    chosen: dict = {"format": 1, "tokenizer": dict(blend["tokenizer"])}
    chosen["tokenizer"]["path"] = os.path.normpath(f"{folder}/{blend['tokenizer']['path']}")
    for split in ("train", "validation"):
        given = weights if split == "train" else {}
        rows = _weighed(blend.get(split, []), NAMED[name], given)
        if rows:
            chosen[split] = [
                {**row, "prefix": os.path.normpath(f"{folder}/{row['prefix']}")} for row in rows
            ]
    if "train" not in chosen:
        raise UsageError(
            f"--use {name}: none of the outputs takes part ({', '.join(sorted(known))})"
        )
    return chosen


def _weighed(rows: list[dict], taking: dict[str, set[str]], given: dict[str, float]) -> list[dict]:
    chosen = []
    for row in rows:
        weight = row["tokens"] if _takes_part(row["prefix"], taking) else 0
        if weight:
            chosen.append({**row, "weight": weight})
    total = sum(row["weight"] for row in chosen)
    shares = {row["prefix"]: row["weight"] / total for row in chosen} | given
    if any(share < 0 for share in shares.values()):
        raise UsageError("--set: weights cannot be negative")
    whole = sum(shares.values())
    return [
        {**row, "weight": shares[row["prefix"]] / whole}
        for row in rows
        if shares.get(row["prefix"], 0) > 0
    ]


def _takes_part(prefix: str, taking: dict[str, set[str]]) -> bool:
    partition = re.sub(r"(\.validation)?(-\d{5})?$", "", prefix)
    keys = dict(part.split("=", 1) for part in partition.split("/") if "=" in part)
    return all(keys.get(key) in values for key, values in taking.items())


def write(path: Path, blend: dict) -> None:
    files.write_text(path, yaml.safe_dump(blend, sort_keys=False, width=1000))


def epochs(blend: dict, tokens: int) -> list[dict]:
    """For each training prefix: tokens there are, tokens drawn of a budget of `tokens`, epochs."""
    return [
        {
            "prefix": row["prefix"],
            "weight": row["weight"],
            "tokens": row["tokens"],
            "drawn": round(tokens * row["weight"]),
            "epochs": tokens * row["weight"] / row["tokens"],
        }
        for row in blend["train"]
    ]
