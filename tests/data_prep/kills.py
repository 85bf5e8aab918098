"""Kill a real run at a chosen point: at its n-th change to the files below the output folder."""

import os
import signal
import sys
import warnings
from pathlib import Path

from data_prep.cli import main

_CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "open", "os.truncate"}


def killed_at(change: int, out: Path, arguments: list[object]) -> bool:
    """Run a command in a forked process that dies by SIGKILL just before its `change`-th change.

    Returns False where the command ended by itself, before it came so far.
    """
    with warnings.catch_warnings():
        # Arrow and OpenBLAS keep idle threads, which the forked command does not use.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        _quiet()
        count = 0

        def watch(event: str, details: tuple) -> None:
            nonlocal count
            if event not in _CHANGES or not str(details[0]).startswith(str(out)):
                return
            if event == "open" and not (details[2] & (os.O_WRONLY | os.O_RDWR)):
                return
            count += 1
            if count == change:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        os._exit(main([str(argument) for argument in arguments]))
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0, f"exit code {os.WEXITSTATUS(status)}"
    return False


def _quiet() -> None:
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
