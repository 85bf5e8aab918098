"""What each command does with its parsed arguments, and what it prints."""

import argparse
import json
from pathlib import Path

from data_prep import blending, cleaning, estimate, inspection, merging, outputs, run, sources
from data_prep import dedup as deduplication
from data_prep import sample as sampling_corpus
from data_prep import train_tokenizer as training
from data_prep.download import Server, fetch_all
from data_prep.errors import UsageError
from data_prep.locating import Provenance
from data_prep.plan import Options, fraction
from data_prep.progress import Reporter, duration, in_bytes
from data_prep.streaming import Batches, stream
from data_prep.tokenizers.load import load_encoder


def sample(args: argparse.Namespace) -> None:
    with Reporter() as reporter:
        counts = sampling_corpus.write_sample(args.out, reporter)
    lines = [f"{documents:8,} documents  {partition}" for partition, documents in counts.items()]
    _print(args, {"documents": counts}, lines)


def train_tokenizer(args: argparse.Namespace) -> None:
    options = Options(args.text_column, args.where, bad_records=args.bad_records)
    with Reporter() as reporter:
        characters = training.train(
            inputs=training.find(args.given, args.root, args.where),
            vocab_size=args.vocab_size,
            output=args.output,
            reporter=reporter,
            options=options,
            sample_bytes=args.sample_bytes,
            threads=args.workers,
        )
    _print(
        args,
        {"model": str(args.output), "vocab_size": args.vocab_size, "characters": characters},
        [f"{args.output}: {args.vocab_size:,} pieces from {characters:,} characters"],
    )


def tokenize(args: argparse.Namespace) -> None:
    options = Options(
        text_column=args.text_column,
        where=args.where,
        validation=fraction(args.validation, "--validation"),
        unit_bytes=args.unit_bytes or 0,
        max_record_bytes=args.max_record_bytes,
        bad_records=args.bad_records,
        max_bad=fraction(args.max_bad, "--max-bad"),
        max_tokens=args.max_tokens,
        documents_per_output=args.documents_per_output,
        clean=cleaning.rules_of(args.clean),
        language=args.language,
        clean_except=args.clean_except,
    )
    request = run.Request(
        given=args.given,
        tokenizer=args.tokenizer,
        out=args.output,
        options=options,
        bos=args.bos,
        eod=args.eod,
        root=args.root,
        skip=args.skip,
        workers=args.workers,
        executor=args.executor,
        backend=args.backend,
        shard=args.shard,
    )
    if args.dry_run:
        _dry_run(args, request)
        return
    with Reporter() as reporter:
        manifest = run.tokenize(request, reporter)
    _print(args, _totals(args.output, manifest), _lines(args.output, manifest))


def dedup(args: argparse.Namespace) -> None:
    options = Options(
        text_column=args.text_column,
        where=args.where,
        max_record_bytes=args.max_record_bytes,
        unit_bytes=args.unit_bytes or 0,
        bad_records="skip",  # they give no text; tokenize decides what becomes of them
        near=args.near,
    )
    plan = run.plan_without_tokenizer(args.given, args.root, options, args.output)
    with Reporter() as reporter:
        found = deduplication.dedup(plan, args.output, args.workers, reporter)
    share = found.duplicates / max(found.texts, 1)
    _print(
        args,
        {"texts": found.texts, "duplicates": found.duplicates, "output": str(args.output)},
        [
            f"{found.duplicates:,} of {found.texts:,} texts ({share:.2%}) are "
            f"{'near copies or ' if args.near else ''}copies of earlier ones",
            f"leave them out: tokenize … --skip {args.output}",
        ],
    )


def download(args: argparse.Namespace) -> None:
    names = sources.choose_names(sources.listed_names(args.given), args.where)
    server = Server(args.base, args.attempts, args.pause_seconds)
    with Reporter() as reporter:
        if args.tokenizer is None:
            fresh = fetch_all(names, server, args.output, reporter, args.connections)
            lines = [f"{args.output}: {len(names):,} files, {fresh:,} of them fetched now"]
            summary = {"files": len(names), "fetched": fresh}
        else:
            options = Options(
                text_column=args.text_column,
                validation=fraction(args.validation, "--validation"),
                bad_records=args.bad_records,
                max_bad=fraction(args.max_bad, "--max-bad"),
            )
            request = run.Request(
                given=args.given,
                tokenizer=args.tokenizer,
                out=args.output,
                options=options,
                bos=args.bos,
                eod=args.eod,
                workers=args.workers,
            )
            batches = Batches(names, server, args.batch_files, args.connections)
            manifest = stream(batches, request, reporter)
            summary, lines = _totals(args.output, manifest), _lines(args.output, manifest)
    _print(args, summary, lines)


def _dry_run(args: argparse.Namespace, request: run.Request) -> None:
    encoder = load_encoder(request.tokenizer, request.bos, request.eod, request.backend)
    found = estimate.dry_run(run.make_plan(request, encoder), encoder, request.workers)
    lines = [
        f"{found['inputs']:,} files of {in_bytes(found['input_bytes'])} hold about "
        f"{found['documents']:,} documents and {found['tokens']:,} tokens",
        f"about {in_bytes(found['output_bytes'])} of output, {duration(found['seconds'])} with "
        f"{request.workers} workers; nothing was written",
    ]
    _print(args, found, lines)


