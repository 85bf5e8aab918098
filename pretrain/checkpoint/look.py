"""`checkpoint inspect`, `verify`, `diff` and `reshape`."""

import argparse
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron_ext.checkpoint import folders
from megatron_ext.checkpoint.saved import Difference, Saved, differences, find
from megatron_ext.errors import DataError
from pretrain.checkpoint import screen


def inspect(options: argparse.Namespace) -> None:
    """What is in a checkpoint."""
    paths = find(options.path)
    saved = Saved(paths[-1])
    content = _content(saved, options.tensors)
    if options.json:
        print(json.dumps(content | {"checkpoints": [path.name for path in paths]}, indent=1))
        return
    console = screen.console()
    if len(paths) > 1:
        console.print(
            f"{len(paths)} checkpoints: {', '.join(path.name for path in paths)}", soft_wrap=True
        )
    layout = " × ".join(f"{name}={value}" for name, value in content["layout"].items())
    console.print(str(saved.path), style="bold", soft_wrap=True)
    console.print(f"step {saved.step}, written {content['written']}, {layout}", soft_wrap=True)
    for line in _counted(content["counters"], options.options):
        console.print(line, soft_wrap=True)
    table = Table("folder", "kind", *screen.right("tensors", "elements", "size"))
    for row in content["kinds"]:
        table.add_row(
            row["folder"],
            row["kind"],
            f"{row['tensors']:,}",
            f"{row['elements']:,}",
            screen.size_text(row["bytes"]),
        )
    console.print(table)
    files, size = content["files"], screen.size_text(content["bytes"])
    console.print(f"{files} files, {size} in all")
    if options.tensors:
        _print_tensors(console, content["tensors"])


def _counted(counters: dict[str, Any], all_options: bool) -> list[str]:
    """Single values; of tables of them how long they are, but for the options where asked for."""
    lines = []
    for name, value in counters.items():
        if name == "options" and all_options:
            lines += [f"  {key}: {json.dumps(each)}" for key, each in value.items()]
        elif name == "outer":
            for number, fragment in enumerate(value["fragments"]):
                lines.append(f"  fragment {number}: {_fragment(fragment)}")
        elif isinstance(value, dict):
            more = "; --options shows them" if name == "options" else "; --json shows them"
            lines.append(f"  {name}: {len(value)}{more}")
        else:
            lines.append(f"  {name}: {json.dumps(value)}")
    return lines


def _fragment(counters: dict[str, Any]) -> str:
    rounds, since, sent = (counters[name] for name in ("rounds", "since", "sent"))
    text = f"{rounds} outer steps, {since} inner steps since"
    return text if sent is None else f"{text}, on its way since step {sent}"


def _content(saved: Saved, tensors: bool) -> dict[str, Any]:
    kinds: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0, 0])
    listed = []
    for folder in saved.folders:
        for key, entry in saved.entries(folder).items():
            elements = math.prod(entry.shape)
            for place, more in enumerate((1, elements, entry.bytes)):
                kinds[folder, key.split(".")[0]][place] += more
            dtype = str(entry.dtype).removeprefix("torch.")
            listed.append(
                {
                    "folder": folder,
                    "key": key,
                    "shape": list(entry.shape),
                    "dtype": dtype,
                    "blocks": entry.blocks,
                }
            )
    return {
        "path": str(saved.path),
        **saved.manifest.about,
        "files": len(saved.manifest.files),
        "bytes": saved.manifest.total_bytes,
        "counters": saved.counters(),
        "kinds": [
            {"folder": folder, "kind": kind, "tensors": n, "elements": elements, "bytes": size}
            for (folder, kind), (n, elements, size) in kinds.items()
        ],
        **({"tensors": listed} if tensors else {}),
    }


def _print_tensors(console: Console, tensors: list[dict[str, Any]]) -> None:
    table = Table("folder", "tensor", "shape", "dtype", *screen.right("stored in blocks"))
    for row in tensors:
        shape = " × ".join(map(str, row["shape"]))
        table.add_row(row["folder"], row["key"], shape, row["dtype"], str(row["blocks"]))
    console.print(table)


