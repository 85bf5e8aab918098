"""Open a tokenizer file by its content."""

from pathlib import Path

from data_prep.errors import UsageError
from data_prep.tokenizers.base import Tokenizer
from data_prep.tokenizers.encoder import Encoder
from data_prep.tokenizers.sentencepiece_model import SentencePieceTokenizer


def load_encoder(path: Path, bos: str | None = None, eod: str | None = None) -> Encoder:
    """The encoder of the tokenizer at `path`; see Encoder for `bos` and `eod`.

    Raises:
        UsageError: `path` is no tokenizer that is known here, or lacks the wanted BOS or EOD.
    """
    path = tokenizer_file(path)
    return Encoder(_open(path), path, bos, eod)


def tokenizer_file(path: Path) -> Path:
    """The vocabulary file: `path` itself, or the `tokenizer.json` of a folder."""
    if path.is_dir():
        path = path / "tokenizer.json"
    if not path.is_file():
        raise UsageError(f"--tokenizer {path}: there is no such file")
    return path


def _open(path: Path) -> Tokenizer:
    try:
        return SentencePieceTokenizer(path)
    except ValueError as error:
        raise UsageError(f"--tokenizer {path}: {error}") from error
