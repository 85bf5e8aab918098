"""Byte-level vocabularies that tiktoken runs: mistral-common's tekken, and `.tiktoken` files."""

import base64
import binascii
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken

from data_prep.tokenizers import patterns
from data_prep.tokenizers.base import PIECE_CHARACTERS

# White space as Rust's regex has it, newlines apart; Python's own \\s takes in control characters.
_SPACES = "\t\x0b\x0c \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_LONG_RUN = 1 << 17


@dataclass(frozen=True)
class Layout:
    """Which pattern and special tokens go with a rank file, which holds neither."""

    name: str
    pattern: str
    specials: dict[str, int]
    bos: str | None
    eod: str
    vocab_size: int


def _llama3() -> Layout:
    named = {0: "<|begin_of_text|>", 1: "<|end_of_text|>", 9: "<|eot_id|>"}
    specials = {named.get(i, f"<|reserved_{i}|>"): 128_000 + i for i in range(256)}
    return Layout(
        "llama3", patterns.CL100K, specials, "<|begin_of_text|>", "<|end_of_text|>", 128_256
    )


def _openai(name: str, pattern: str, ranks: int, end: int) -> Layout:
    return Layout(name, pattern, {"<|endoftext|>": end}, None, "<|endoftext|>", max(ranks, end) + 1)


def layout_of(ranks: int) -> Layout | None:
    """The layout of a rank file with so many ranks."""
    layouts = {
        50_256: lambda: _openai("r50k", patterns.GPT2, ranks, 50_256),
        100_256: lambda: _openai("cl100k", patterns.CL100K, ranks, 100_257),
        128_000: _llama3,
        199_998: lambda: _openai("o200k", patterns.O200K, ranks, 199_999),
    }
    return layouts[ranks]() if ranks in layouts else None


class RanksTokenizer:
    """Merge ranks run by tiktoken; ids are `rank + shift`."""

    piece_characters = PIECE_CHARACTERS
    library = f"tiktoken {tiktoken.__version__}"

    def __init__(self, kind: str, ranks: dict[bytes, int], layout: Layout, shift: int = 0):
        self.kind = kind
        self._shift = shift
        self._specials = layout.specials
        self._special_names = {token: name for name, token in layout.specials.items()}
        self._encoding = tiktoken.Encoding(
            name=layout.name, pat_str=layout.pattern, mergeable_ranks=ranks, special_tokens={}
        )
        self.vocab_size = layout.vocab_size
        self.default_bos = layout.specials[layout.bos] if layout.bos else None
        self.default_eod = layout.specials[layout.eod]
        # GPT-2's pattern alone takes newlines into a run of spaces.
        newlines = "\r\n" if layout.pattern == patterns.GPT2 else ""
        self._spaces = f"[{_SPACES}{newlines}]"
        known = layout.pattern in patterns.BREAK_BEFORE_SPACE
        self.space_at_cut = "keep" if known else None

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        return [self._encode_one(text) + self._shift for text in texts]

    def _encode_one(self, text: str, long_run: int = _LONG_RUN) -> np.ndarray:
        """Ranks of a text. tiktoken's regex engine gives up at runs of about a million spaces.

        Such a run is a pre-token by itself, but for its last character where something follows; it
        is taken out here and merged as one, which gives the ids that one call would give.
        """
        parts = []
        start = 0
        if len(text) >= long_run:
            for found in re.finditer(f"{self._spaces}{{{long_run},}}+(?![\r\n])", text):
                end = found.end() - (found.end() < len(text))
                parts.append(self._encode_plain(text[start : found.start()]))
                run = self._encoding._encode_single_piece(text[found.start() : end])
                parts.append(np.array(run, dtype=np.int32))
                start = end
        parts.append(self._encode_plain(text[start:]))
        return np.concatenate(parts)

    def _encode_plain(self, text: str) -> np.ndarray:
        return self._encoding.encode_to_numpy(text, disallowed_special=()).astype(np.int32)

    def decode(self, ids: list[int]) -> str:
        spelled = [
            self._special_names[token].encode()
            if token in self._special_names
            else self._encoding.decode_single_token_bytes(token - self._shift)
            for token in ids
        ]
        return b"".join(spelled).decode(errors="replace")

    def piece(self, token: int) -> str:
        return self.decode([token])

    def id_of(self, piece: str) -> int | None:
        if piece in self._specials:
            return self._specials[piece]
        try:
            return self._encoding.encode_single_token(piece) + self._shift
        except KeyError:
            return None


def from_tekken(description: dict) -> RanksTokenizer:
    """A parsed tekken file; ids as mistral-common gives them: specials first, then ranks.

    Raises ValueError where the file lacks what it should hold.
    """
    try:
        config = description["config"]
        shift = config["default_num_special_tokens"]
        kept = config["default_vocab_size"] - shift
        ranks = {
            base64.b64decode(entry["token_bytes"]): entry["rank"]
            for entry in description["vocab"][:kept]
        }
        specials = {f"<SPECIAL_{rank}>": rank for rank in range(shift)}
        named = description.get("special_tokens") or [
            {"rank": rank, "token_str": name} for rank, name in enumerate(("<unk>", "<s>", "</s>"))
        ]
        for entry in named:
            del specials[f"<SPECIAL_{entry['rank']}>"]
            specials[entry["token_str"]] = entry["rank"]
        layout = Layout(
            "tekken", config["pattern"], specials, "<s>", "</s>", config["default_vocab_size"]
        )
        return RanksTokenizer("tekken", ranks, layout, shift)
    except (KeyError, TypeError, binascii.Error) as error:
        raise ValueError(f"not a complete tekken file ({error!r})") from error


def from_rank_file(path: Path) -> RanksTokenizer:
    """A `.tiktoken` file: a base64 token and its rank in each line.

    Raises ValueError where it is none, or where no known layout has as many ranks.
    """
    ranks = {}
    try:
        for line in path.read_bytes().splitlines():
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
    except (ValueError, binascii.Error) as error:
        raise ValueError(f"not a file of tiktoken ranks ({error})") from error
    layout = layout_of(len(ranks))
    if layout is None:
        raise ValueError(
            f"holds {len(ranks)} tiktoken ranks; the pattern and special tokens are known for "
            "50,256 (r50k), 100,256 (cl100k), 128,000 (Llama 3) and 199,998 (o200k) ranks only; "
            "use the model's tokenizer.json"
        )
    return RanksTokenizer("tiktoken", ranks, layout)
