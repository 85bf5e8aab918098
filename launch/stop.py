"""`python -m launch stop`: ask a run that is in progress to save and end, and wait until it has.

The run saves after the next step that all its processes can agree on, which with several replicas
may be a round away, and the same command that started it goes on from there. A batch script does
not start it again. Where no run is in progress there is nothing to do: exit code 0.

  python -m launch stop runs/demo
  python -m launch stop /shared/runs/15b --wait 1800
  python -m launch stop runs/demo --now       end it at once, without a save
"""

import argparse
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

from megatron_ext.checkpoint.folders import name_of, read_latest
from megatron_ext.errors import ConfigError, StackError
from pretrain import exit, running
from pretrain.run_folder import RunFolder
from pretrain.running import Running

POLL_SECONDS = 0.2
GRACE_SECONDS = 10.0
"""From SIGINT to SIGKILL, with --now."""
_WAIT_SECONDS = 900.0


def parser() -> exit.CommandParser:
    """The command line of `launch stop`."""
    parser = exit.CommandParser(prog="python -m launch stop", description=__doc__)
    add = parser.add_argument
    add("run_dir", type=Path, metavar="RUN_DIR", help="a run's folder")
    add(
        "--wait",
        type=float,
        default=_WAIT_SECONDS,
        metavar="SECONDS",
        help="for its end: longer than a round and a save take (default 900)",
    )
    add("--now", action="store_true", help="end it at once, without a save")
    return parser


def run(options: argparse.Namespace) -> None:
    """Stop the run. Raises StackError if it has not ended with a checkpoint."""
    if options.wait <= 0:
        raise ConfigError(f"--wait {options.wait:g}: must be positive")
    folder = RunFolder(options.run_dir)
    process = running.read(folder.path)
    latest = read_latest(folder.path / "checkpoints") or "none"
    if process is None:
        print(f"no run is in progress in {folder.path}; its last checkpoint: {latest}")
        return
    if options.now:
        _end_at_once(folder.path, process)
        print(f"ended; the same command goes on from the last checkpoint: {latest}")
        return
    running.request_stop(folder.path)
    try:
        for line in _progress(folder, process, options.wait):
            print(line, flush=True)
    finally:
        if process.is_alive:
            running.withdraw_stop(folder.path)
    print(f"ended after {_saved_at_the_end(folder, process)}; the same command goes on from there")


def _progress(folder: RunFolder, process: Running, wait_seconds: float) -> Iterator[str]:
    """A line for each thing that is new, until the run has ended."""
    deadline = time.monotonic() + wait_seconds
    yield f"asked the run of process {process.pid} on {process.host} to save and end"
    said = None
    while not _has_ended(folder.path, process):
        step, after = _last_step(folder), running.stop_step(folder.path)
        if time.monotonic() > deadline:
            raise StackError(_why_not(folder.path, process, wait_seconds, step, after))
        if after is not None and (step, after) != said:
            said = (step, after)
            yield f"step {step} is done; the run saves after step {after} and ends"
        time.sleep(POLL_SECONDS)


def _has_ended(folder: Path, process: Running) -> bool:
    """Whether the process is gone, or on another machine has said so."""
    if process.is_here:
        return not process.is_alive
    return running.read(folder) != process


def _why_not(
    folder: Path, process: Running, wait_seconds: float, step: int, after: int | None
) -> str:
    if after is not None:
        where = f"it is at step {step} and ends after step {after}; --wait SECONDS waits longer"
    elif process.is_here:
        where = f"it has not looked since step {step}, and is asked no more: --now ends it at once"
    else:
        note = folder / running.RUNNING_FILE
        where = (
            f"it has not looked since step {step}, and is asked no more; if process {process.pid} "
            f"on {process.host} is gone, remove {note}"
        )
    return f"the run has not ended within {wait_seconds:g} s: {where}"


def _saved_at_the_end(folder: RunFolder, process: Running) -> str:
    """The name of the checkpoint that the run ended with. Raises StackError if there is none."""
    end = folder.last("events") or {}
    latest = read_latest(folder.path / "checkpoints")
    if end.get("event") != "end" or end["time"] < process.since:
        reason = "its first process was killed"
    elif end["error"]:
        reason = end["error"]
    elif latest != name_of(end["step"]):
        reason = f"it saved nothing after step {end['step']}"
    else:
        return latest
    raise StackError(
        f"the run ended without a checkpoint: {reason}; the last one is {latest or 'none'}"
    )


def _end_at_once(folder: Path, process: Running) -> None:
    """End the run without a save. Raises ConfigError where that cannot be done from here."""
    if process.slurm_job:
        command = ["scancel", process.slurm_job]
        if not shutil.which("scancel"):
            raise ConfigError(f"--now: run `{' '.join(command)}` where Slurm's commands are")
        # Batch scripts, also those of other replicas, see that nobody wants a restart.
        running.request_stop(folder)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise StackError(f"{' '.join(command)}: {done.stderr.strip() or 'failed'}")
        return
    if not process.is_here:
        raise ConfigError(
            f"--now: the run's first process, {process.pid}, is on {process.host}; stop it there"
        )
    # Whoever started the ranks ends the others when this one is gone.
    for number in (signal.SIGINT, signal.SIGKILL):
        deadline = time.monotonic() + GRACE_SECONDS
        if process.is_alive:
            os.kill(process.pid, number)
        while process.is_alive and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
    if process.is_alive:
        raise StackError(f"process {process.pid} does not end, not even by SIGKILL")


def _last_step(folder: RunFolder) -> int:
    last = folder.last("metrics")
    return last["step"] if last else 0
