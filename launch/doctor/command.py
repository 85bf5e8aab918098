"""`python -m launch doctor`: look over this machine, on one screen."""

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from launch.doctor import accelerators, checks
from launch.doctor.checks import Finding
from megatron_ext.errors import StackError
from pretrain import exit

_SIGNS = {"ok": "[green]ok[/]", "missing": "[yellow]--[/]", "bad": "[red]bad[/]"}
_WIDTH = 110


def parser() -> exit.CommandParser:
    """The command line of `launch doctor`."""
    parser = exit.CommandParser(prog="python -m launch doctor", description=__doc__)
    add = parser.add_argument
    add("--run-dir", type=Path, default=Path("runs"), help="where runs will live (default runs)")
    add("--node", action="store_true", help="health of a node alone: GPUs and what links them")
    add("--json", action="store_true", help="print JSON")
    return parser


def run(options: argparse.Namespace) -> None:
    """Print what was found; StackError if something does not work."""
    with Console(stderr=True).status("looking"):
        findings = list(examine(options))
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        _show(findings)
    bad = [finding for finding in findings if finding.state == "bad"]
    if bad:
        raise StackError(f"{bad[0].name}: {bad[0].detail}; {bad[0].remedy}")


def examine(options: argparse.Namespace) -> Iterator[Finding]:
    """The findings, the quick ones first."""
    if torch.cuda.is_available():
        yield from checks.gpus()
    else:
        yield accelerators.no_gpu()
    if not options.node:
        yield checks.python()
        yield from checks.packages()
        yield accelerators.transformer_engine()
        yield accelerators.apex()
        yield accelerators.ray()
        yield checks.machine()
        yield checks.disk(options.run_dir)
        yield checks.imports()
    yield checks.ranks()


def _show(findings: list[Finding]) -> None:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(width=4)
    table.add_column(no_wrap=True)
    table.add_column()
    for finding in findings:
        remedy = f"\n[dim]{escape(finding.remedy)}[/]" if finding.remedy else ""
        table.add_row(_SIGNS[finding.state], finding.name, escape(finding.detail) + remedy)
    Console(highlight=False, width=_WIDTH).print(table)
