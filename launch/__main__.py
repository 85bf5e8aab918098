"""`python -m launch`: start a run."""

import argparse
import os
import sys

from pretrain import exit

USAGE = "usage: python -m launch local RECIPE [key=value …] [options]; see its --help"

FACTORS = {
    "replicas": "replicas (K)",
    "tp": "tensor parallelism",
    "pp": "pipeline stages",
    "cp": "context parallelism",
    "dp": "data parallelism inside a replica",
}


def main(arguments: list[str]) -> int:
    """Start the command that `arguments` name; returns the exit code."""
    # Threads that a library starts at import would not survive the fork into ranks.
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    exit.quieten_imports()
    if arguments[:1] != ["local"]:
        wanted = {"-h", "--help"} & set(arguments)
        print(USAGE, file=sys.stdout if wanted else sys.stderr)
        return 0 if wanted else 2
    options = _parser().parse(arguments[1:])
    return exit.run(lambda: _local(options), options.debug)


def _parser() -> exit.Parser:
    parser = exit.Parser(
        prog="python -m launch local",
        description="Run all processes of a run on this machine; "
        "`python -m pretrain --help` lists recipes and options.",
    )
    for name, meaning in FACTORS.items():
        parser.add_argument(
            f"--{name}", metavar="N", help=f"{meaning}; short for parallel.{name}=N"
        )
    return parser


def _local(options: argparse.Namespace) -> None:
    from launch import local
    from megatron_ext.errors import ConfigError

    overrides = list(options.overrides)
    for name in FACTORS:
        value, key = getattr(options, name), f"parallel.{name}="
        if value is None:
            continue
        if any(text.startswith(key) for text in overrides):
            raise ConfigError(f"--{name} and {key}… are the same option; give one of them")
        overrides.append(f"{key}{value}")
    local.launch(options.recipe, overrides, options.debug)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
