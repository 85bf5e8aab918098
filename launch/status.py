"""`python -m launch status`: how far a run is, and which rank failed first and why."""

import argparse
import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megatron_ext.checkpoint.folders import parts, read_latest
from pretrain import exit, running
from pretrain.run_folder import RunFolder
from pretrain.running import Running

_ERROR = "error: "
# What ranks say that only saw another one fail.
_ECHOES = ("no sign of life", "no word within", "waited in vain", " failed: ", "rendezvous store")


@dataclass(frozen=True)
class Failure:
    """What a rank said before it ended."""

    rank: int
    reason: str
    log: str


@dataclass(frozen=True)
class Status:
    """Where a run stands."""

    step: int
    steps: int
    loss: float | None
    tokens_per_second: float | None
    seconds_since: float | None  # since the last step was recorded
    checkpoint: str | None
    rescued: list[str]  # what replicas saved when another was lost
    event: dict[str, Any] | None  # the last one
    running: Running | None  # the first process, while the run is in progress
    failure: Failure | None  # of the newest attempt under a batch script


def parser() -> exit.CommandParser:
    """The command line of `launch status`."""
    parser = exit.CommandParser(prog="python -m launch status", description=__doc__)
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="a run's folder")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def run(options: argparse.Namespace) -> None:
    """Print the status. Raises ConfigError if the folder is no run's."""
    status = status_of(options.run_dir)
    if options.json:
        print(json.dumps(asdict(status), indent=1))
        return
    progress = f"step {status.step} of {status.steps}"
    if status.loss is not None:
        progress += f", loss {status.loss:.4f}, {status.tokens_per_second:,.0f} tokens/s"
        progress += f", {status.seconds_since:,.0f} s ago"
    print(progress)
    if status.running:
        print(f"in progress: process {status.running.pid} on {status.running.host}")
    else:
        print("not in progress")
    print(f"checkpoint: {status.checkpoint or 'none yet'}")
    if status.rescued:
        print(f"rescued: {', '.join(status.rescued)}; the next start puts them together")
    if status.event:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(status.event["time"]))
        error = status.event.get("error")
        print(f"last event: {status.event['event']} at {when}" + (f": {error}" if error else ""))
    if status.failure:
        print(f"rank {status.failure.rank} failed: {status.failure.reason} ({status.failure.log})")


def status_of(run_dir: Path) -> Status:
    """Read the status from a run's folder."""
    folder = RunFolder(run_dir)
    last = folder.last("metrics") or {}
    age = time.time() - (run_dir / "metrics.jsonl").stat().st_mtime if last else None
    return Status(
        step=last.get("step", 0),
        steps=folder.config()["train"]["steps"],
        loss=last.get("loss"),
        tokens_per_second=last.get("tokens_per_second"),
        seconds_since=age,
        checkpoint=read_latest(run_dir / "checkpoints"),
        rescued=[path.name for _, _, path in parts(run_dir / "checkpoints")],
        event=folder.last("events"),
        running=running.read(run_dir),
        failure=_failure(run_dir / "slurm"),
    )


def _failure(folder: Path) -> Failure | None:
    """The first failure of the newest attempt that is not the echo of another rank's."""
    attempts = sorted(folder.glob("*/attempt-*"), key=lambda path: path.stat().st_mtime)
    if not attempts:
        return None
    failures = []
    for log in sorted(attempts[-1].glob("rank-*.log"), key=lambda path: path.stat().st_mtime):
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        reasons = [line.removeprefix(_ERROR) for line in lines if line.startswith(_ERROR)]
        if reasons:
            failures.append(Failure(int(log.stem.removeprefix("rank-")), reasons[0], str(log)))
    causes = [f for f in failures if not any(echo in f.reason for echo in _ECHOES)]
    return next(iter(causes or failures), None)
