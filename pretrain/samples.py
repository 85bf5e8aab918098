"""The samples that each rank trains on.

There is one global order of samples. Replicas, data-parallel ranks and micro-batches take
consecutive slices of an inner step's global batch. So what a step is trained on depends on none of
these.
"""

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from megatron.core import parallel_state
from megatron.core.datasets.utils import Split as MegatronSplit
from megatron.core.utils import get_batch_on_this_cp_rank

from megatron_ext.errors import ConfigError, DataError
from megatron_ext.replicas import Replicas
from pretrain.data import BlendFile, Part, Tokenizer
from pretrain.order import Configs, Order, Position, skip
from pretrain.order import Part as EpochsOfPart
from pretrain.settings import RunConfig

Split = Literal["train", "validation"]
Batch = dict[str, torch.Tensor]


class Samples:
    """Micro-batches of one rank.

    Attributes:
        order: what decides the global order of samples; a resumed run goes on in it.
        facts: what training depends on and no option says.
    """

    def __init__(self, config: RunConfig, replicas: Replicas):
        """Index the samples from the first one on, together with all other processes.

        Raises ConfigError or DataError for data that cannot be trained on.
        """
        self._config = config
        self._replicas = replicas
        self._blend = BlendFile(Path(config.data.blend))
        _check(config, self._blend)
        self.order = {
            "data": self._blend.fingerprint,
            "train.seed": config.train.seed,
            "model.sequence_length": config.model.sequence_length,
        }
        self.facts = {
            "data": self._blend.fingerprint,
            "tokenizer": self._blend.blend.tokenizer.fingerprint,
        }
        self._size = 0
        self._orders: dict[Split, Order] = {}
        self.start(Position())

    def start(self, position: Position) -> None:
        """Go on after an inner step of an earlier session. Collective over all processes."""
        self._start = position
        needed = self.position(self._config.train.steps).sample
        if needed > self._size:
            self._size = needed
            self._orders = self._index()

    def position(self, step: int) -> Position:
        """Where the run stands after inner step `step`."""
        start = self._start
        count = (step - start.step) * self._config.train.global_batch
        return Position(
            step,
            skip(start.sample, count, self._config.data.skip),
            start.tokens + count * self._config.model.sequence_length,
        )

    def micro_batches(self, step: int, split: Split = "train") -> Iterator[Batch]:
        """What this rank trains on in inner step `step`, from 1.

        Each yields tokens, labels and position_ids, int64 [micro_batch, sequence / cp], and
        loss_mask, FP32, of the same shape. With document masking also cu_seqlens.
        """
        train, parallel = self._config.train, self._config.parallel
        of_rank = train.global_batch // (parallel.replicas * parallel.dp)
        slot = self._replicas.index * parallel.dp + parallel_state.get_data_parallel_rank()
        if split == "train":
            begin, windows = self.position(step - 1).sample, self._config.data.skip
        else:
            begin, windows = (step - 1) * train.global_batch, ()
        for first in range(slot * of_rank, (slot + 1) * of_rank, train.micro_batch):
            places = range(first, first + train.micro_batch)
            yield self._micro_batch(split, [skip(begin, place, windows) for place in places])

    def _micro_batch(self, split: Split, indices: list[int]) -> Batch:
        order = self._orders[split]
        batch = torch.utils.data.default_collate([order[index] for index in indices])
        batch.pop("max_seqlen", None)
        if self._config.parallel.cp > 1:
            batch = get_batch_on_this_cp_rank({**batch, "cu_seqlens": None}, is_hybrid_cp=False)
        return batch

    def _index(self) -> dict[Split, Order]:
        """One process builds the indices where they are not seen yet, replica by replica."""
        folder = self._cache_folder()
        complete = folder / "complete"
        for index in range(self._replicas.count):
            is_builder = (self._replicas.index, self._replicas.rank) == (index, 0)
            if is_builder and not complete.is_file():
                # An interrupted build leaves files that megatron-core would take for whole.
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir(parents=True)
                self._build(folder)
                complete.touch()
            self._replicas.barrier("sample index")
        return self._build(folder)

    def _build(self, folder: Path) -> dict[Split, Order]:
        blend = self._blend.blend
        held_out = self._config.validation.batches * self._config.train.global_batch
        orders = {"train": self._order(folder, "train", blend.train, self._size)}
        if self._config.validation.every:
            orders["validation"] = self._order(folder, "validation", blend.validation, held_out)
        return orders

    def _order(self, folder: Path, split: Split, parts: tuple[Part, ...], size: int) -> Order:
        prefixes, weights = self._blend.prefixes(parts)
        configs = Configs(**self._dataset_options(folder, prefixes))
        kind = MegatronSplit.train if split == "train" else MegatronSplit.valid
        readers = [EpochsOfPart(prefix, kind, configs) for prefix in prefixes]
        return Order(readers, weights, size, folder / f"mix-{split}.npy")

    def _dataset_options(self, folder: Path, prefixes: list[str]) -> dict[str, Any]:
        return {
            "random_seed": self._config.train.seed,
            "sequence_length": self._config.model.sequence_length,
            "blend_per_split": [(prefixes, None), None, None],
            "path_to_cache": str(folder),
            "tokenizer": _Special(self._blend.blend.tokenizer),
            "reset_position_ids": False,
            "reset_attention_mask": False,
            "eod_mask_loss": False,
            "create_attention_mask": False,
            "inter_document_masking": self._config.model.document_masking,
        }

    def _cache_folder(self) -> Path:
        """One folder for each content: megatron-core's own key would not see a changed file."""
        blend, validation = self._blend.blend, self._config.validation
        files = [f for part in (*blend.train, *blend.validation) for f in self._blend.files(part)]
        stats = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        held_out = validation.batches * self._config.train.global_batch
        key = json.dumps([stats, self.order, self._size, held_out, validation.every > 0])
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
