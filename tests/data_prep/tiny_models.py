"""SentencePiece models with properties that the real ones at hand lack."""

from pathlib import Path
from pydoc_data import topics

import sentencepiece

TEXT = [line for topic in topics.topics.values() for line in topic.split("\n") if line]


def lossy_model(path: Path) -> Path:
    """SentencePiece's defaults: newlines and double spaces vanish, rare characters are unknown."""
    return _train(path, TEXT, normalization_rule_name="nmt_nfkc")


def model_across_words(path: Path) -> Path:
    """Pieces that hold a space after another character, so that no cut at a space is exact."""
    return _train(path, TEXT, split_by_whitespace=False)


def faithful_model(path: Path) -> Path:
    """1,000 pieces with byte fallback, as `train-tokenizer` makes them."""
    return _train(
        path,
        TEXT,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
    )


def model_without_bos(path: Path) -> Path:
    """No BOS; EOS is 1 and padding 0, as T5's models have it."""
    return _train(path, TEXT, bos_id=-1, eos_id=1, pad_id=0, unk_id=2)


def _train(path: Path, text: list[str], **options: object) -> Path:
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text),
        model_prefix=str(path.with_suffix("")),
        vocab_size=1000,
        model_type="bpe",
        minloglevel=2,
        **options,
    )
    return path
