"""What an adapter gives, whatever library stands behind it."""

from typing import Protocol

import numpy as np

# Long enough for a call to cost nothing beside its work, and small beside any memory.
PIECE_CHARACTERS = 1 << 14


class Tokenizer(Protocol):
    """A vocabulary that encodes plain text: special tokens spelled in a text stay text.

    `space_at_cut` says how a text may be cut (see long_text): "drop" the space, "keep" it, or None
    where no cut is known to be exact. `piece_characters` is the length of the pieces.
    """

    kind: str
    library: str  # the library behind it and its version
    vocab_size: int  # the highest id + 1, added tokens included
    default_bos: int | None
    default_eod: int | None
    space_at_cut: str | None
    piece_characters: int

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """int32 ids of each text, without BOS and EOD."""
        ...

    def decode(self, ids: list[int]) -> str: ...

    def piece(self, token: int) -> str:
        """How the vocabulary spells an id."""
        ...

    def id_of(self, piece: str) -> int | None:
        """The id of a piece or special token; None where the vocabulary lacks it."""
        ...
