"""How far a run is: a live bar on a terminal, plain lines in a log. Always on stderr."""

import sys
import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

_LOG_SECONDS = 15.0


class Reporter:
    """Shows one phase at a time, and what each worker is doing. Use as a context manager."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._live = (
            Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.percentage:>3.0f}%"),
                TextColumn("{task.fields[detail]}"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                console=console,
                transient=True,
            )
            if console.is_terminal
            else None
        )
        self._workers: dict[int, int] = {}

    def __enter__(self) -> "Reporter":
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live:
            self._live.stop()

    def phase(self, name: str, total_bytes: int) -> None:
        """Begin a phase that will advance by `total_bytes` in all."""
        self._name, self._total = name, max(total_bytes, 1)
        self._bytes = self._documents = self._tokens = 0
        self._began = self._logged = time.monotonic()
        if self._live:
            for task in self._live.task_ids:
                self._live.remove_task(task)
            self._workers.clear()
            self._bar = self._live.add_task(name, total=self._total, detail="")

    def advance(self, size: int, documents: int = 0, tokens: int = 0) -> None:
        self._bytes += size
        self._documents += documents
        self._tokens += tokens
        now = time.monotonic()
        if self._live:
            self._live.update(self._bar, completed=self._bytes, detail=self._rates(now))
        elif now - self._logged > _LOG_SECONDS:
            self._logged = now
            share = self._bytes / self._total
            left = (now - self._began) * (1 - share) / max(share, 1e-9)
            print(
                f"{self._name}: {share:.1%}, {self._rates(now)}, about {left:.0f} s left",
                file=sys.stderr,
                flush=True,
            )

    def worker(self, number: int, doing: str) -> None:
        """Show what worker `number` is on (terminal only)."""
        if not self._live:
            return
        if number not in self._workers:
            self._workers[number] = self._live.add_task("", total=None, detail="")
        self._live.update(self._workers[number], description=f"  worker {number}", detail=doing)

    def _rates(self, now: float) -> str:
        seconds = max(now - self._began, 1e-9)
        text = f"{self._bytes / 1e6 / seconds:.1f} MB/s"
        if self._documents:
            text = f"{self._documents:,} documents, {text}, {self._tokens / seconds:,.0f} tokens/s"
        return text
