"""How far a run is: a live display on a terminal, plain lines in a log. Always on stderr."""

import sys
import time
from collections.abc import Iterable
from types import TracebackType

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn
from rich.text import Text

_LOG_SECONDS = 15.0


def in_bytes(size: float) -> str:
    """`1.2 GB`, in powers of 1,000."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:,.3g} TB" if size < 1000 else f"{size:,.0f} TB"


def duration(seconds: float) -> str:
    """`40 s`, `12 min`, `5 h 20 min` or `3 days 4 h`."""
    minutes, hours = round(seconds / 60), round(seconds / 3600)
    if seconds < 100:
        return f"{seconds:.0f} s"
    if minutes < 100:
        return f"{minutes} min"
    if hours < 48:
        return f"{minutes // 60} h {minutes % 60} min"
    return f"{hours // 24} days {hours % 24} h"


class _Display(Progress):
    """One bar; below it a line of figures, and one for each worker. Nothing is cut at 80 columns
    but the ends of long file names."""

    def __init__(self, console: Console):
        self.figures = ""
        self.workers: dict[int, str] = {}
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[left]}"),
            console=console,
            transient=True,
            expand=True,
        )

    def get_renderables(self) -> Iterable[RenderableType]:
        yield self.make_tasks_table(self.tasks)
        lines = [self.figures, *(f"worker {n}: {doing}" for n, doing in self.workers.items())]
        for line in filter(None, lines):
            yield Text(f"  {line}", no_wrap=True, overflow="ellipsis")


class Reporter:
    """Shows one phase at a time, and what each worker is doing. Use as a context manager.

    `console` is where (default: stderr, live if that is a terminal).
    """

    def __init__(self, console: Console | None = None) -> None:
        console = console or Console(stderr=True)
        self._live = _Display(console) if console.is_terminal else None

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
            self._live.workers.clear()
            self._live.figures = ""
            self._bar = self._live.add_task(name, total=self._total, left="")

    def advance(self, size: int, documents: int = 0, tokens: int = 0) -> None:
        self._bytes += size
        self._documents += documents
        self._tokens += tokens
        now = time.monotonic()
        if self._live:
            self._live.figures = self._rates(now)
            self._live.update(self._bar, completed=self._bytes, left=self._left(now))
        elif now - self._logged > _LOG_SECONDS:
            self._logged = now
            share = self._bytes / self._total
            print(
                f"{self._name}: {share:.1%}, {self._rates(now)}, {self._left(now)}",
                file=sys.stderr,
                flush=True,
            )

    def worker(self, number: int, doing: str) -> None:
        """Show what worker `number` is on (terminal only)."""
        if self._live:
            self._live.workers[number] = doing or "waiting"

    def _left(self, now: float) -> str:
        share = min(self._bytes / self._total, 1.0)
        return f"{duration((now - self._began) * (1 - share) / share)} left" if share else ""

    def _rates(self, now: float) -> str:
        seconds = max(now - self._began, 1e-9)
        text = f"{self._bytes / 1e6 / seconds:.1f} MB/s"
        if self._documents:
            text = f"{self._documents:,} documents, {text}, {self._tokens / seconds:,.0f} tokens/s"
        return text
