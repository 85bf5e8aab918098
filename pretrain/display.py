"""What a person sees of a run while it trains: a bar on a terminal, plain lines in a log."""

import sys
import time

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from pretrain.log import StepRecord

_SECONDS_BETWEEN_LINES = 10.0


class Display:
    """Progress of one session on standard output."""

    def __init__(self, steps: int, done: int):
        self._steps = steps
        self._console = Console(file=sys.stdout, highlight=False, markup=False, soft_wrap=True)
        self._last_line_seconds = float("-inf")
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=None),
            TextColumn("loss {task.fields[loss]}  {task.fields[speed]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("", total=steps, completed=done, loss="-", speed="")
        self._bar.start()

    def say(self, text: str) -> None:
        """A line of its own, above the bar."""
        self._console.print(text)

    def step(self, record: StepRecord) -> None:
        speed = f"{record.tokens_per_second:,.0f} tokens/s"
        if record.mfu is not None:
            speed += f"  MFU {record.mfu:.1%}"
        self._bar.update(self._task, completed=record.step, loss=f"{record.loss:.4f}", speed=speed)
        if self._console.is_terminal:
            return
        now = time.monotonic()
        last = record.step == self._steps
        if last or now - self._last_line_seconds >= _SECONDS_BETWEEN_LINES:
            self._last_line_seconds = now
            self.say(
                f"step {record.step}/{self._steps}  loss {record.loss:.4f}  lr {record.lr:.2e}  "
                f"grad norm {record.grad_norm:.3f}  {speed}"
            )

    def close(self) -> None:
        self._bar.stop()
