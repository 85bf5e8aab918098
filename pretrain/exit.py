"""How a command ends: one line on stderr and an exit code."""

import argparse
import logging
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

from megatron_ext.errors import StackError

INTERRUPTED = 130


class CommandParser(argparse.ArgumentParser):
    """Parser of a command line, whose errors are one line."""

    def __init__(self, prog: str, description: str, **more: Any):
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(prog=prog, description=description, formatter_class=formatter, **more)
        self.add_argument("--debug", action="store_true", help="show the traceback of an error")

    def parse(self, arguments: list[str]) -> argparse.Namespace:
        """The options."""
        return self.parse_args(arguments)

    def error(self, message: str) -> NoReturn:
        """End with exit code 2."""
        self.exit(2, f"error: {message}; see {self.prog} --help\n")


class Parser(CommandParser):
    """Parser of `RECIPE [key=value …] [--options]`, in any order."""

    def __init__(self, prog: str, description: str):
        super().__init__(prog, description, usage=f"{prog} RECIPE [key=value …] [options]")
        self.add_argument("recipe_and_overrides", nargs="*", help=argparse.SUPPRESS)

    def parse(self, arguments: list[str]) -> argparse.Namespace:
        """The options, with `recipe` and `overrides`."""
        options = self.parse_intermixed_args(arguments)
        if not options.recipe_and_overrides:
            self.error("RECIPE is missing")
        options.recipe, *options.overrides = options.recipe_and_overrides
        return options


def run(command: Callable[[], None], debug: bool = False) -> int:
    """Call `command` and return the exit code; a failure is one line on stderr.

    With `debug` its traceback stands above that line.
    """
    try:
        command()
    except (KeyboardInterrupt, SystemExit) as end:
        return INTERRUPTED if isinstance(end, KeyboardInterrupt) else int(end.code or 0)
    # Everything, because errors of torch's checkpoints are no Exceptions.
    except BaseException as error:
        if debug:
            traceback.print_exc()
        print(f"error: {describe(error)}", file=sys.stderr)
        return error.exit_code if isinstance(error, StackError) else 1
    return 0


def end_with(main: Callable[[list[str]], int]) -> NoReturn:
    """Call a program's `main` with its arguments and end with its exit code.

    Ctrl-C is no traceback, also where `main` is still importing what it needs.
    """
    try:
        code = main(sys.argv[1:])
    except KeyboardInterrupt:
        code = INTERRUPTED
    sys.exit(code)


def describe(error: BaseException) -> str:
    """One line."""
    if isinstance(error, StackError):
        return str(error)
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]} (--debug shows where)"


def quieten_imports() -> None:
    """Before torch is imported: keep it and megatron-core from warning of what needs no action."""
    # c10d warns of each time-out, which then ends the run with a line of its own.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    for message in ("Transformer Engine and Apex are not", "Apex is not installed"):
        warnings.filterwarnings("ignore", message=message)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
