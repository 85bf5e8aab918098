"""The command line: parse, call, and turn errors into one line and an exit code."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from fractions import Fraction
from pathlib import Path
from typing import NoReturn

from data_prep import commands
from data_prep.blending import NAMED
from data_prep.errors import DataPrepError
from data_prep.plan import Options

_SIZES = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_COUNTS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code (0, 1, 2 or 3, as the README says)."""
    args = _parser().parse_args(arguments)
    try:
        args.run(args)
    except KeyboardInterrupt:
        print("interrupted; what is finished is kept: run the same command again", file=sys.stderr)
        return 1
    except Exception as error:
        if args.debug:
            raise
        print(f"error: {_one_line(error)}", file=sys.stderr)
        return getattr(error, "exit_code", 1)
    return 0


def _one_line(error: Exception) -> str:
    if isinstance(error, DataPrepError | OSError):
        return str(error)
    last = (str(error).strip() or "no message").splitlines()[-1]
    return f"{type(error).__name__}: {last} (--debug shows where)"


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage before it."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m data_prep",
        description="Turn text (jsonl, gzip, zstd, parquet) into megatron-core's indexed binaries: "
        "nothing lost, nothing twice, restartable.",
    )
    added = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable, about: str) -> argparse.ArgumentParser:
        one = added.add_parser(name, help=about, description=about)
        one.set_defaults(run=run)
        one.add_argument("--debug", action="store_true", help="show a traceback on failure")
        one.add_argument("--json", action="store_true", help="print the summary as JSON")
        return one

    one = command("sample", commands.sample, "Write a small real corpus in Nemotron-CC's layout.")
    one.add_argument("out", type=Path, metavar="OUT")
    _add_train(
        command("train-tokenizer", commands.train_tokenizer, "Train a SentencePiece model on IN.")
    )
    _add_tokenize(
        command("tokenize", commands.tokenize, "Tokenise IN into OUT; run again to go on.")
    )
    one = command("dedup", commands.dedup, "List exact copies of texts for tokenize --skip.")
    _add_reading(one)
    _add_work(one)
    one.add_argument("--output", type=Path, required=True, metavar="SKIP")

    _add_download(
        command("download", commands.download, "Fetch a list of files; with a tokenizer, stream.")
    )
    one = command("inspect", commands.inspect, "Show counts, lengths and first documents of OUT.")
    one.add_argument("out", type=Path, metavar="OUT")
    one.add_argument("--documents", type=_natural, default=1, help="documents shown per output")

    one = command("verify", commands.verify, "Check all of OUT; exit 3 names the damaged file.")
    one.add_argument("out", type=Path, metavar="OUT")
    one.add_argument("--root", type=Path, help="where the inputs lie now, for the spot check")

    one = command("merge", commands.merge, "Join finished outputs, or all shards of one run.")
    one.add_argument("given", type=Path, nargs="+", metavar="IN")
    one.add_argument("--output", type=Path, required=True, metavar="OUT")

    _add_blend(command("blend", commands.blend, "Weigh the outputs that training draws from."))

    one = command("locate", commands.locate, "From a document to its line, or from a line.")
    one.add_argument("out", type=Path, metavar="OUT")
    one.add_argument("place", metavar="PREFIX:DOCUMENT|FILE:LINE", help="lines count from 1")
    one.add_argument("--root", type=Path, help="where the inputs lie now")
    return parser


def _add_reading(parser: argparse.ArgumentParser) -> None:
    defaults = Options()
    add = parser.add_argument
    add("given", type=Path, metavar="IN", help="a file, a list of paths (.paths.gz), or a tree")
    add("--root", type=Path, help="folder of a list's paths (default: where the list is)")
    add("--text-column", default=defaults.text_column, help="default: %(default)s")
    add(
        "--where",
        default="",
        metavar="'KEY=VALUE[,VALUE…] …'",
        help="select by Hive keys in the paths: 'quality=high,medium-high kind=actual'",
    )
    add(
        "--bad-records",
        choices=("stop", "skip"),
        default=defaults.bad_records,
        help="at a malformed record (default: stop)",
    )


