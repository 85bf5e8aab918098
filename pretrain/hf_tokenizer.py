"""The run's tokenizer in the form that `transformers` loads."""

import json
import shutil
from pathlib import Path

import sentencepiece
from tokenizers import Tokenizer, decoders, models, normalizers

from megatron_ext.errors import ConfigError, DataError

# Where tokenizers usually disagree: spaces at the ends and in rows, line ends, digits, rare
# characters, pieces that look like control symbols.
PROBE = (
    "Plain text, as usual.",
    " one before",
    "  two   three\n\n\tline ",
    "in 2024: 3.14159",
    "naïve 日本語 🙂\u200b\x00",
    "<s> </s> <unk> <0x41> ▁",
    "",
)


def export(kind: str, path: Path, eod: int, output: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json for a tokenizer of data preparation.

    `kind` is that of blend.yaml. Raises ConfigError naming what cannot be exported, and DataError
    if the result would not give the same tokens.
    """
    if not path.is_file():
        raise DataError(
            f"the tokenizer {path} is not there; --no-tokenizer exports the weights alone"
        )
    if kind == "huggingface":
        shutil.copyfile(path, output / "tokenizer.json")
        end = Tokenizer.from_file(str(path)).id_to_token(eod)
    elif kind == "sentencepiece":
        model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        tokenizer = _from_sentencepiece(model, path)
        _compare(model, tokenizer, path)
        tokenizer.save(str(output / "tokenizer.json"))
        end = model.id_to_piece(eod)
    else:
        raise ConfigError(
            f"a {kind} tokenizer ({path}) cannot be exported; sentencepiece and huggingface can. "
            "--no-tokenizer exports the weights alone"
        )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": end,
        # Text that spells a special token is text, as it was in training.
        "split_special_tokens": True,
    }
    (output / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _from_sentencepiece(model: sentencepiece.SentencePieceProcessor, path: Path) -> Tokenizer:
    """The same BPE: SentencePiece merges the pair whose union has the highest score."""
    ids = range(model.get_piece_size())
    vocabulary = {model.id_to_piece(number): number for number in ids}
    merged = {
        piece: number
        for piece, number in vocabulary.items()
        if not (model.is_control(number) or model.is_unknown(number) or model.is_byte(number))
    }
    merges = sorted(
        (-model.get_score(number), merged[left], merged[right], left, right)
        for piece, number in merged.items()
        for left, right in ((piece[:at], piece[at:]) for at in range(1, len(piece)))
        if left in merged and right in merged
    )
    if not merges:
        raise ConfigError(f"{path} has no merges: only BPE models can be exported")
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocabulary,
            merges=[(left, right) for *_, left, right in merges],
            unk_token=model.id_to_piece(model.unk_id()),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


def _compare(model: sentencepiece.SentencePieceProcessor, tokenizer: Tokenizer, path: Path) -> None:
    for text in PROBE:
        wanted, found = model.encode(text), tokenizer.encode(text).ids
        if wanted != found:
            raise DataError(
                f"{path}: transformers would read {text!r} as {found} instead of {wanted}; "
                "--no-tokenizer exports the weights alone"
            )
