"""`python -m pretrain`: what each process of a run does. `python -m launch` starts them."""

import argparse
import difflib
import importlib
import sys

from pretrain import exit

COMMANDS = {
    "checkpoint": "look at checkpoints, compare, average, convert them",
    "report": "one HTML page about one or several runs",
    "verify-resume": "is a stopped and resumed run the straight one?",
    "verify-optimizer": "is the optimizer's step on this layout the float64 reference's?",
}
MODULES = {
    "checkpoint": "pretrain.checkpoint",
    "report": "pretrain.report.command",
    "verify-resume": "pretrain.verify_resume",
}


def main(arguments: list[str]) -> int:
    """Train by a recipe, show the configuration, or run a command; returns the exit code."""
    exit.quieten_imports()
    match arguments[:1]:
        case [name] if name in MODULES:
            return importlib.import_module(MODULES[name]).main(arguments[1:])
        case ["verify-optimizer"]:
            options = _parse(arguments[1:])
            return exit.run(lambda: _verify_optimizer(options), options.debug)
        case [name] if near := difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0.75):
            print(f"error: command {name!r} is unknown; did you mean {near[0]}?", file=sys.stderr)
            return 2
    options = _parse(arguments)
    return exit.run(lambda: _train_or_show(options), options.debug)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = exit.Parser(
        prog="python -m pretrain",
        description="Train by RECIPE, as one process of a run; "
        "`python -m launch local` starts them all on this machine.\n\n"
        "Instead of RECIPE, each with --help:\n"
        + "\n".join(f"  {name:<18}{meaning}" for name, meaning in COMMANDS.items()),
    )
    parser.add_argument(
        "--show", action="store_true", help="print every option and where it came from, and stop"
    )
    if {"-h", "--help"} & set(arguments):
        from pretrain.show import help_text

        parser.epilog = help_text()
    return parser.parse(arguments)


def _train_or_show(options: argparse.Namespace) -> None:
    from pretrain.config import check_machine, load

    resolved = load(options.recipe, options.overrides)
    if options.show:
        from pretrain.show import print_table

        print_table(resolved)
        return
    check_machine(resolved.config)
    from pretrain.loop import train

    train(resolved)


def _verify_optimizer(options: argparse.Namespace) -> None:
    from pretrain.config import check_machine, load

    resolved = load(options.recipe, options.overrides)
    check_machine(resolved.config)
    from pretrain.verify_optimizer import verify_optimizer

    verify_optimizer(resolved)


if __name__ == "__main__":
    exit.end_with(main)
