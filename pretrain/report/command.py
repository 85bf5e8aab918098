"""`python -m pretrain report RUN…`: one HTML page with the runs' curves, tables and options."""

import time
from functools import cache
from pathlib import Path
from typing import Any

import jinja2

from megatron_ext.errors import ConfigError, DataError
from pretrain import exit
from pretrain.config import flatten
from pretrain.report.curves import COLOURS, draw
from pretrain.run_folder import RunFolder

_TEMPLATE = Path(__file__).parent / "page.html"


def main(arguments: list[str]) -> int:
    """Write the page; returns the exit code."""
    parser = exit.CommandParser(
        prog="python -m pretrain report",
        description="One self-contained HTML page about one or several runs: curves over tokens, "
        "a table, what differs\nbetween their options, and what happened.\n\n"
        "  python -m pretrain report runs/a runs/b --output compare.html",
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help="default: report.html in the first run's folder"
    )
    options = parser.parse(arguments)
    output = options.output or options.runs[0] / "report.html"
    return exit.run(lambda: write(options.runs, output), options.debug)


def write(runs: list[Path], output: Path) -> None:
    """Write the page about `runs` to `output`.

    Raises ConfigError for a folder that is no run's, DataError for damaged records.
    """
    folders = [RunFolder(path) for path in runs]
    try:
        page = _page(folders)
    except KeyError as error:
        raise DataError(f"a record of {', '.join(map(str, runs))} has no {error}") from error
    if not output.parent.is_dir():
        raise ConfigError(f"--output {output}: the folder {output.parent} is not there")
    temporary = output.with_name(output.name + ".partial")
    temporary.write_text(page, encoding="utf-8")
    temporary.replace(output)
    print(output)


def _page(folders: list[RunFolder]) -> str:
    options = [dict(flatten(folder.config())) for folder in folders]
    both = list(zip(folders, options, strict=True))
    curves = draw([cache(folder.records) for folder in folders])
    names = [str(folder.path) for folder in folders]
    environment = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    template = environment.from_string(_TEMPLATE.read_text(encoding="utf-8"))
    return template.render(
        runs=[(name, COLOURS[i % len(COLOURS)]) for i, name in enumerate(names)],
        curves=list(curves),
        summary=_rows([_summary(folder, values) for folder, values in both]),
        different=[row for row in _rows(options) if len(set(map(str, row[1]))) > 1],
        options=_rows(options),
        events=[(name, _events(folder)) for name, folder in zip(names, folders, strict=True)],
    )


def _rows(columns: list[dict[str, Any]]) -> list[tuple[str, list[Any]]]:
    """(name, its value in each column) of every name, in the order in which they come up."""
    names = dict.fromkeys(name for column in columns for name in column)
    return [(name, [column.get(name, "–") for column in columns]) for name in names]


def _summary(folder: RunFolder, options: dict[str, Any]) -> dict[str, str]:
    metrics, validation = folder.records("metrics"), folder.records("validation")
    rounds = folder.records("rounds")
    summary = {
        "layout": f"{options['parallel.replicas']} × ("
        + " × ".join(f"{n} {options[f'parallel.{n}']}" for n in ("tp", "pp", "cp", "dp"))
        + (f", experts over ep {ep}" if (ep := options.get("parallel.ep", 1)) > 1 else "")
        + ")",
        "inner optimizer": options["optimizer.name"],
        "steps": f"{metrics[-1]['step'] if metrics else 0:,} of {options['train.steps']:,}",
        "tokens": f"{metrics[-1]['tokens'] if metrics else 0:,}",
    }
    if metrics:
        summary["training loss, last"] = f"{metrics[-1]['loss']:.4f}"
        speeds = sorted(line["tokens_per_second"] for line in metrics)
        summary["tokens/s, median"] = f"{speeds[len(speeds) // 2]:,.0f}"
    if validation:
        summary["held-out loss, last"] = f"{validation[-1]['loss']:.4f}"
        summary["held-out loss, least"] = f"{min(line['loss'] for line in validation):.4f}"
    if rounds:
        summary["outer steps"] = f"{max(line['round'] for line in rounds):,}"
        summary["sent by a replica"] = f"{sum(r['bytes_sent'] for r in rounds) / 1e6:,.1f} MB"
        waited = sum(line["exposed_seconds"] for line in rounds)
        summary["training stood still for it"] = f"{waited:,.1f} s"
    return summary


def _events(folder: RunFolder) -> list[tuple[str, str, str]]:
    """(when, what, details) of what happened once."""
    found = []
    for event in folder.records("events"):
        details = {k: v for k, v in event.items() if k not in ("time", "event") and v is not None}
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event["time"]))
        text = ", ".join(f"{key} {value}" for key, value in details.items())
        found.append((when, event["event"], text))
    return found