def verify(options: argparse.Namespace) -> None:
    """Every byte of every checkpoint."""
    results = []
    checkpoints = find(options.path)
    with screen.progress(options.json) as progress:
        task = progress.add_task("reading", total=None)
        for path in checkpoints:
            result = {"path": str(path), "damages": [], "unknown_files": []}
            results.append(result)
            try:
                saved = Saved(path)
            except DataError as error:
                result["damages"].append(str(error))
                continue
            progress.update(
                task, description=path.name, completed=0, total=saved.manifest.total_bytes
            )
            result["damages"] = saved.damages(lambda size: progress.advance(task, size))
            result["unknown_files"] = saved.unknown_files()
    latest = _wrong_latest(options.path, checkpoints)
    if options.json:
        print(json.dumps({"checkpoints": results, "latest": latest}, indent=1))
    else:
        _print_verdicts(results, latest)
    damaged = [result for result in results if result["damages"]]
    if damaged:
        first = damaged[0]
        raise DataError(
            f"{len(damaged)} of {len(results)} checkpoints damaged; "
            f"{first['path']}: {first['damages'][0]}"
        )
    if latest:
        raise DataError(latest)


def _wrong_latest(path: Path, checkpoints: list[Path]) -> str | None:
    """What is wrong with the file `latest`, if `path` is more than one step's folder."""
    newest = checkpoints[-1]
    if newest == path:
        return None
    said = folders.read_latest(newest.parent)
    if said == newest.name:
        return None
    found = "is missing" if said is None else f"says {said!r}"
    return f"{newest.parent / folders.LATEST} {found}, and the newest checkpoint is {newest.name}"


def _print_verdicts(results: list[dict[str, Any]], latest: str | None) -> None:
    console = screen.console()
    for result in results:
        name = Path(result["path"]).name
        word, colour = ("damaged", "red") if result["damages"] else ("ok", "green")
        console.print(f"{name}: ", Text(word, style=colour), sep="")
        for damage in result["damages"]:
            console.print(f"  {damage}", soft_wrap=True)
        for unknown in result["unknown_files"]:
            console.print(
                f"  {unknown}: not in the manifest, and read by nobody",
                soft_wrap=True,
            )
    if latest:
        console.print(latest, soft_wrap=True)


def diff(options: argparse.Namespace) -> None:
    """What differs between two."""
    first, second = (Saved(find(path)[-1]) for path in (options.first, options.second))
    found = sorted(differences(first, second, options.kind), key=_farthest_first)
    if options.json:
        # JSON knows neither NaN nor infinity.
        rows = [
            {
                name: None if isinstance(value, float) and not math.isfinite(value) else value
                for name, value in vars(difference).items()
            }
            for difference in found
        ]
        print(json.dumps({"first": str(first.path), "second": str(second.path), "tensors": rows}))
        return
    console = screen.console()
    if not found:
        console.print("every tensor is equal, bit for bit")
        return
    shown = found[: options.top or None]
    table = Table("folder", "tensor", *screen.right("largest difference", "relative"))
    for row in shown:
        numbers = (row.remark, "") if row.remark else (f"{row.largest:.3e}", f"{row.relative:.3e}")
        table.add_row(row.folder, row.key, *numbers)
    console.print(table)
    console.print(f"{len(found)} tensors differ, {len(shown)} are shown")


def _farthest_first(difference: Difference) -> tuple[bool, float]:
    """Sort key; what cannot be compared, and NaN, comes first."""
    comparable = not math.isnan(difference.relative)
    return comparable, -difference.relative if comparable else 0.0


def reshape(options: argparse.Namespace) -> None:
    """Whether and how a run goes on from a checkpoint with other options."""
    from pretrain.config import from_options, override
    from pretrain.doctor import examine, refuse, table_text

    saved = Saved(find(options.path)[-1])
    before = saved.counters().get("options", {})
    if "train.steps" not in before:
        raise DataError(f"{saved.path} holds no run that could go on; see resume.weights")
    after = before | override(options.overrides)
    from_options(after)
    findings = examine(before, after, after["resume.allow"])
    if options.json:
        rows = [vars(found) | {"effective": found.effective} for found in findings]
        print(json.dumps({"path": str(saved.path), "findings": rows}, indent=1))
    elif findings:
        screen.console().print(table_text(findings), soft_wrap=True)
    refuse(findings, str(saved.path))
    with screen.progress(options.json) as bar:
        task = bar.add_task(saved.path.name, total=saved.manifest.total_bytes)
        damages = saved.damages(lambda size: bar.advance(task, size))
    if damages:
        raise DataError(f"{saved.path} is damaged: {damages[0]}")
    if not options.json:
        screen.console().print(
            f"{saved.path} is whole and fits; nothing needs rewriting, start the run with these "
            "options",
            soft_wrap=True,
        )
