"""What the commands print with."""

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TransferSpeedColumn
from rich.table import Column


def console() -> Console:
    """Standard output without markup, since names may hold brackets; wide where it is no terminal,
    so that no name is broken."""
    found = Console(highlight=False, markup=False)
    return found if found.is_terminal else Console(highlight=False, markup=False, width=200)


def progress(hidden: bool) -> Progress:
    """A bar of bytes on standard error."""
    columns = ("{task.description}", BarColumn(), DownloadColumn(), TransferSpeedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=hidden)


def right(*names: str) -> list[Column]:
    """Columns of numbers."""
    return [Column(name, justify="right") for name in names]


def size_text(size_bytes: float) -> str:
    """Like 1.5 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size_bytes < 1000:
            return f"{size_bytes:.4g} {unit}"
        size_bytes /= 1000
    return f"{size_bytes:.4g} TB"