def _totals(out: Path, manifest: dict) -> dict:
    skipped: dict[str, int] = {}
    for row in manifest["inputs"]:
        for reason, count in row["skipped"].items():
            skipped[reason] = skipped.get(reason, 0) + count
    return {
        "output": str(out),
        "inputs": len(manifest["inputs"]),
        "records": sum(row["records"] for row in manifest["inputs"]),
        "skipped": skipped,
        "repaired": sum(row["repaired"] for row in manifest["inputs"]),
        "documents": sum(row["documents"] for row in manifest["outputs"]),
        "tokens": sum(row["tokens"] for row in manifest["outputs"]),
        "bytes": sum(row["bytes"] + row["index"]["bytes"] for row in manifest["outputs"]),
        "outputs": [
            {key: row[key] for key in ("prefix", "split", "documents", "tokens")}
            for row in manifest["outputs"]
        ],
        "tokenizer": {
            key: manifest["tokenizer"][key] for key in ("kind", "vocab_size", "bos", "eod")
        },
        "probe_kept": manifest["tokenizer"]["probe_kept"],
    }


def _lines(out: Path, manifest: dict) -> list[str]:
    totals = _totals(out, manifest)
    lines = [
        f"{row['documents']:12,} documents {row['tokens']:16,} tokens  {row['prefix']}"
        for row in totals["outputs"]
    ]
    if totals["repaired"]:
        lines.append(f"repaired: {totals['repaired']:,} by ftfy")
    if totals["skipped"]:
        counts = (f"{count:,} {reason}" for reason, count in totals["skipped"].items())
        lines.append("skipped: " + ", ".join(counts))
    tokenizer = manifest["tokenizer"]
    kept = (f"{name} {'kept' if ok else 'LOST'}" for name, ok in totals["probe_kept"].items())
    lines.append(
        f"tokenizer: {tokenizer['kind']}, {tokenizer['vocab_size']:,} entries, EOD "
        f"{tokenizer['eod']} {tokenizer['eod_piece']!r}; probe: {', '.join(kept)}"
    )
    lines.append(f"train from {out / outputs.BLEND}")
    return lines


def inspect(args: argparse.Namespace) -> None:
    found = inspection.inspect(args.out, args.documents)
    lines = []
    for row in found["outputs"]:
        lines.append(
            f"{row['prefix']}: {row['documents']:,} documents, {row['tokens']:,} tokens, "
            f"{row['dtype']}"
        )
        widest = max(row["lengths"].values())
        for label, count in row["lengths"].items():
            bar = "█" * max(1, 40 * count // widest)
            lines.append(f"  {label:>17} tokens {bar} {count:,}")
        for text in row["first"]:
            lines.append("  " + json.dumps(text[:200], ensure_ascii=False))
    _print(args, found, lines)


def verify(args: argparse.Namespace) -> None:
    with Reporter() as reporter:
        found = inspection.verify(args.out, reporter)
    try:
        found["compared_with_source"] = Provenance(args.out, args.root).spot_check()
        note = f"{found['compared_with_source']} documents tokenised again from their lines"
    except UsageError as error:  # inputs may rightly be gone: that is no damage
        found["compared_with_source"] = 0
        note = f"not compared with the source: {error}"
    whole = f"all {found['outputs']} outputs are whole: {found['tokens']:,} tokens"
    _print(args, found, [f"{args.out}: {whole}", note])


def merge(args: argparse.Namespace) -> None:
    with Reporter() as reporter:
        manifest = merging.merge(args.given, args.output, reporter, args.consume)
    _print(args, _totals(args.output, manifest), _lines(args.output, manifest))


def blend(args: argparse.Namespace) -> None:
    path = args.output or args.out / outputs.BLEND
    made = blending.make(args.out, args.use, dict(args.set), path)
    if args.output:
        blending.write(args.output, made)
    available = sum(row["tokens"] for row in made["train"])
    rows = blending.epochs(made, args.tokens or available)
    lines = [f"{'weight':>8} {'tokens':>18} {'drawn':>18} {'epochs':>7}  prefix"]
    for row in rows:
        lines.append(
            f"{row['weight']:8.4f} {row['tokens']:18,} {row['drawn']:18,} {row['epochs']:7.2f}  "
            f"{row['prefix']}"
        )
    if args.output:
        lines.append(f"written: {args.output}")
    _print(args, {"train": rows, "output": str(args.output or "")}, lines)


def locate(args: argparse.Namespace) -> None:
    name, colon, number = args.place.rpartition(":")
    if not colon or not number.isdecimal():
        raise UsageError(f"{args.place!r}: write PREFIX:DOCUMENT or FILE:LINE")
    provenance = Provenance(args.out, args.root)
    if name in provenance.splits:
        found = provenance.line_of(name, int(number))
    else:
        found = provenance.document_of(name, int(number))
    lines = [
        f"document {found['document']} of {found['prefix']}, {found['tokens']:,} tokens",
        f"line {found['line']} of {found['input']}, offset {found['offset']}",
        json.dumps(found["text"], ensure_ascii=False),
    ]
    _print(args, found, lines)


def _print(args: argparse.Namespace, summary: dict, lines: list[str]) -> None:
    print(json.dumps(summary, ensure_ascii=False) if args.json else "\n".join(lines))
