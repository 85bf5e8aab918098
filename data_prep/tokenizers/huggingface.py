"""Hugging Face `tokenizer.json` files."""

import json
from pathlib import Path

import numpy as np
import tokenizers

from data_prep.tokenizers import patterns
from data_prep.tokenizers.base import PIECE_CHARACTERS


class HuggingFaceTokenizer:
    """A `tokenizer.json`, with BOS and EOS of the `tokenizer_config.json` beside it, if any."""

    kind = "huggingface"
    piece_characters = PIECE_CHARACTERS
    library = f"tokenizers {tokenizers.__version__}"

    def __init__(self, path: Path, description: dict):
        """`description` is the parsed file. Raises ValueError where the library refuses it."""
        try:
            self._model = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"not a tokenizer.json that can be loaded ({error})") from error
        # Texts must be neither cut nor filled up, nor may they spell special tokens.
        self._model.no_truncation()
        self._model.no_padding()
        self._model.encode_special_tokens = True
        self.vocab_size = max(self._model.get_vocab(with_added_tokens=True).values()) + 1
        named = _named_specials(path.with_name("tokenizer_config.json"))
        self.default_bos = self._model.token_to_id(named["bos_token"])
        self.default_eod = self._model.token_to_id(named["eos_token"])
        self.space_at_cut = "keep" if _cuts_exactly(description) else None

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        found = self._model.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(one.ids, dtype=np.int32) for one in found]

    def decode(self, ids: list[int]) -> str:
        return self._model.decode(ids, skip_special_tokens=False)

    def piece(self, token: int) -> str:
        return self._model.id_to_token(token) or ""

    def id_of(self, piece: str) -> int | None:
        return self._model.token_to_id(piece)


def _named_specials(path: Path) -> dict[str, str]:
    """`bos_token` and `eos_token`, empty where the configuration does not name them."""
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    named = {}
    for key in ("bos_token", "eos_token"):
        value = config.get(key) or ""
        named[key] = value["content"] if isinstance(value, dict) else value
    return named


def _cuts_exactly(description: dict) -> bool:
    """Byte-level BPE behind a known pre-token pattern, with nothing that looks across a space."""
    pre = description.get("pre_tokenizer") or {}
    steps = pre.get("pretokenizers", []) if pre.get("type") == "Sequence" else [pre]
    last = steps[-1] if steps else {}
    if last.get("type") != "ByteLevel" or last.get("add_prefix_space"):
        return False
    if len(steps) == 1:
        known_pattern = last.get("use_regex", True)
    else:
        first = steps[0]
        known_pattern = (
            len(steps) == 2
            and not last.get("use_regex", True)
            and first.get("type") == "Split"
            and first.get("behavior") == "Isolated"
            and not first.get("invert")
            and first.get("pattern", {}).get("Regex") in patterns.BREAK_BEFORE_SPACE
        )
    return (
        known_pattern
        and description["model"].get("type") == "BPE"
        and not description["model"].get("dropout")
        and description.get("normalizer") is None
        and all(
            token["special"]
            or not (" " in token["content"] or token.get("lstrip") or token.get("rstrip"))
            for token in description.get("added_tokens", [])
        )
    )
