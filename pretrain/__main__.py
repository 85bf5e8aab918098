"""`python -m pretrain`: what each process of a run does. `python -m launch` starts them."""

import argparse
import sys

from pretrain import exit


def main(arguments: list[str]) -> int:
    """Train by a recipe, or show the configuration; returns the exit code."""
    exit.quieten_imports()
    if arguments[:1] == ["checkpoint"]:
        from pretrain import checkpoint

        return checkpoint.main(arguments[1:])
    if arguments[:1] == ["report"]:
        from pretrain.report import command

        return command.main(arguments[1:])
    if arguments[:1] == ["verify-resume"]:
        from pretrain import verify_resume

        return verify_resume.main(arguments[1:])
    if arguments[:1] == ["verify-optimizer"]:
        options = _parse(arguments[1:])
        return exit.run(lambda: _verify_optimizer(options), options.debug)
    options = _parse(arguments)
    return exit.run(lambda: _train_or_show(options), options.debug)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = exit.Parser(
        prog="python -m pretrain",
        description="Train by RECIPE, as one process of a run; "
        "`python -m launch local` starts them all on this machine.",
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
    sys.exit(main(sys.argv[1:]))
