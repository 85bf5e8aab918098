"""One process at a time in a folder."""

import fcntl
import os
import socket
from pathlib import Path

from data_prep.errors import UsageError


class Lock:
    """A file that one process at a time holds. It is stale exactly when the kernel grants it.

    Use as a context manager.
    """

    def __init__(self, path: Path, folder: Path):
        """`folder`: what the lock is for, in messages."""
        self._path = path
        self._folder = folder

    def __enter__(self) -> "Lock":
        """Raises UsageError where another process holds it (which it names), or none can."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UsageError(
                f"--output {self._folder}: cannot be written to ({error.strerror.lower()}: "
                f"{error.filename})"
            ) from error
        try:
            self._hold()
            os.ftruncate(self._descriptor, 0)
            holder = f"process {os.getpid()} on {socket.gethostname()}\n"
            os.write(self._descriptor, holder.encode())
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def _hold(self) -> None:
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A former holder deletes the file when it ends: what was locked may be gone.
            if self._path.stat().st_ino != os.fstat(self._descriptor).st_ino:
                raise BlockingIOError
        except (BlockingIOError, FileNotFoundError) as error:
            holder = os.read(self._descriptor, 200).decode(errors="replace").strip()
            raise UsageError(
                f"{self._folder}: {holder or 'another run'} is working here; wait for it to end"
            ) from error
        except OSError as error:
            raise UsageError(
                f"--output {self._folder}: its file system grants no locks "
                f"({error.strerror.lower()}); choose another, or mount it with flock"
            ) from error
