"""Pre-token patterns that are known to begin a pre-token at a space between ASCII alphanumerics.

The space can join only what follows it, and what lies before it ends in a letter or digit, which no
alternative of these patterns continues with a space; so a text may be cut there (long_text).
"""

_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*",
)
_CASED_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"

GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
CL100K = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_PUNCTUATION}|{_SPACES}"
QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_PUNCTUATION}|{_SPACES}"
O200K = "|".join(
    (*(f"{word}{_CONTRACTIONS}?" for word in _CASED), r"\p{N}{1,3}", _CASED_PUNCTUATION, _SPACES)
)
TEKKEN = "|".join((*_CASED, r"\p{N}", _CASED_PUNCTUATION, _SPACES))

BREAK_BEFORE_SPACE = frozenset({GPT2, CL100K, QWEN2, O200K, TEKKEN})
