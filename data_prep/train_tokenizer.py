"""Train a SentencePiece model that gives back what it encodes."""

import hashlib
import io
from collections.abc import Iterator
from pathlib import Path

import sentencepiece

from data_prep import files, reading, sources
from data_prep.errors import DataError, UsageError
from data_prep.plan import Input, Options, Unit
from data_prep.progress import Reporter

# SentencePiece leaves out what is longer, so lines are cut to it.
_SENTENCE_CHARACTERS = 1000


def find(given: Path, root: Path | None, where: str) -> list[Input]:
    """The inputs to train on; see sources.find."""
    return [Input.of(source) for source in sources.find(given, root, where)]


def train(
    inputs: list[Input],
    vocab_size: int,
    output: Path,
    reporter: Reporter,
    options: Options,
    sample_bytes: int,
    threads: int,
) -> int:
    """Train BPE on about `sample_bytes` of text, chosen by hash of the document.

    Identity normalisation, kept whitespace and byte fallback: newlines, tabs, double spaces and
    rare characters survive. unk 0, bos 1, eos 2. Returns the characters that were trained on.
    """
    if output.is_dir():
        raise UsageError(f"--output {output}: is a folder; name a file, as in tokenizer.model")
    if output.exists():
        raise UsageError(f"--output {output}: is there already; delete it or choose another name")
    text = list(_sample(inputs, options, sample_bytes, reporter))
    if not text:
        raise DataError("the input holds no text to train on")
    model = io.BytesIO()
    reporter.phase("train tokenizer", 1)
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(text),
            model_writer=model,
            vocab_size=vocab_size,
            model_type="bpe",
            byte_fallback=True,
            character_coverage=0.9999,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            max_sentence_length=8 * _SENTENCE_CHARACTERS,
            num_threads=threads,
            minloglevel=2,
        )
    except RuntimeError as error:
        raise UsageError(f"--vocab-size {vocab_size}: SentencePiece refuses: {error}") from error
    output.parent.mkdir(parents=True, exist_ok=True)
    fresh = output.with_name(output.name + ".tmp")
    fresh.write_bytes(model.getvalue())
    files.sync_file(fresh)
    fresh.replace(output)
    return sum(map(len, text))


def _sample(
    inputs: list[Input], options: Options, sample_bytes: int, reporter: Reporter
) -> Iterator[str]:
    """Lines of the documents whose hash falls below the share that is wanted."""
    reporter.phase("read text", 2 * sum(item.bytes for item in inputs))
    scans = [reading.scan(item, options, reporter.advance) for item in inputs]
    share = min(1.0, sample_bytes / max(sum(scan.text_bytes for scan in scans), 1))
    for index, (item, scan) in enumerate(zip(inputs, scans, strict=True)):
        whole = Unit(index, 0, 0, scan.size, 0)
        for record in reading.items(item, scan.kind, whole, options):
            if record.text is None:
                if record.skipped.is_bad and options.bad_records == "stop":
                    raise DataError(
                        f"{item.name}: line {record.number + 1}, offset {record.offset}: "
                        f"{record.skipped.reason} ({record.skipped.detail})"
                    )
            elif _hash_share(record.text) < share:
                yield from _sentences(record.text)
        reporter.advance(item.bytes)


def _hash_share(text: str) -> float:
    digest = hashlib.blake2b(text.encode(), digest_size=8, person=b"train-tokenizer").digest()
    return int.from_bytes(digest, "little") / 2**64


def _sentences(text: str) -> Iterator[str]:
    for line in text.split("\n"):
        for first in range(0, len(line), _SENTENCE_CHARACTERS):
            # NUL ends a sentence inside SentencePiece's trainer.
            yield line[first : first + _SENTENCE_CHARACTERS].replace("\0", "")
