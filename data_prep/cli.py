"""The command line: parse, call, print, and turn errors into one line and an exit code."""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

from data_prep import inspection, outputs
from data_prep.errors import DataPrepError
from data_prep.plan import Options, fraction
from data_prep.progress import Reporter
from data_prep.run import Request, tokenize
from data_prep.sample import write_sample
from data_prep.train_tokenizer import train

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code (0, 1, 2 or 3, as the README says)."""
    args = _parser().parse_args(arguments)
    try:
        args.run(args)
    except (DataPrepError, OSError) as error:
        if args.debug:
            raise
        print(f"error: {error}", file=sys.stderr)
        return getattr(error, "exit_code", 1)
    except KeyboardInterrupt:
        print("interrupted; what is finished is kept: run the same command again", file=sys.stderr)
        return 1
    except Exception as error:
        if args.debug:
            raise
        last = (str(error).strip() or "no message").splitlines()[-1]
        print(f"error: {type(error).__name__}: {last} (--debug shows where)", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m data_prep",
        description="Turn text (jsonl, gzip, zstd, parquet) into megatron-core's indexed binaries: "
        "nothing lost, nothing twice, restartable.",
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run, about: str) -> argparse.ArgumentParser:
        added = commands.add_parser(
            name,
            help=about,
            description=about,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.set_defaults(run=run)
        added.add_argument("--debug", action="store_true", help="show a traceback on failure")
        added.add_argument("--json", action="store_true", help="print the summary as JSON")
        return added

    one = command("sample", _sample, "Write a small real corpus in Nemotron-CC's layout.")
    one.add_argument("out", type=Path, metavar="OUT")

    one = command("train-tokenizer", _train, "Train a SentencePiece model on the text of IN.")
    _add_reading(one)
    one.add_argument("--vocab-size", type=int, required=True, metavar="N")
    one.add_argument("--output", type=Path, required=True, metavar="FILE.model")
    one.add_argument(
        "--sample-bytes",
        type=_size,
        default=_size("256M"),
        help="train on about this much text, chosen by hash (default 256M)",
    )
    one.add_argument("--workers", type=_positive, default=_cpus(), help="threads")

    _add_tokenize(command("tokenize", _tokenize, "Tokenise IN into OUT; run again to go on."))

    one = command("inspect", _inspect, "Show counts, lengths and first documents of OUT.")
    one.add_argument("out", type=Path, metavar="OUT")
    one.add_argument("--documents", type=int, default=1, help="documents shown per output")

    one = command("verify", _verify, "Check every byte of OUT; exit 3 names the damaged file.")
    one.add_argument("out", type=Path, metavar="OUT")
    return parser


def _add_reading(parser: argparse.ArgumentParser) -> None:
    defaults = Options()
    parser.add_argument(
        "given", type=Path, metavar="IN", help="a file, a list of paths (.paths.gz), or a tree"
    )
    parser.add_argument("--text-column", default=defaults.text_column, help="default: %(default)s")
    parser.add_argument(
        "--where",
        default="",
        metavar="'KEY=VALUE[,VALUE…] …'",
        help="select by Hive keys in the paths: 'quality=high,medium-high kind=actual'",
    )
    parser.add_argument(
        "--bad-records",
        choices=("stop", "skip"),
        default=defaults.bad_records,
        help="at a malformed record (default: stop)",
    )


def _add_tokenize(parser: argparse.ArgumentParser) -> None:
    _add_reading(parser)
    add = parser.add_argument
    add("--tokenizer", type=Path, required=True, metavar="FILE")
    add("--output", type=Path, required=True, metavar="OUT")
    add(
        "--root", type=Path, help="folder that a list's paths are relative to (default: the list's)"
    )
    add("--workers", type=_positive, default=_cpus(), metavar="N", help="default: all cores")
    add("--max-bad", default="0.1%", help="with skip: stop above this share (default %(default)s)")
    add("--validation", default="0", metavar="SHARE", help="hold out this share, as in 0.5%%")
    add("--bos", help="prepend: auto (the model's own), an id or a piece (default: none)")
    add("--eod", help="append: an id or a piece (default: the model's own eos)")
    add("--max-record-bytes", type=_size, default=_size("64M"), help="default: 64M")
    add("--unit-bytes", type=_size, default=_size("128M"), help="grain of work (default: 128M)")
    add("--max-tokens", type=_count, default=0, metavar="N", help="an unbiased subset: at most N")
    add(
        "--documents-per-output",
        type=_positive,
        default=Options().documents_per_output,
        metavar="N",
        help="cut larger partitions into numbered outputs (default: %(default)s)",
    )
    add("--shard", type=_shard, default=(0, 1), metavar="i/n", help="do part i of n (from 0)")


def _sample(args: argparse.Namespace) -> None:
    with Reporter() as reporter:
        counts = write_sample(args.out, reporter)
    _print(
        args,
        {"documents": counts},
        [f"{documents:8,} documents  {partition}" for partition, documents in counts.items()],
    )


def _train(args: argparse.Namespace) -> None:
    options = Options(args.text_column, args.where, bad_records=args.bad_records)
    with Reporter() as reporter:
        characters = train(
            args.given,
            args.vocab_size,
            args.output,
            reporter,
            options,
            args.sample_bytes,
            args.workers,
        )
    _print(
        args,
        {"model": str(args.output), "vocab_size": args.vocab_size, "characters": characters},
        [f"{args.output}: {args.vocab_size:,} pieces from {characters:,} characters"],
    )


def _tokenize(args: argparse.Namespace) -> None:
    options = Options(
        text_column=args.text_column,
        where=args.where,
        validation=fraction(args.validation, "--validation"),
        unit_bytes=args.unit_bytes,
        max_record_bytes=args.max_record_bytes,
        bad_records=args.bad_records,
        max_bad=fraction(args.max_bad, "--max-bad"),
        max_tokens=args.max_tokens,
        documents_per_output=args.documents_per_output,
    )
    request = Request(
        given=args.given,
        tokenizer=args.tokenizer,
        out=args.output,
        options=options,
        bos=args.bos,
        eod=args.eod,
        root=args.root,
        workers=args.workers,
        shard=args.shard,
    )
    with Reporter() as reporter:
        manifest = tokenize(request, reporter)
    _print(args, manifest, _summary(args.output, manifest))


def _summary(out: Path, manifest: dict) -> list[str]:
    lines = []
    for row in manifest["outputs"]:
        lines.append(
            f"{row['documents']:12,} documents {row['tokens']:16,} tokens  {row['prefix']}"
        )
    skipped: dict[str, int] = {}
    for row in manifest["inputs"]:
        for reason, count in row["skipped"].items():
            skipped[reason] = skipped.get(reason, 0) + count
    if skipped:
        lines.append("skipped: " + ", ".join(f"{n:,} {reason}" for reason, n in skipped.items()))
    tokenizer = manifest["tokenizer"]
    kept = tokenizer["probe_kept"]
    lines.append(
        f"tokenizer: {tokenizer['kind']}, {tokenizer['vocab_size']:,} entries, EOD "
        f"{tokenizer['eod']} {tokenizer['eod_piece']!r}; probe: "
        + ", ".join(f"{name} {'kept' if ok else 'LOST'}" for name, ok in kept.items())
    )
    lines.append(f"train from {out / outputs.BLEND}")
    return lines


def _inspect(args: argparse.Namespace) -> None:
    found = inspection.inspect(args.out, args.documents)
    lines = []
    for row in found["outputs"]:
        lines.append(
            f"{row['prefix']}: {row['documents']:,} documents, {row['tokens']:,} tokens, "
            f"{row['dtype']}"
        )
        widest = max(row["lengths"].values())
        for label, count in row["lengths"].items():
            lines.append(f"  {label:>17} tokens {'█' * max(1, 40 * count // widest)} {count:,}")
        for text in row["first"]:
            lines.append("  " + json.dumps(text[:200], ensure_ascii=False))
    _print(args, found, lines)


def _verify(args: argparse.Namespace) -> None:
    with Reporter() as reporter:
        found = inspection.verify(args.out, reporter)
    _print(
        args,
        found,
        [f"{args.out}: all {found['outputs']} outputs are whole: {found['tokens']:,} tokens"],
    )


def _print(args: argparse.Namespace, summary: dict, lines: list[str]) -> None:
    print(json.dumps(summary, ensure_ascii=False) if args.json else "\n".join(lines))


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 up")
    return int(text)


def _size(text: str) -> int:
    number, unit = text[:-1], text[-1:].upper()
    if unit.isdecimal():
        number, unit = text, ""
    if unit not in _UNITS or not number.isdecimal() or int(number) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; write bytes, or 64M, 1G")
    return int(number) * _UNITS[unit]


def _count(text: str) -> int:
    """`300B`, `1.5T`, `2M` or a plain number, in powers of ten."""
    number, unit = (text[:-1], text[-1].upper()) if text[-1:].isalpha() else (text, "")
    try:
        value = Fraction(number) * {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}[unit]
    except (KeyError, ValueError, ZeroDivisionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no count; write 300B or 2.5M") from error
    if value < 1 or value.denominator != 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 up")
    return int(value)


def _shard(text: str) -> tuple[int, int]:
    index, slash, count = text.partition("/")
    if not (slash and index.isdecimal() and count.isdecimal() and int(index) < int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is no shard; write 0/8 to 7/8")
    return int(index), int(count)
