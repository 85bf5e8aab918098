"""Cut a text so that the pieces' ids, joined, are exactly those of one call.

That bounds the memory of a long text, and where a library takes longer for each character of a long
text than of a short one, it is faster too (`piece_characters` of the adapters).

A cut falls before one ASCII space that stands between two ASCII alphanumerics. No merge crosses
such a space: SentencePiece's BPE (without pieces that hold `▁` after another character) begins a
piece there, and the later part's dummy prefix restores the space, which is therefore dropped;
byte-level vocabularies begin a pre-token there, so the space stays. Each adapter checks on loading
whether this holds for its vocabulary (`space_at_cut`).
"""

import re

_BOUNDARY = re.compile("(?<=[A-Za-z0-9]) (?=[A-Za-z0-9])")


def pieces(text: str, space_at_cut: str | None, size: int) -> list[str]:
    """Pieces of about `size` characters; longer where no boundary comes, whole where none does."""
    if space_at_cut is None or len(text) <= size:
        return [text]
    found = []
    start = 0
    while boundary := _BOUNDARY.search(text, start + size):
        found.append(text[start : boundary.start()])
        start = boundary.end() if space_at_cut == "drop" else boundary.start()
    found.append(text[start:])
    return found
