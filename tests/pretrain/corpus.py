"""A small indexed corpus for training tests: text-like, so that losses fall."""

from pathlib import Path

import numpy as np
import yaml
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

VOCABULARY = 64
EOD = 0


def write_corpus(folder: Path, documents: int = 120, parts: int = 1, held_out: int = 20) -> Path:
    """Write a blend of `parts` datasets with held-out text; returns the blend.yaml."""
    rng = np.random.default_rng(0)
    train = [_write(folder, f"part{index}", documents, rng) for index in range(parts)]
    validation = [_write(folder, "part0.validation", held_out, rng)]
    tokenizer = {
        "kind": "sentencepiece",
        "path": "none.model",
        "fingerprint": "test",
        "vocab_size": VOCABULARY,
        "eod": EOD,
    }
    blend = {
        "format": 1,
        "tokenizer": tokenizer,
        "train": _weigh(train),
        "validation": _weigh(validation),
    }
    path = folder / "blend.yaml"
    path.write_text(yaml.safe_dump(blend))
    return path


def _write(folder: Path, prefix: str, documents: int, rng: np.random.Generator) -> dict:
    builder = IndexedDatasetBuilder(str(folder / f"{prefix}.bin"), dtype=np.uint16)
    tokens = 0
    for _ in range(documents):
        document = _document(rng)
        builder.add_document(document, [len(document)])
        tokens += len(document)
    builder.finalize(str(folder / f"{prefix}.idx"))
    return {"prefix": prefix, "documents": documents, "tokens": tokens}


def _document(rng: np.random.Generator) -> np.ndarray:
    """Each token mostly decides the next, as in text."""
    length = int(rng.integers(20, 120))
    tokens = [int(rng.integers(1, VOCABULARY))]
    for _ in range(length):
        surprise = rng.random() < 0.2
        following = (tokens[-1] * 5 + 7) % (VOCABULARY - 1) + 1
        tokens.append(int(rng.integers(1, VOCABULARY)) if surprise else following)
    return np.array([*tokens, EOD], dtype=np.int64)


def _weigh(parts: list[dict]) -> list[dict]:
    total = sum(part["tokens"] for part in parts)
    return [{**part, "weight": part["tokens"] / total} for part in parts]
