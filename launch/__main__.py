"""`python -m launch`: start a run, or say what it will need."""

import argparse
import difflib
import importlib
import os
import sys

from pretrain import exit

COMMANDS = {
    "local": "run all processes of a run on this machine",
    "plan": "memory, time and bandwidth of a run, by arithmetic",
    "slurm": "write batch scripts for a cluster",
    "status": "how far a run is, and what failed first",
    "stop": "ask a run to save and end, and wait until it has",
    "doctor": "what this machine has, what is missing, and how fast it is",
}
MODULES = {
    "plan": "launch.plan.command",
    "slurm": "launch.slurm.command",
    "doctor": "launch.doctor.command",
    "status": "launch.status",
    "stop": "launch.stop",
}
USAGE = "usage: python -m launch COMMAND …, each with --help:\n" + "\n".join(
    f"  {name:<8}{meaning}" for name, meaning in COMMANDS.items()
)

FACTORS = {
    "replicas": "replicas (K)",
    "tp": "tensor parallelism",
    "pp": "pipeline stages",
    "cp": "context parallelism",
    "dp": "data parallelism inside a replica",
    "ep": "expert parallelism, among data-parallel ranks",
}


def main(arguments: list[str]) -> int:
    """Start the command that `arguments` name; returns the exit code."""
    # Threads that a library starts at import would not survive the fork into ranks.
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    exit.quieten_imports()
    match arguments[:1]:
        case ["local"]:
            verifies = arguments[1:2] == ["verify-optimizer"]
            options = _parser().parse(arguments[2:] if verifies else arguments[1:])
            return exit.run(lambda: _local(options, verifies), options.debug)
        case [name] if name in MODULES:
            command = importlib.import_module(MODULES[name])
            options = command.parser().parse(arguments[1:])
            return exit.run(lambda: command.run(options), options.debug)
        case ["-h" | "--help"]:
            print(USAGE)
            return 0
        case [name]:
            near = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(COMMANDS)}"
            print(f"error: command {name!r} is unknown; {hint}", file=sys.stderr)
        case _:
            print("error: COMMAND is missing; see python -m launch --help", file=sys.stderr)
    return 2


def _parser() -> exit.Parser:
    parser = exit.Parser(
        prog="python -m launch local",
        description="Run all processes of a run on this machine; "
        "`python -m pretrain --help` lists recipes and options. "
        "`python -m launch local verify-optimizer RECIPE …` takes one step on random gradients "
        "and compares it with a float64 reference.",
    )
    parser.add_argument(
        "--show", action="store_true", help="print every option and where it came from, and stop"
    )
    for name, meaning in FACTORS.items():
        parser.add_argument(
            f"--{name}", metavar="N", help=f"{meaning}; short for parallel.{name}=N"
        )
    return parser


def _local(options: argparse.Namespace, verifies: bool) -> None:
    from megatron_ext.errors import ConfigError
    from pretrain.config import load

    overrides = list(options.overrides)
    for name in FACTORS:
        value, key = getattr(options, name), f"parallel.{name}="
        if value is None:
            continue
        if any(text.startswith(key) for text in overrides):
            raise ConfigError(f"--{name} and {key}… are the same option; give one of them")
        overrides.append(f"{key}{value}")
    resolved = load(options.recipe, overrides)
    if options.show:
        from pretrain.show import print_table

        print_table(resolved)
        return
    if not verifies:
        count = resolved.config.parallel.world_size
        print(f"starting {count} process{'es' * (count > 1)}", flush=True)
    from launch import local  # brings torch and megatron-core along

    local.launch(resolved, [options.recipe, *overrides], options.debug, verifies)


if __name__ == "__main__":
    exit.end_with(main)
