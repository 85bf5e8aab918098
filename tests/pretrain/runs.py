"""Whole training runs in forked ranks, for tests."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from pretrain import exit
from pretrain.config import load
from pretrain.samples import Batch, Samples, Split
from tests.pretrain.corpus import VOCABULARY
from tests.ranks import run

SMALL = {
    "model.hidden": 64,
    "model.layers": 4,
    "model.ffn": 96,
    "model.vocab_size": VOCABULARY,
    "model.sequence_length": 32,
    "train.steps": 10,
    "train.global_batch": 16,
    "train.micro_batch": 4,
    "validation.every": 0,
    "validation.batches": 1,
    "outer.interval": 0,
}

# Fragments that are under way while training goes on, packed, and what packing left out kept.
STREAMING = {
    "outer__fragments": 2,
    "outer__delay": 1,
    "outer__mix": 0.5,
    "outer__codec": "linear",
    "outer__bits": 4,
    "outer__error_feedback": True,
}


def train(blend: Path, folder: Path, timeout: float = 120, **options: Any) -> list[dict[str, Any]]:
    """Train the small model; dots in options are written as two underscores.

    Returns for each rank its owned masters by block, its anchor, and the samples it was trained on.
    """
    values = SMALL | {"data.blend": blend, "run.dir": folder}
    values |= {key.replace("__", "."): value for key, value in options.items()}
    overrides = [f"{key}={_text(value)}" for key, value in values.items()]
    world_size = load("demo", overrides).config.parallel.world_size
    return run(_train, world_size, overrides, timeout=timeout)


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    """A .jsonl file of a run's folder."""
    return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in lines(folder, "metrics")]


def _train(rank: int, overrides: list[str]) -> dict[str, Any]:
    from pretrain import loop
    from pretrain.session import open_session

    exit.quieten_imports()
    with open_session(load("demo", overrides)) as session:
        seen = _watch(session.samples)
        loop.run(session)
        return {
            "masters": [
                (block, tensor.clone())
                for kind, block, tensor in session.inner.tensors()
                if kind == "master"
            ],
            "anchor": _anchor(session.outer),
            "samples": seen,
        }


def _watch(samples: Samples) -> list[bytes]:
    """A list that grows by every sample that is trained on."""
    seen: list[bytes] = []
    micro_batches = samples.micro_batches

    def watched(step: int, split: Split = "train") -> Iterator[Batch]:
        for batch in micro_batches(step, split):
            if split == "train":
                seen.extend(tokens.numpy().tobytes() for tokens in batch["tokens"])
            yield batch

    samples.micro_batches = watched
    return seen


def _anchor(outer) -> torch.Tensor:
    if outer is None:
        return torch.empty(0)
    return torch.cat([fragment.anchor for fragment in outer.fragments])


def _text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
