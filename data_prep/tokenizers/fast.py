"""A faster encoder (gigatoken) for a SentencePiece vocabulary, never trusted unseen.

It gives a text that spells a control piece (`</s>`) the control id, so the reference encodes those.
Of all others, hostile texts are compared with the reference when it is opened, and the first text
of every batch of a run; a single id that differs ends the run.
"""

from pathlib import Path

import numpy as np

from data_prep.errors import DataError, UsageError
from data_prep.tokenizers.base import PIECE_CHARACTERS, Tokenizer
from data_prep.tokenizers.sentencepiece_model import SentencePieceTokenizer

_HOSTILE = (
    "",
    " ",
    "  two  spaces ",
    "tab\tnewline\n\n\r\n",
    "\u2581meta \u2581 space",
    "a </s> b <s>",
    "<unk> <0x0A> [INST]",
    "ᚠᛇᚻ ⴰⵣⵓⵍ 日本語 \U0001f642\u200d\U0001f525 e\u0301\u0000\ufeff",
    "1234567890 3.14e-10 a-b_c'd",
)


class CheckedFastTokenizer:
    """gigatoken's ids, with `reference` for all else."""

    piece_characters = PIECE_CHARACTERS

    def __init__(self, path: Path, reference: Tokenizer):
        """Raises UsageError where gigatoken is not installed, or cannot replace the reference."""
        if not isinstance(reference, SentencePieceTokenizer):
            raise UsageError(
                f"--backend gigatoken: runs SentencePiece models only, and {path} is "
                f"{reference.kind}; leave it out"
            )
        try:
            import gigatoken
        except ImportError as error:
            raise UsageError(
                "--backend gigatoken: needs the package gigatoken (pip install gigatoken==0.10.0)"
            ) from error
        try:
            self._fast = gigatoken.Tokenizer.from_sentencepiece(path)
        except Exception as error:  # the library's own error types are not exported
            raise UsageError(f"--backend gigatoken: cannot load {path} ({error})") from error
        self._reference = reference
        self._control_pieces = reference.control_pieces
        self.kind = reference.kind
        self.library = f"{reference.library}, gigatoken"
        self.vocab_size = reference.vocab_size
        self.default_bos = reference.default_bos
        self.default_eod = reference.default_eod
        self.space_at_cut = reference.space_at_cut
        self.decode = reference.decode
        self.piece = reference.piece
        self.id_of = reference.id_of
        try:
            self._compare(list(_HOSTILE), [self._one(text) for text in _HOSTILE])
        except DataError as error:
            raise UsageError(str(error)) from error

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        found = [self._one(text) for text in texts]
        self._compare(texts[:1], found[:1])
        return found

    def _one(self, text: str) -> np.ndarray:
        if any(piece in text for piece in self._control_pieces):
            return self._reference.encode([text])[0]
        return self._fast.encode(text).astype(np.int32)

    def _compare(self, texts: list[str], found: list[np.ndarray]) -> None:
        for text, ours, theirs in zip(texts, found, self._reference.encode(texts), strict=True):
            if not np.array_equal(ours, theirs):
                raise DataError(
                    f"--backend gigatoken: gives other ids than the reference for {text[:80]!r}; "
                    "leave it out"
                )
