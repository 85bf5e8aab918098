"""Which process runs a run now, and what is asked of it: small files in the run's folder.

The first process writes `running.json` when it starts and removes it when it ends. `python -m
launch stop` creates `stop`; the first process turns it into `stopped`, which holds the step after
which all save and end, and by which a batch script knows that it must not start the run again.
"""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from megatron_ext.errors import DataError

RUNNING_FILE = "running.json"
STOP_FILE = "stop"
STOPPED_FILE = "stopped"


@dataclass(frozen=True)
class Running:
    """The first process of a run."""

    host: str
    pid: int
    since: float  # Unix time of its start, which tells it from a later process of the same number
    slurm_job: str | None

    @property
    def is_here(self) -> bool:
        """Whether it is a process of this machine."""
        return self.host == socket.gethostname()

    @property
    def is_alive(self) -> bool:
        """Whether the process still runs; of one on another machine nobody here can say no."""
        if not self.is_here:
            return True
        try:
            process = psutil.Process(self.pid)
            return process.create_time() == self.since and process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False


@contextmanager
def noted(folder: Path) -> Iterator[None]:
    """Note that this process runs the run inside the `with` block. Older requests are void."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (STOP_FILE, STOPPED_FILE):
        (folder / name).unlink(missing_ok=True)
    since = psutil.Process().create_time()
    running = Running(socket.gethostname(), os.getpid(), since, os.environ.get("SLURM_JOB_ID"))
    path = folder / RUNNING_FILE
    partial = path.with_name(f"{path.name}.partial")
    partial.write_text(json.dumps(asdict(running)) + "\n", encoding="utf-8")
    partial.replace(path)
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def read(folder: Path) -> Running | None:
    """The note in a run's folder; None where there is none, or its process is gone.

    Raises DataError if it cannot be read.
    """
    path = folder / RUNNING_FILE
    try:
        running = Running(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError) as error:
        raise DataError(f"{path} is damaged; remove it if no run is in progress") from error
    return running if running.is_alive else None


def request_stop(folder: Path) -> None:
    """Ask the run to save and end."""
    (folder / STOP_FILE).touch()


def withdraw_stop(folder: Path) -> None:
    """Ask no more, if the run has not yet taken the request."""
    (folder / STOP_FILE).unlink(missing_ok=True)


def stop_is_requested(folder: Path) -> bool:
    """Whether a request waits to be taken."""
    return (folder / STOP_FILE).exists()


def take_stop(folder: Path, after_step: int) -> None:
    """Answer a request: the run saves after this step and ends."""
    (folder / STOPPED_FILE).write_text(f"{after_step}\n", encoding="utf-8")
    (folder / STOP_FILE).unlink(missing_ok=True)


def stop_step(folder: Path) -> int | None:
    """The step after which a run that was asked saves and ends, once it has answered."""
    path = folder / STOPPED_FILE
    text = path.read_text(encoding="utf-8").strip() if path.exists() else ""
    return int(text) if text else None