def _add_train(parser: argparse.ArgumentParser) -> None:
    _add_reading(parser)
    add = parser.add_argument
    add("--vocab-size", type=_positive, required=True, metavar="N")
    add("--output", type=Path, required=True, metavar="FILE.model")
    add("--workers", type=_positive, default=_cpus(), help="threads (default: all cores)")
    add(
        "--sample-bytes",
        type=_size,
        default=_size("256M"),
        help="train on about this much text, chosen by hash (default: 256M)",
    )


def _add_tokenize(parser: argparse.ArgumentParser) -> None:
    _add_reading(parser)
    add = parser.add_argument
    add("--tokenizer", type=Path, required=True, metavar="FILE")
    add("--output", type=Path, required=True, metavar="OUT")
    _add_work(parser)
    add("--skip", type=Path, metavar="SKIP", help="leave out the records that dedup listed there")
    add("--max-bad", default="0.1%", help="with skip: stop above this share (default: 0.1%%)")
    add("--validation", default="0", metavar="SHARE", help="hold out this share, as in 0.5%%")
    add("--bos", help="prepend: auto (the model's own), an id or a piece (default: none)")
    add("--eod", help="append: an id or a piece (default: the model's own eos)")
    add("--max-tokens", type=_count, default=0, metavar="N", help="an unbiased subset: at most N")
    add(
        "--documents-per-output",
        type=_positive,
        default=Options().documents_per_output,
        metavar="N",
        help="cut larger partitions into numbered outputs (default: %(default)s)",
    )
    add("--shard", type=_shard, default=(0, 1), metavar="i/n", help="do part i of n (from 0)")
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
    add("--dry-run", action="store_true", help="estimate tokens, hours and disk; write nothing")


def _add_work(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--workers", type=_positive, default=_cpus(), metavar="N", help="default: all cores")
    add("--max-record-bytes", type=_size, default=_size("64M"), help="default: 64M")
    add("--unit-bytes", type=_size, default=_size("128M"), help="grain of work (default: 128M)")


def _add_download(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("given", type=Path, metavar="LIST", help="paths to fetch, as in data-jsonl.paths.gz")
    add("--base", required=True, metavar="URL", help="address that the paths are relative to")
    add("--output", type=Path, required=True, metavar="DIR|OUT")
    add("--connections", type=_positive, default=4, help="files at a time (default: 4)")
    add("--attempts", type=_positive, default=8, help="tries without a new byte (default: 8)")
    add("--pause-seconds", type=float, default=1.0, help="doubles with each try (default: 1)")
    stream = parser.add_argument_group("download, tokenise and delete in batches")
    stream.add_argument("--tokenizer", type=Path, metavar="FILE", help="turns this on")
    stream.add_argument("--batch-files", type=_positive, default=64, help="default: 64")
    stream.add_argument("--workers", type=_positive, default=_cpus(), help="default: all cores")
    stream.add_argument("--text-column", default=Options().text_column)
    stream.add_argument("--validation", default="0", metavar="SHARE")


def _add_blend(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("out", type=Path, metavar="OUT")
    add("--use", default="all", metavar="NAME", help=f"one of {', '.join(NAMED)} (default: all)")
    add(
        "--set",
        type=_weight,
        action="append",
        default=[],
        metavar="PREFIX=SHARE",
        help="give a prefix this share instead; 0 leaves it out",
    )
    add("--tokens", type=_count, metavar="N", help="show epochs for this budget, as in 300B")
    add("--output", type=Path, metavar="FILE", help="write the blend (default: only show it)")


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 0 up")
    return int(text)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 up")
    return int(text)


def _size(text: str) -> int:
    """Bytes: `64M`, `1G` or a plain number, in powers of 1,024."""
    return _scaled(text, _SIZES, "size; write bytes, or 64M, 1G")


def _count(text: str) -> int:
    """`300B`, `1.5T`, `2M` or a plain number, in powers of ten."""
    return _scaled(text, _COUNTS, "count; write 300B or 2.5M")


def _scaled(text: str, units: dict[str, int], what: str) -> int:
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    try:
        value = Fraction(number) * units[unit]
    except (KeyError, ValueError, ZeroDivisionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no {what}") from error
    if value < 1 or value.denominator != 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 up")
    return int(value)


def _shard(text: str) -> tuple[int, int]:
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is no shard; write 0/8 to 7/8")
    return int(index), int(count)


def _weight(text: str) -> tuple[str, float]:
    prefix, _, share = text.rpartition("=")
    try:
        return prefix, float(share)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no PREFIX=SHARE") from error
