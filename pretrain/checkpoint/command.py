"""The command line of `python -m pretrain checkpoint`."""

import argparse
from collections.abc import Callable
from pathlib import Path

from pretrain import exit
from pretrain.checkpoint import convert, look

PATH_HELP = "a run's folder, its checkpoints/, or one step's folder"
OUT_HELP = "a folder that is not there yet"

EXAMPLES = """
python -m pretrain checkpoint verify runs/a
python -m pretrain checkpoint diff runs/a runs/b --kind anchor
python -m pretrain checkpoint reshape runs/a parallel.tp=4 parallel.replicas=8
python -m pretrain checkpoint average runs/a/checkpoints/step-0000* runs/average
python -m pretrain checkpoint import a-hugging-face-folder runs/imported
python -m launch local demo resume.weights=runs/imported …
"""


def main(arguments: list[str]) -> int:
    """Run the subcommand that `arguments` name; returns the exit code."""
    options = _parser().parse_args(arguments)
    return exit.run(lambda: options.command(options), options.debug)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m pretrain checkpoint",
        description="Look at, check, compare and convert checkpoints, by one process.",
        epilog=f"examples:\n{EXAMPLES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(name: str, command: Callable[[argparse.Namespace], None], text: str) -> _Parser:
        added = commands.add_parser(name, help=text, description=text)
        added.set_defaults(command=command)
        added.add_argument("--json", action="store_true", help="print JSON")
        added.add_argument("--debug", action="store_true", help="show the traceback of an error")
        return added

    _add_looking(add)
    _add_converting(add)
    return parser


def _add_looking(add: "Callable[..., _Parser]") -> None:
    inspect = add("inspect", look.inspect, "What is in a checkpoint (of a run: in the newest).")
    inspect.add_argument("path", type=Path, metavar="PATH", help=PATH_HELP)
    inspect.add_argument("--tensors", action="store_true", help="list every tensor")
    inspect.add_argument("--options", action="store_true", help="list the options of its run")
    verify = add("verify", look.verify, "Read every byte of a checkpoint, or of all of a run's.")
    verify.add_argument("path", type=Path, metavar="PATH", help=PATH_HELP)
    diff = add("diff", look.diff, "Which tensors of two checkpoints differ, the farthest first.")
    diff.add_argument("first", type=Path, metavar="A", help=PATH_HELP)
    diff.add_argument("second", type=Path, metavar="B", help=PATH_HELP)
    diff.add_argument("--kind", action="append", default=[], help="only master, anchor, momentum …")
    diff.add_argument("--top", type=int, default=20, help="show so many; 0 shows all")
    reshape = add(
        "reshape",
        look.reshape,
        "Whether a run can go on from a checkpoint on another layout, or with other options, and "
        "by which rules. Checks every byte. Nothing is rewritten, because a checkpoint holds whole "
        "logical tensors: any layout reads from it what it needs.",
    )
    reshape.add_argument("path", type=Path, metavar="PATH", help=PATH_HELP)
    reshape.add_argument("overrides", nargs="*", metavar="key=value", help="like parallel.tp=4")


def _add_converting(add: "Callable[..., _Parser]") -> None:
    average = add(
        "average",
        convert.average,
        "The mean of the global weights of several checkpoints, as a checkpoint that holds weights "
        "only: for export, and for resume.weights.",
    )
    average.add_argument("paths", type=Path, nargs="+", metavar="PATH", help=PATH_HELP)
    average.add_argument("output", type=Path, metavar="OUT", help=OUT_HELP)
    from_hf = add(
        "import",
        convert.from_huggingface,
        "The weights of a Hugging Face folder (Gemma3ForCausalLM or Qwen3ForCausalLM of the form "
        "that export writes), as a checkpoint that holds weights only.",
    )
    from_hf.add_argument("path", type=Path, metavar="FOLDER", help="config.json and safetensors")
    from_hf.add_argument("output", type=Path, metavar="OUT", help=OUT_HELP)
    to_hf = add("export", convert.to_huggingface, "The global weights as a Hugging Face model.")
    to_hf.add_argument("path", type=Path, metavar="PATH", help=PATH_HELP)
    to_hf.add_argument("output", type=Path, metavar="OUT", help=OUT_HELP)
    to_hf.add_argument("--format", choices=["hf"], default="hf", help="the only one so far")
    to_hf.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    to_hf.add_argument(
        "--config", type=Path, help="config.yaml of the run; else the checkpoint's own options"
    )
    to_hf.add_argument("--no-tokenizer", action="store_true", help="leave the tokenizer out")


class _Parser(argparse.ArgumentParser):
    error = exit.Parser.error
