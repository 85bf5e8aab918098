"""`blend`: choose and weigh the outputs that training draws from, and see what that means."""

import os
import re
from pathlib import Path

import yaml

from data_prep import files, outputs
from data_prep.arguments import did_you_mean
from data_prep.errors import UsageError
from data_prep.sources import keys_of

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

    Weights are by tokens among the outputs of the named blend. `weights` gives training prefixes,
    or the outputs below a partial one together, their share of the whole (and takes prefixes in);
    0 leaves them out. The others keep their proportions. Each list sums to 1; where `weights`
    covers all outputs, only the proportions count.

    Raises:
        UsageError: an unknown name or prefix, or nothing that is left.
    """
    manifest = outputs.read_manifest(out)
    if name not in NAMED:
        raise UsageError(f"--use {name!r}: there are {', '.join(NAMED)}")
    known = {row["prefix"] for row in manifest["outputs"] if row["split"] == "train"}
    blend = outputs.blend(manifest)
    shares = _spread(weights, blend["train"])
    folder = os.path.relpath(out, path.parent)
    chosen: dict = {"format": 1, "tokenizer": dict(blend["tokenizer"])}
    chosen["tokenizer"]["path"] = os.path.normpath(f"{folder}/{blend['tokenizer']['path']}")
    for split in ("train", "validation"):
        given = shares if split == "train" else {}
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
    others = {row["prefix"]: row["weight"] for row in chosen if row["prefix"] not in given}
    left, total = 1 - sum(given.values()), sum(others.values())
    if others and left <= 0:
        raise UsageError(
            f"--set: the shares sum to {1 - left:g}, which leaves nothing for "
            f"{next(iter(others))}; give less, or set it to 0 to leave it out"
        )
    shares = {prefix: left * tokens / total for prefix, tokens in others.items()} | given
    whole = sum(shares.values())
    return [
        {**row, "weight": shares[row["prefix"]] / whole}
        for row in rows
        if shares.get(row["prefix"], 0) > 0
    ]


def _spread(weights: dict[str, float], rows: list[dict]) -> dict[str, float]:
    """Shares by full prefix: the outputs at or below a given one divide its share by tokens."""
    shares: dict[str, float] = {}
    for given, share in weights.items():
        below = [row for row in rows if _is_at_or_below(row["prefix"], given)]
        if not below:
            known = [row["prefix"] for row in rows]
            raise UsageError(
                f"--set {given!r}: is no training prefix ({', '.join(known)})"
                f"{did_you_mean(given, known)}"
            )
        if twice := [row["prefix"] for row in below if row["prefix"] in shares]:
            raise UsageError(f"--set {given!r}: {twice[0]} has been given a share already")
        tokens = sum(row["tokens"] for row in below)
        shares |= {row["prefix"]: share * row["tokens"] / tokens for row in below}
    return shares


def _is_at_or_below(prefix: str, given: str) -> bool:
    given = given.rstrip("/")
    return given in (prefix, _partition(prefix)) or prefix.startswith(f"{given}/")


def _partition(prefix: str) -> str:
    return re.sub(r"(\.validation)?(-\d{5})?$", "", prefix)


def _takes_part(prefix: str, taking: dict[str, set[str]]) -> bool:
    keys = keys_of(_partition(prefix))
    return all(keys.get(key) in values for key, values in taking.items())


def write(path: Path, blend: dict) -> None:
    """Write a blend file. Raises UsageError where its folder is missing."""
    if not path.parent.is_dir():
        raise UsageError(f"--output {path}: there is no folder {path.parent}")
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
