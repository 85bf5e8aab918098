"""`python -m pretrain verify-resume`: prove on this machine that a killed run goes on unchanged."""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from megatron_ext.checkpoint import folders
from megatron_ext.checkpoint.saved import Saved, differences
from megatron_ext.errors import ConfigError, TrainingError
from pretrain import exit
from pretrain.config import load

# Of the loss, between layouts, in fp32; on the same layout every bit must be equal.
TOLERANCE = {"adamw": 1e-4, "muon": 1e-3}
BF16_TOLERANCE = 1e-2


def main(arguments: list[str]) -> int:
    """Compare a straight run with a killed and resumed one; 0 if they agree, 1 if not."""
    parser = exit.Parser(
        prog="python -m pretrain verify-resume",
        description="Train 2N steps without a stop, and again with a kill after N; then compare "
        "losses and final checkpoints. Both runs are started by `python -m launch local`.",
    )
    parser.add_argument("--steps", type=int, default=4, metavar="N", help="default 4")
    parser.add_argument(
        "--resume-with",
        action="append",
        default=[],
        metavar="key=value",
        help="changed for the second half, for example parallel.tp=1; may be repeated",
    )
    parser.add_argument("--folder", type=Path, help="keep both runs there; else they are removed")
    options = parser.parse(arguments)
    return exit.run(lambda: _verify(options), options.debug)


def _verify(options: argparse.Namespace) -> None:
    if options.steps < 1:
        raise ConfigError(f"--steps {options.steps} must be at least 1")
    with tempfile.TemporaryDirectory(prefix="verify-resume-") as temporary:
        folder = options.folder or Path(temporary)
        straight, stopped = folder / "straight", folder / "stopped"
        for run, changes in ((straight, []), (stopped, options.resume_with)):
            load(options.recipe, _overrides(options, run, changes))  # refuses before anything runs
            if run.exists():
                raise ConfigError(f"--folder {folder} holds {run.name} already; name another one")
        _run(_command(options, straight))
        _run_and_kill(_command(options, stopped), stopped, options.steps)
        _run(_command(options, stopped, options.resume_with))
        _compare(options, straight, stopped)


def _command(options: argparse.Namespace, run: Path, changes: Sequence[str] = ()) -> list[str]:
    launcher = [sys.executable, "-m", "launch", "local", options.recipe]
    return launcher + _overrides(options, run, changes)


def _overrides(options: argparse.Namespace, run: Path, changes: Sequence[str]) -> list[str]:
    """The user's, with `changes` in their place, and those that make the runs comparable."""
    changed = {change.split("=")[0] for change in changes}
    kept = [text for text in options.overrides if text.split("=")[0] not in changed]
    return [
        *kept,
        *changes,
        f"run.dir={run}",
        f"train.steps={2 * options.steps}",
        "train.log_every=1",
        f"checkpoint.every={options.steps}",
        "checkpoint.keep_last=2",
        "resume=auto",
    ]


def _run(command: list[str], until: Callable[[], bool] = lambda: False) -> bool:
    """Run it to its end, or kill it as soon as `until`; returns whether it was killed."""
    with tempfile.TemporaryFile("w+") as said:
        process = subprocess.Popen(command, stdout=said, stderr=said, start_new_session=True)
        try:
            while process.poll() is None:
                if until():
                    return True
                time.sleep(0.01)
        finally:
            if process.poll() is None:
                # Its ranks die with it.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        if process.returncode:
            said.seek(0)
            last = next((line for line in reversed(said.read().splitlines()) if line), "")
            raise TrainingError(f"`{' '.join(command[1:])}` failed: {last}")
    return False


def _run_and_kill(command: list[str], run: Path, step: int) -> None:
    """Kill all processes of the run once the checkpoint of `step` is committed."""
    checkpoints = run / "checkpoints"
    halfway = checkpoints / folders.name_of(step)
    if not _run(command, until=halfway.exists):
        raise TrainingError("the run ended before it could be killed; raise --steps")
    for later in folders.committed(checkpoints):
        if folders.step_of(later) > step:
            folders.discard(later)


def _compare(options: argparse.Namespace, straight: Path, stopped: Path) -> None:
    one, other = _losses(straight), _losses(stopped)
    table = Table("step", "straight", "killed and resumed", "relative difference")
    relative = {step: abs(other.get(step, float("nan")) / one[step] - 1) for step in one}
    for step, loss in one.items():
        row = (f"{loss:.6f}", f"{other.get(step, float('nan')):.6f}", f"{relative[step]:.1e}")
        table.add_row(str(step), *row)
    console = Console(highlight=False)
    console.print(table)
    if options.resume_with:
        tolerance = _tolerance(options)
        late = [step for step, value in relative.items() if not value <= tolerance]
        if late:
            raise TrainingError(f"losses differ by more than {tolerance:g} from step {late[0]} on")
        console.print(f"the losses agree within {tolerance:g}")
        return
    last = folders.name_of(2 * options.steps)
    ends = [Saved(run / "checkpoints" / last) for run in (straight, stopped)]
    different = [difference.key for difference in differences(*ends, kinds=[])]
    if one != other or different:
        raise TrainingError(
            f"the resumed run is not the straight one: {len(different)} tensors of the last "
            f"checkpoint differ ({', '.join(different[:3])})"
        )
    console.print("every loss and every tensor of the last checkpoint is equal, bit for bit")


def _tolerance(options: argparse.Namespace) -> float:
    config = load(options.recipe, options.overrides).config
    if config.train.precision == "bf16":
        return BF16_TOLERANCE
    return TOLERANCE[config.optimizer.name]


def _losses(run: Path) -> dict[int, float]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return {line["step"]: line["loss"] for line in map(json.loads, lines)}
