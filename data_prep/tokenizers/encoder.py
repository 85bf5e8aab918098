"""Documents in, finished token arrays out: BOS, EOD, long texts, and the identity of all that."""

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from data_prep import indexed
from data_prep.errors import UsageError
from data_prep.tokenizers import long_text
from data_prep.tokenizers.base import Tokenizer

PROBE = {
    "newline": "one\ntwo",
    "double space": "one  two",
    "tab": "one\ttwo",
    "emoji": "smile \U0001f642",
    "rare script": "ᚠᛇᚻ ⴰⵣⵓⵍ",
}


@dataclass(frozen=True)
class Identity:
    """What makes two encoders give the same ids; stored in every manifest and compared."""

    kind: str
    fingerprint: str  # sha256 of the vocabulary file
    vocab_size: int
    bos: int | None
    eod: int
    eod_piece: str
    probe_text: str
    probe_ids: tuple[int, ...]
    probe_kept: dict[str, bool]

    def as_dict(self) -> dict:
        return {**asdict(self), "probe_ids": list(self.probe_ids)}


class Encoder:
    """A tokenizer with its BOS and EOD settled.

    `bos` and `eod` are what the user asked for: None (no BOS; the model's own EOD), an id, or a
    piece; `bos="auto"` is the model's own.

    Raises:
        UsageError: BOS or EOD is not in the vocabulary.
    """

    def __init__(
        self, tokenizer: Tokenizer, path: Path, bos: str | None = None, eod: str | None = None
    ):
        self.tokenizer = tokenizer
        self.path = path
        self.bos = None if bos in (None, "none") else self._special("--bos", bos)
        self.eod = self._special("--eod", eod or "auto")
        self.dtype = indexed.dtype_for(tokenizer.vocab_size)
        self._ends = [
            None if token is None else np.array([token], dtype=np.int32)
            for token in (self.bos, self.eod)
        ]

    def _special(self, option: str, wanted: str) -> int:
        tokenizer = self.tokenizer
        if wanted == "auto":
            own = tokenizer.default_bos if option == "--bos" else tokenizer.default_eod
            if own is None:
                raise UsageError(
                    f"{option}: {self.path} defines none of its own; name an id or a piece of its "
                    f"{tokenizer.vocab_size} entries"
                )
            return own
        if wanted.isdecimal():
            if int(wanted) >= tokenizer.vocab_size:
                raise UsageError(
                    f"{option} {wanted}: {self.path} has ids 0 to {tokenizer.vocab_size - 1}"
                )
            return int(wanted)
        token = tokenizer.id_of(wanted)
        if token is None:
            raise UsageError(f"{option} {wanted!r}: {self.path} has no such piece")
        return token

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Ids of each document, BOS and EOD included, in the dtype of the files.

        Equal to one call of the tokenizer per text, in bounded memory for long texts.
        """
        tokenizer = self.tokenizer
        cut = [
            long_text.pieces(text, tokenizer.space_at_cut, tokenizer.piece_characters)
            for text in texts
        ]
        parts = iter(tokenizer.encode([piece for pieces in cut for piece in pieces]))
        before, after = self._ends
        documents = []
        for pieces in cut:
            ids = [next(parts) for _ in pieces]
            joined = np.concatenate([*([] if before is None else [before]), *ids, after])
            documents.append(indexed.packed(joined, tokenizer.vocab_size))
        return documents

    def identity(self) -> Identity:
        """Fingerprint, settings, and a probe of what survives encoding and decoding."""
        tokenizer = self.tokenizer
        probe = f"{' '.join(PROBE.values())} {tokenizer.piece(self.eod)}"
        encoded = [ids.tolist() for ids in tokenizer.encode([*PROBE.values(), probe])]
        if self.eod in encoded[-1]:
            raise UsageError(
                f"{self.path}: a text that spells {tokenizer.piece(self.eod)!r} gets the EOD id "
                f"{self.eod}, so documents could not be told apart; name another --eod"
            )
        kept = {
            name: tokenizer.decode(ids) == text
            for (name, text), ids in zip(PROBE.items(), encoded, strict=False)
        }
        return Identity(
            kind=tokenizer.kind,
            fingerprint=hashlib.sha256(self.path.read_bytes()).hexdigest(),
            vocab_size=tokenizer.vocab_size,
            bos=self.bos,
            eod=self.eod,
            eod_piece=tokenizer.piece(self.eod),
            probe_text=probe,
            probe_ids=tuple(encoded[-1]),
            probe_kept=kept,
        )
