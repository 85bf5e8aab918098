"""The samples that each rank trains on, from megatron-core's GPTDataset.

There is one global order of samples. Inner step n trains on samples (n − 1)·B … n·B − 1 of it, B
the global batch; replicas, data-parallel ranks and micro-batches take consecutive slices of them.
So what a step is trained on depends on none of these.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.utils import get_batch_on_this_cp_rank

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.replicas import Replicas
from pretrain.data import BlendFile, Part, Tokenizer
from pretrain.settings import RunConfig

Split = Literal["train", "validation"]
Batch = dict[str, torch.Tensor]


class Samples:
    """Micro-batches of one rank.

    Attributes:
        order: what decides the global order of samples; a resumed run must have the same.
    """

    def __init__(self, config: RunConfig, replicas: Replicas):
        """Index the samples, together with all other processes.

        Raises ConfigError or DataError for data that cannot be trained on.
        """
        self._config = config
        self._replica = replicas.index
        self._blend = BlendFile(Path(config.data.blend))
        _check(config, self._blend)
        self.order = {
            "data": self._blend.fingerprint,
            "train.seed": config.train.seed,
            "model.sequence_length": config.model.sequence_length,
            "train.steps": config.train.steps,
            "train.global_batch": config.train.global_batch,
        }
        self._datasets = dict(
            zip(("train", "validation"), self._index(replicas), strict=True),
        )

    def micro_batches(self, step: int, split: Split = "train") -> Iterator[Batch]:
        """What this rank trains on in inner step `step`, from 1.

        Each yields tokens, labels and position_ids, int64 [micro_batch, sequence / cp], and
        loss_mask, FP32, of the same shape. With document masking also cu_seqlens.
        """
        train, parallel = self._config.train, self._config.parallel
        of_rank = train.global_batch // (parallel.replicas * parallel.dp)
        slot = self._replica * parallel.dp + parallel_state.get_data_parallel_rank()
        first = (step - 1) * train.global_batch + slot * of_rank
        for start in range(first, first + of_rank, train.micro_batch):
            yield self._micro_batch(split, range(start, start + train.micro_batch))

    def _micro_batch(self, split: Split, indices: range) -> Batch:
        dataset = self._datasets[split]
        batch = torch.utils.data.default_collate([dataset[index] for index in indices])
        batch.pop("max_seqlen", None)
        if self._config.parallel.cp > 1:
            batch = get_batch_on_this_cp_rank({**batch, "cu_seqlens": None}, is_hybrid_cp=False)
        return batch

    def _index(self, replicas: Replicas) -> list[torch.utils.data.Dataset | None]:
        """Build the index once, in the first replica, and read it in the others."""
        folder = self._cache_folder()
        complete = folder / "complete"
        what = f"sample index in {folder}"
        is_builder = replicas.launcher_rank == 0
        if is_builder and not complete.is_file():
            # An interrupted build leaves files that megatron-core would take for whole.
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        replicas.barrier(what)
        datasets = None
        if replicas.index == 0:
            datasets = self._build(folder)
            if is_builder:
                complete.touch()
        replicas.barrier(what)
        return datasets or self._build(folder)

    def _build(self, folder: Path) -> list[torch.utils.data.Dataset | None]:
        blend, train = self._blend.blend, self._config.train
        held_out = self._config.validation.batches if self._validates else 0
        parts = [blend.train, blend.validation if held_out else (), ()]
        config = GPTDatasetConfig(
            random_seed=train.seed,
            sequence_length=self._config.model.sequence_length,
            blend_per_split=[self._blend.prefixes(p) if p else None for p in parts],
            path_to_cache=str(folder),
            tokenizer=_Special(blend.tokenizer),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
            inter_document_masking=self._config.model.document_masking,
        )
        sizes = [train.steps * train.global_batch, held_out * train.global_batch, 0]
        builder = BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config)
        return builder.build()[:2]

    @property
    def _validates(self) -> bool:
        return self._config.validation.every > 0

    def _cache_folder(self) -> Path:
        """One folder for each content: megatron-core's own key would not see a changed file."""
        blend = self._blend.blend
        files = [f for part in (*blend.train, *blend.validation) for f in self._blend.files(part)]
        stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        key = json.dumps([stats, self.order, self._config.validation.batches, self._validates])
        return Path(self._config.data.cache) / hashlib.sha256(key.encode()).hexdigest()[:16]


class _Special:
    """The tokenizer as GPTDataset wants it: special tokens and an identity, no text."""

    def __init__(self, tokenizer: Tokenizer):
        self.eod = tokenizer.eod
        self.pad = -1  # no token is padding
        self.vocab_size = tokenizer.vocab_size
        self.unique_identifiers = {"fingerprint": tokenizer.fingerprint}


def _check(config: RunConfig, file: BlendFile) -> None:
    blend, length = file.blend, config.model.sequence_length
    if blend.tokenizer.vocab_size > config.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={config.model.vocab_size} is smaller than the tokenizer's "
            f"{blend.tokenizer.vocab_size} of {file.path}; give at least that"
        )
    if config.validation.every and not blend.validation:
        raise ConfigError(
            f"validation.every={config.validation.every}, but {file.path} holds out no text; "
            "tokenise with --validation, or set validation.every=0"
        )
    splits = {"train": blend.train}
    if config.validation.every:
        splits["validation"] = blend.validation
    for split, parts in splits.items():
        for part in parts:
            _check_long_enough(part, length, f"{split} data in {file.path}")
            _check_whole(part, file)


def _check_long_enough(part: Part, length: int, where: str) -> None:
    if part.tokens < length + 1:
        raise ConfigError(
            f"model.sequence_length={length} is longer than the {part.tokens} tokens of "
            f"{part.prefix} in the {where}; shorten it to {part.tokens - 1} or less, or leave the "
            "part out"
        )


def _check_whole(part: Part, file: BlendFile) -> None:
    """A shortened .bin opens without complaint and fails when its end is first read."""
    binary, index = file.files(part)
    for width in (2, 4):
        if binary.stat().st_size == width * part.tokens:
            return
    raise DataError(
        f"{binary} has {binary.stat().st_size} bytes, which {part.tokens} tokens of {index.name} "
        f"cannot have; `python -m data_prep verify {file.path.parent}` says what is damaged"
    )
