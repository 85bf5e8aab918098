"""What a run writes down about itself: one JSON object a line, and TensorBoard curves."""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch.utils.tensorboard import SummaryWriter

from megatron_ext.diloco.loop import Round
from pretrain.run_folder import record_of


@dataclass(frozen=True)
class StepRecord:
    """A line of metrics.jsonl."""

    step: int
    tokens: int  # trained on so far, over all replicas
    sample: int  # the first one of this step, in the order of samples
    loss: float  # of this step's tokens, mean of the first replica
    lr: float
    grad_norm: float  # before clipping, of the first replica
    tokens_per_second: float  # over all replicas
    mfu: float | None
    seconds: float


class RunLog:
    """The files in a run's folder. One process of a run has one."""

    def __init__(self, folder: Path, step: int):
        """Go on after inner step `step`: what was written of later steps happened no more.

        Raises DataError for a line of an earlier session that is no record of a step.
        """
        self._folder = folder
        for name in ("metrics", "rounds", "validation"):
            _drop_after(folder / f"{name}.jsonl", step)
        self._board = SummaryWriter(folder / "tensorboard", purge_step=step + 1)

    def step(self, record: StepRecord) -> None:
        self._write("metrics", record.step, asdict(record))

    def round(self, record: Round) -> None:
        self._write("rounds", record.step, asdict(record))

    def validation(self, step: int, tokens: int, loss: float, weights: str) -> None:
        line = {"step": step, "tokens": tokens, "loss": loss, "weights": weights}
        self._write("validation", step, line)

    def event(self, kind: str, **details: Any) -> None:
        """Something that happened once: a start, a resume, a checkpoint, an end."""
        self._append("events", {"time": time.time(), "event": kind, **details})

    def close(self) -> None:
        self._board.close()

    def _write(self, name: str, step: int, line: dict[str, Any]) -> None:
        self._append(name, line)
        for key, value in line.items():
            if key not in ("step", "round", "fragment") and isinstance(value, int | float):
                self._board.add_scalar(f"{name}/{key}", value, step)

    def _append(self, name: str, line: dict[str, Any]) -> None:
        with (self._folder / f"{name}.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


def _drop_after(path: Path, step: int) -> None:
    if not path.exists():
        return
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    # A killed run may have left half a line.
    whole = [line for line in lines if line.endswith("\n")]
    kept = [line for line in whole if record_of(str(path), line)["step"] <= step]
    if kept != lines:
        temporary = path.with_name(f"{path.name}.partial")
        temporary.write_text("".join(kept), encoding="utf-8")
        temporary.replace(path)
