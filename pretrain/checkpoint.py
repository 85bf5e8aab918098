"""`python -m pretrain checkpoint …`: look at, check and compare checkpoints, by one process."""

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn
from rich.table import Column, Table

from megatron_ext.checkpoint import folders
from megatron_ext.checkpoint.saved import Difference, Saved, differences, find
from megatron_ext.errors import ConfigError, DataError
from pretrain import exit

PATH_HELP = "a run's folder, its checkpoints/, or one step's folder"


def main(arguments: list[str]) -> int:
    """Run the subcommand that `arguments` name; returns the exit code."""
    options = _parser().parse_args(arguments)
    return exit.run(lambda: options.command(options), options.debug)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m pretrain checkpoint", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Callable[[argparse.Namespace], None], text: str) -> _Parser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(command=command)
        added.add_argument("--json", action="store_true", help="print JSON")
        added.add_argument("--debug", action="store_true", help="show the traceback of an error")
        return added

    inspect = add("inspect", _inspect, "What is in a checkpoint (of a run: in the newest).")
    inspect.add_argument("path", type=Path, metavar="PATH", help=PATH_HELP)
    inspect.add_argument("--tensors", action="store_true", help="list every tensor")
    verify = add("verify", _verify, "Read every byte of a checkpoint, or of all of a run's.")
    verify.add_argument("path", type=Path, metavar="PATH", help=PATH_HELP)
    diff = add("diff", _diff, "Which tensors of two checkpoints differ, the farthest first.")
    diff.add_argument("first", type=Path, metavar="A", help=PATH_HELP)
    diff.add_argument("second", type=Path, metavar="B", help=PATH_HELP)
    diff.add_argument("--kind", action="append", default=[], help="only master, anchor, momentum …")
    diff.add_argument("--top", type=int, default=20, help="show so many; 0 shows all")
    to_hf = add("export", _export, "Write the global weights as a Hugging Face model.")
    to_hf.add_argument("path", type=Path, metavar="PATH", help=PATH_HELP)
    to_hf.add_argument("output", type=Path, metavar="OUT", help="a folder that is not there yet")
    to_hf.add_argument("--format", choices=["hf"], default="hf", help="the only one so far")
    to_hf.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    to_hf.add_argument(
        "--config", type=Path, help="config.yaml of the run; else the one beside its checkpoints/"
    )
    to_hf.add_argument("--no-tokenizer", action="store_true", help="leave the tokenizer out")
    return parser


class _Parser(argparse.ArgumentParser):
    error = exit.Parser.error


def _inspect(options: argparse.Namespace) -> None:
    paths = find(options.path)
    saved = Saved(paths[-1])
    content = _content(saved, options.tensors)
    if options.json:
        print(json.dumps(content | {"checkpoints": [path.name for path in paths]}, indent=1))
        return
    console = _console()
    if len(paths) > 1:
        console.print(
            f"{len(paths)} checkpoints: {', '.join(path.name for path in paths)}", soft_wrap=True
        )
    layout = " × ".join(f"{name}={value}" for name, value in content["layout"].items())
    console.print(f"[bold]{saved.path}[/]", soft_wrap=True)
    console.print(f"step {saved.step}, written {content['written']}, {layout}", soft_wrap=True)
    for name, value in content["counters"].items():
        console.print(f"  {name}: {json.dumps(value)}", soft_wrap=True)
    table = Table("folder", "kind", *_right("tensors", "elements", "size"))
    for row in content["kinds"]:
        table.add_row(
            row["folder"],
            row["kind"],
            f"{row['tensors']:,}",
            f"{row['elements']:,}",
            _size_text(row["bytes"]),
        )
    console.print(table)
    files, size = content["files"], _size_text(content["bytes"])
    console.print(f"{files} files, {size} in all")
    if options.tensors:
        _print_tensors(console, content["tensors"])


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
    table = Table("folder", "tensor", "shape", "dtype", *_right("stored in blocks"))
    for row in tensors:
        shape = " × ".join(map(str, row["shape"]))
        table.add_row(row["folder"], row["key"], shape, row["dtype"], str(row["blocks"]))
    console.print(table)


def _verify(options: argparse.Namespace) -> None:
    results = []
    checkpoints = find(options.path)
    with _progress(options.json) as progress:
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
    console = _console()
    for result in results:
        name = Path(result["path"]).name
        console.print(f"{name}: {'[red]damaged' if result['damages'] else '[green]ok'}")
        for damage in result["damages"]:
            console.print(f"  {damage}", markup=False, soft_wrap=True)
        for unknown in result["unknown_files"]:
            console.print(
                f"  {unknown}: not in the manifest, and read by nobody",
                markup=False,
                soft_wrap=True,
            )
    if latest:
        console.print(latest, markup=False, soft_wrap=True)


def _diff(options: argparse.Namespace) -> None:
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
    console = _console()
    if not found:
        console.print("every tensor is equal, bit for bit")
        return
    shown = found[: options.top or None]
    table = Table("folder", "tensor", *_right("largest difference", "relative"))
    for row in shown:
        numbers = (row.remark, "") if row.remark else (f"{row.largest:.3e}", f"{row.relative:.3e}")
        table.add_row(row.folder, row.key, *numbers)
    console.print(table)
    console.print(f"{len(found)} tensors differ, {len(shown)} are shown")


def _export(options: argparse.Namespace) -> None:
    import torch

    from megatron_ext.checkpoint import huggingface
    from pretrain import hf_tokenizer
    from pretrain.config import load
    from pretrain.data import BlendFile

    saved = Saved(find(options.path)[-1])
    path = options.config or saved.path.resolve().parent.parent / "config.yaml"
    if not path.is_file():
        raise ConfigError(f"{path} is not there; --config names the config.yaml of the run")
    config = load(path).config
    tokenizer = None
    if not options.no_tokenizer:
        blend = BlendFile(Path(config.data.blend))
        tokenizer = blend.blend.tokenizer
    with _progress(options.json) as progress:
        task = progress.add_task("exporting", total=saved.global_bytes)
        dtype = getattr(torch, options.dtype)
        with huggingface.new_folder(options.output) as folder:
            eod = tokenizer and tokenizer.eod
            huggingface.write(
                saved, config.model, folder, dtype, eod, lambda size: progress.advance(task, size)
            )
            if tokenizer:
                hf_tokenizer.export(
                    tokenizer.kind, blend.path.parent / tokenizer.path, tokenizer.eod, folder
                )
    if options.json:
        print(
            json.dumps({"path": str(saved.path), "step": saved.step, "output": str(options.output)})
        )
    else:
        _console().print(f"global weights of step {saved.step} are in {options.output}")


def _farthest_first(difference: Difference) -> tuple[bool, float]:
    """Sort key; what cannot be compared, and NaN, comes first."""
    comparable = not math.isnan(difference.relative)
    return comparable, -difference.relative if comparable else 0.0


def _console() -> Console:
    """Standard output; wide where it is no terminal, so that no name is broken."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=200)


def _progress(hidden: bool) -> Progress:
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=hidden)


def _right(*names: str) -> list[Column]:
    return [Column(name, justify="right") for name in names]


def _size_text(size_bytes: int) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.4g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.4g} TB"
