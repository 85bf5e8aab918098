"""The command line: parse, call, and turn errors into one line and an exit code."""

import argparse
import os
import sys
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path

from data_prep import commands
from data_prep.arguments import Parser, count, natural, positive, seconds, shard, size, weight
from data_prep.blending import NAMED
from data_prep.errors import DataPrepError
from data_prep.plan import Options

INTERRUPTED = 130  # what shells report of a command that Ctrl-C ended


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code (0, 1, 2, 3 or 130, as the README says)."""
    parser, of_command = _parser()
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        of_command[args.command].refuse_unknown(unknown)
    try:
        args.run(args)
    except KeyboardInterrupt:
        print("interrupted; what is finished is kept: run the same command again", file=sys.stderr)
        return INTERRUPTED
    except Exception as error:
        if args.debug:
            raise
        print(f"error: {_one_line(error)}", file=sys.stderr)
        return getattr(error, "exit_code", 1)
    return 0


def _one_line(error: Exception) -> str:
    if isinstance(error, DataPrepError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        places = (str(path) for path in (error.filename, error.filename2) if path)
        return ": ".join((" and ".join(places), error.strerror.lower())).removeprefix(": ")
    last = (str(error).strip() or "no message").splitlines()[-1]
    return f"{type(error).__name__}: {last} (--debug shows where)"


_EXAMPLES = {
    "sample": """
        python -m data_prep sample corpus
    """,
    "train-tokenizer": """
        python -m data_prep train-tokenizer corpus --vocab-size 32000 --output tokenizer.model
    """,
    "tokenize": """
        python -m data_prep tokenize corpus --tokenizer tokenizer.model --output tokens \\
            --where 'quality=high,medium-high kind=actual' --validation 0.5%
        python -m data_prep tokenize corpus --tokenizer tokenizer.model --output tokens --dry-run
        python -m data_prep tokenize corpus --tokenizer tokenizer.model --output part-3 --shard 3/8
    """,
    "dedup": """
        python -m data_prep dedup corpus --output copies
        python -m data_prep dedup corpus --output copies --near
        python -m data_prep tokenize corpus --tokenizer t.model --output tokens --skip copies
    """,
    "download": """
        python -m data_prep download data-jsonl.paths.gz --base https://data.commoncrawl.org \\
            --output cc
        python -m data_prep download data-jsonl.paths.gz --base https://data.commoncrawl.org \\
            --output tokens --tokenizer tokenizer.model     # fetch, tokenise, delete
    """,
    "inspect": """
        python -m data_prep inspect tokens --documents 3
    """,
    "verify": """
        python -m data_prep verify tokens
        python -m data_prep verify tokens --root /where/the/inputs/lie/now
    """,
    "merge": """
        python -m data_prep merge part-0 part-1 part-2 --output tokens
    """,
    "blend": """
        python -m data_prep blend tokens --tokens 300B
        python -m data_prep blend tokens --use nemotron-cc-hq --output hq.yaml
        python -m data_prep blend tokens --set quality=high=0.7 --output mine.yaml
    """,
    "locate": """
        python -m data_prep locate tokens quality=high/kind=actual/kind2=actual:17
        python -m data_prep locate tokens quality=high/kind=actual/kind2=actual/part-00000.jsonl:5
    """,
}


def _parser() -> tuple[Parser, dict[str, Parser]]:
    """The parser, and those of its commands by name."""
    parser = Parser(
        prog="python -m data_prep",
        description="Turn text (jsonl, gzip, zstd, parquet) into megatron-core's indexed binaries: "
        "nothing lost, nothing twice, restartable.",
        epilog="Exit codes: 0 success, 2 wrong use, 3 bad data or a damaged output, 130 Ctrl-C, "
        "1 anything else.",
    )
    added = parser.add_subparsers(required=True, metavar="COMMAND", dest="command")

    def command(name: str, run: Callable, about: str) -> Parser:
        one = added.add_parser(
            name,
            help=about,
            description=about,
            epilog="examples:\n" + textwrap.indent(textwrap.dedent(_EXAMPLES[name]).strip(), "  "),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        one.set_defaults(run=run)
        one.add_argument("--debug", action="store_true", help="show a traceback on failure")
        one.add_argument("--json", action="store_true", help="print the summary as JSON")
        return one

    one = command("sample", commands.sample, "Write a small real corpus in Nemotron-CC's layout.")
    one.add_argument("out", type=Path, metavar="OUT", help="a folder; text comes below data-jsonl/")
    _add_train(
        command("train-tokenizer", commands.train_tokenizer, "Train a SentencePiece model on IN.")
    )
    _add_tokenize(
        command("tokenize", commands.tokenize, "Tokenise IN into OUT; run again to go on.")
    )
    _add_dedup(command("dedup", commands.dedup, "List copies of texts for tokenize --skip."))
    _add_download(
        command("download", commands.download, "Fetch a list of files; with a tokenizer, stream.")
    )
    one = command("inspect", commands.inspect, "Show counts, lengths and first documents of OUT.")
    _add_out(one)
    one.add_argument(
        "--documents", type=natural, default=1, metavar="N", help="shown per output (default: 1)"
    )
    one = command("verify", commands.verify, "Check all of OUT; exit 3 names the damaged file.")
    _add_out(one)
    one.add_argument("--root", type=Path, help="where the inputs lie now, for the spot check")

    one = command("merge", commands.merge, "Join finished outputs, or all shards of one run.")
    one.add_argument("given", type=Path, nargs="+", metavar="IN", help="finished outputs")
    one.add_argument("--output", type=Path, required=True, metavar="OUT", help="a new folder")
    one.add_argument(
        "--consume",
        action="store_true",
        help="delete the given outputs while they are joined: no room is needed for both",
    )
    _add_blend(command("blend", commands.blend, "Weigh the outputs that training draws from."))

    one = command("locate", commands.locate, "From a document to its line, or from a line.")
    _add_out(one)
    one.add_argument("place", metavar="PREFIX:DOCUMENT|FILE:LINE", help="lines count from 1")
    one.add_argument("--root", type=Path, help="where the inputs lie now")
    return parser, added.choices


def _add_out(parser: Parser) -> None:
    parser.add_argument("out", type=Path, metavar="OUT", help="a finished output of tokenize")


def _add_reading(parser: Parser) -> None:
    defaults = Options()
    add = parser.add_argument
    add("given", type=Path, metavar="IN", help="a file, a list of paths (.paths.gz), or a tree")
    add("--root", type=Path, help="folder of a list's paths (default: where the list is)")
    add(
        "--text-column",
        default=defaults.text_column,
        metavar="NAME",
        help="key or column that holds the text (default: %(default)s)",
    )
    add(
        "--where",
        default="",
        metavar="'KEY=VALUE[,VALUE…] …'",
        help="select by Hive keys in the paths: 'quality=high,medium-high kind=actual'",
    )


def _add_bad_records(parser: Parser) -> None:
    parser.add_argument(
        "--bad-records",
        choices=("stop", "skip"),
        default=Options().bad_records,
        help="at a malformed record (default: stop)",
    )


def _add_train(parser: Parser) -> None:
    _add_reading(parser)
    _add_bad_records(parser)
    add = parser.add_argument
    add("--vocab-size", type=positive, required=True, metavar="N", help="pieces of the model")
    add("--output", type=Path, required=True, metavar="FILE.model", help="must not exist yet")
    add("--workers", type=positive, default=_cpus(), metavar="N", help="threads (default: cores)")
    add(
        "--sample-bytes",
        type=size,
        default=size("256M"),
        metavar="SIZE",
        help="train on about this much text, chosen by hash (default: 256M)",
    )


def _add_tokenize(parser: Parser) -> None:
    _add_reading(parser)
    _add_tokenizer(parser, required=True)
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="OUT", help="folder of the result")
    add("--dry-run", action="store_true", help="estimate tokens, hours and disk; write nothing")
    add("--max-tokens", type=count, default=0, metavar="N", help="an unbiased subset: at most N")
    add(
        "--documents-per-output",
        type=positive,
        default=Options().documents_per_output,
        metavar="N",
        help="cut larger partitions into numbered outputs (default: %(default)s)",
    )
    _add_bad_records(parser)
    add(
        "--max-bad",
        default="0.1%",
        metavar="SHARE",
        help="with --bad-records skip: stop above this share of the records (default: 0.1%%)",
    )
    _add_cleaning(parser)
    _add_work(parser)
    add("--shard", type=shard, default=(0, 1), metavar="i/n", help="do part i of n (from 0)")
    add(
        "--executor",
        choices=("local", "ray"),
        default="local",
        help="ray: the cluster of RAY_ADDRESS, with --workers tasks at a time (default: local)",
    )
    add(
        "--backend",
        choices=("reference", "gigatoken"),
        default="reference",
        help="gigatoken: faster for SentencePiece, compared on a sample of the run",
    )


def _add_tokenizer(parser: Parser, required: bool) -> None:
    add = parser.add_argument
    add(
        "--tokenizer",
        type=Path,
        required=required,
        metavar="FILE",
        help="SentencePiece .model, tokenizer.json, tekken.json or tiktoken ranks",
    )
    add("--bos", metavar="WHICH", help="prepend: auto (the model's own), an id or a piece")
    add("--eod", metavar="WHICH", help="append: an id or a piece (default: the model's own eos)")
    add("--validation", default="0", metavar="SHARE", help="hold out this share, as in 0.5%%")


def _add_cleaning(parser: Parser) -> None:
    defaults = Options()
    group = parser.add_argument_group("cleaning (Nemotron-CC as published has been cleaned)")
    group.add_argument(
        "--skip", type=Path, metavar="SKIP", help="leave out what dedup listed there"
    )
    group.add_argument(
        "--clean",
        default="",
        metavar="RULE[,RULE…]",
        help="ftfy, language, length, repetition; each is counted in the manifest (default: none)",
    )
    group.add_argument(
        "--language", default=defaults.language, help="what the language rule keeps (default: en)"
    )
    group.add_argument(
        "--clean-except",
        default=defaults.clean_except,
        metavar="'KEY=VALUE …'",
        help="partitions that length and repetition leave alone (default, as in the paper: "
        "%(default)s)",
    )


def _add_dedup(parser: Parser) -> None:
    _add_reading(parser)
    add = parser.add_argument
    add("--output", type=Path, required=True, metavar="SKIP", help="folder of the list")
    add(
        "--near",
        action="store_true",
        help="also texts that share about 80%% of their 24-character pieces with an earlier one "
        "(MinHash, 20 bands of 13)",
    )
    _add_work(parser)


def _add_work(parser: Parser) -> None:
    add = parser.add_argument
    add("--workers", type=positive, default=_cpus(), metavar="N", help="default: all cores")
    add(
        "--max-record-bytes",
        type=size,
        default=size("64M"),
        metavar="SIZE",
        help="a longer record is a bad one (default: 64M)",
    )
    add(
        "--unit-bytes",
        type=size,
        metavar="SIZE",
        help="text in a unit of work and of restart (default: by the size of the input, "
        "4M to 128M)",
    )


def _add_download(parser: Parser) -> None:
    add = parser.add_argument
    add("given", type=Path, metavar="LIST", help="paths to fetch, as in data-jsonl.paths.gz")
    add("--base", required=True, metavar="URL", help="address that the paths are relative to")
    add("--output", type=Path, required=True, metavar="DIR|OUT", help="of files; or of the tokens")
    add("--connections", type=positive, default=4, metavar="N", help="at a time (default: 4)")
    add("--attempts", type=positive, default=8, metavar="N", help="tries with no byte (default: 8)")
    add("--pause-seconds", type=seconds, default=1.0, help="doubles with each try (default: 1)")
    stream = parser.add_argument_group("download, tokenise and delete in batches")
    _add_tokenizer(stream, required=False)
    add = stream.add_argument
    add("--batch-files", type=positive, default=64, metavar="N", help="on disk (default: 64)")
    add("--workers", type=positive, default=_cpus(), metavar="N", help="default: all cores")
    add("--text-column", default=Options().text_column, metavar="NAME", help="default: %(default)s")
    add("--where", default="", metavar="'KEY=VALUE …'", help="fetch only these partitions")
    _add_bad_records(stream)
    add("--max-bad", default="0.1%", metavar="SHARE", help="see tokenize (default: 0.1%%)")


def _add_blend(parser: Parser) -> None:
    _add_out(parser)
    add = parser.add_argument
    add("--use", default="all", metavar="NAME", help=f"one of {', '.join(NAMED)} (default: all)")
    add(
        "--set",
        type=weight,
        action="append",
        default=[],
        metavar="PREFIX=SHARE",
        help="give the outputs at or below PREFIX this share of the whole; 0 leaves them out",
    )
    add("--tokens", type=count, metavar="N", help="show epochs for this budget, as in 300B")
    add("--output", type=Path, metavar="FILE", help="write the blend (default: only show it)")


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
