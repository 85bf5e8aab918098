"""Open a tokenizer file by its content."""

import json
import re
from pathlib import Path

from data_prep.errors import UsageError
from data_prep.tokenizers.base import Tokenizer
from data_prep.tokenizers.encoder import Encoder

_RANK_LINE = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")


def load_encoder(
    path: Path, bos: str | None = None, eod: str | None = None, backend: str = "reference"
) -> Encoder:
    """The encoder of the tokenizer at `path`; see Encoder for `bos` and `eod`.

    `backend`: `reference`, the vocabulary's own library, or `gigatoken`, faster and checked.

    Raises:
        UsageError: `path` is no tokenizer that is known here, or lacks the wanted BOS or EOD.
    """
    path = tokenizer_file(path)
    tokenizer = _open(path)
    if backend == "gigatoken":
        from data_prep.tokenizers.fast import CheckedFastTokenizer

        tokenizer = CheckedFastTokenizer(path, tokenizer)
    return Encoder(tokenizer, path, bos, eod)


def tokenizer_file(path: Path) -> Path:
    """The vocabulary file: `path` itself, or the `tokenizer.json` of a folder."""
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise UsageError(f"--tokenizer {path}: there is no such file")
    return path


def _open(path: Path) -> Tokenizer:
    """Each adapter's library is imported only when its kind of file is opened."""
    with path.open("rb") as file:
        head = file.read(64)
    try:
        if head.lstrip()[:1] == b"{":
            return _open_json(path)
        if _RANK_LINE.match(head):
            from data_prep.tokenizers.ranks import from_rank_file

            return from_rank_file(path)
        from data_prep.tokenizers.sentencepiece_model import SentencePieceTokenizer

        return SentencePieceTokenizer(path)
    except ValueError as error:
        raise UsageError(f"--tokenizer {path}: {error}") from error


def _open_json(path: Path) -> Tokenizer:
    description = json.loads(path.read_text(encoding="utf-8"))
    if "vocab" in description and "config" in description:
        from data_prep.tokenizers.ranks import from_tekken

        return from_tekken(description)
    if "model" in description:
        from data_prep.tokenizers.huggingface import HuggingFaceTokenizer

        return HuggingFaceTokenizer(path, description)
    raise ValueError("this JSON is neither a tokenizer.json nor a tekken file")
