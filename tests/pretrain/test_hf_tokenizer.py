"""The exported tokenizer gives, in `transformers`, the very tokens that were trained on."""

import pydoc_data.topics
import random
from pathlib import Path

import pytest
import sentencepiece

from megatron_ext.errors import ConfigError, DataError
from pretrain import hf_tokenizer
from tests.ranks import run


def _train(path: Path, **options) -> Path:
    text = "\n".join(pydoc_data.topics.topics.values())
    with path.open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(text.split("\n\n")),
            model_writer=file,
            vocab_size=1024,
            byte_fallback=True,
            minloglevel=2,
            **options,
        )
    return path


@pytest.fixture(scope="module")
def model_file(tmp_path_factory) -> Path:
    """A model as data preparation trains them."""
    return _train(
        tmp_path_factory.mktemp("tokenizer") / "text.model",
        model_type="bpe",
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        split_digits=True,
    )


def _texts() -> list[str]:
    """Real text, and random mixtures of what tokenizers stumble over."""
    chance = random.Random(1)
    real = list(pydoc_data.topics.topics.values())[:40]
    pieces = [" ", "  ", "\n", "\t", "▁", "<s>", "</s>", "a", "The ", "12", "é", "日", "🙂", "\x00"]
    mixed = ["".join(chance.choices(pieces, k=chance.randrange(30))) for _ in range(300)]
    return [*real, *mixed, *hf_tokenizer.PROBE]


def _in_transformers(rank: int, folder: Path, texts: list[str]) -> tuple[list, list, str]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer(text)["input_ids"] for text in texts]
    return ids, [tokenizer.decode(row) for row in ids], tokenizer.eos_token_id


def test_transformers_gives_the_same_tokens_and_text(model_file, tmp_path):
    hf_tokenizer.export("sentencepiece", model_file, 2, tmp_path)
    texts = _texts()
    [(ids, decoded, end)] = run(_in_transformers, 1, tmp_path, texts)
    model = sentencepiece.SentencePieceProcessor(model_file=str(model_file))
    for text, found, back in zip(texts, ids, decoded, strict=True):
        assert found == model.encode(text), text
        assert back == model.decode(found), text
    assert end == 2


def test_a_model_that_transformers_would_read_otherwise_is_refused(tmp_path):
    normalising = _train(tmp_path / "nfkc.model", model_type="bpe")
    with pytest.raises(DataError, match=r"transformers would read .* instead of"):
        hf_tokenizer.export("sentencepiece", normalising, 2, tmp_path)


def test_a_kind_that_cannot_be_exported_is_refused_by_name(tmp_path):
    (tmp_path / "ranks").touch()
    with pytest.raises(ConfigError, match=r"a tiktoken tokenizer .* cannot be exported"):
        hf_tokenizer.export("tiktoken", tmp_path / "ranks", 2, tmp_path)
