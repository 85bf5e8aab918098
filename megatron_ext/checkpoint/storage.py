"""Blocks of tensors to and from one folder in megatron-core's `torch_dist` format."""

import logging
import math
import queue
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CONFIG_FNAME, CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.strategies import filesystem_async
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.storage import WriteResult
from torch.utils import serialization

from megatron_ext.checkpoint import index
from megatron_ext.checkpoint.agreement import describe
from megatron_ext.checkpoint.folders import sync
from megatron_ext.checkpoint.hashing import HashingTransform
from megatron_ext.checkpoint.manifest import FileRecord
from megatron_ext.checkpoint.state import StateTensor
from megatron_ext.errors import DataError


def key_of(kind: str, name: str) -> str:
    """The key under which a tensor is stored."""
    return f"{kind}.{name}"


class Writing:
    """One rank's part in writing one folder: planned together, written apart.

    Planning is collective over the default process group, which is the replica. Everything after
    it is not, and may run on another thread.
    """

    def __init__(self, folder: Path, tensors: Iterable[StateTensor]):
        """Plan. The folder exists and is empty. The tensors must not change until written."""
        self._folder = folder
        self._strategy = _Strategy()
        # Core would start a manager process on each rank, to hand results back from a writer
        # process. It starts slowly and outlives a killed rank. `write` needs neither process.
        filesystem_async._results_queue = queue.Queue()
        with _quiet(torch_strategies.logger):
            dist_checkpointing.save(
                _sharded(tensors),
                str(folder),
                self._strategy,
                validate_access_integrity=False,  # `_check_whole` looks at the blocks themselves
                async_sharded_save=True,
                async_strategy="mcore",
            )
        if self._strategy.metadata is not None:
            _check_whole(self._strategy.metadata)

    def write(self) -> tuple[list[WriteResult], dict[str, FileRecord]]:
        """Write this rank's file, forced to the disk.

        Returns what `finish` needs of each rank, and what the file must be, by its name. Raises
        what went wrong, for example OSError if the disk is full.
        """
        writer = self._strategy.writer
        results, records = [], {}
        for bucket in writer.write_buckets:
            _, name, (_, tensors) = bucket
            hashing = HashingTransform(tensor for _, tensor in tensors)
            # The file's SHA-256 makes a CRC of each tensor superfluous.
            with serialization.config.patch("save.compute_crc32", False):
                _, written = writer.write_preloaded_data(
                    [hashing], 0, bucket, results_queue=None, count_queue=None, use_fsync=True
                )
            records[name] = hashing.finish()
            if isinstance(written, Exception):
                raise hashing.error or written
            results += written
        return results, records

    def finish(self, results: list[list[WriteResult]]) -> tuple[str, ...]:
        """On the first rank: write the folder's index, given what `write` returned on each rank.

        Returns the names of the files written.
        """
        strategy = self._strategy
        strategy.writer.finish(strategy.metadata, results)
        save_config(CheckpointingConfig(strategy.backend, strategy.version), self._folder)
        sync(self._folder / CONFIG_FNAME)
        return index.NAME, CONFIG_FNAME


def read(folder: Path, tensors: Iterable[StateTensor]) -> None:
    """Fill tensors in place from a folder, whatever blocks it was cut into when it was written.

    Each rank reads by itself, and only what overlaps its blocks. Raises DataError.
    """
    index.read(folder)
    strategy = torch_strategies.TorchDistLoadShardedStrategy()
    try:
        with each_rank_by_itself():
            strategy.load(_sharded(tensors), folder)
    except (CheckpointException, Exception) as error:
        raise DataError(f"{folder} cannot be loaded: {describe(error)}") from error


@contextmanager
def each_rank_by_itself() -> Iterator[None]:
    """Keep torch from warning, at each load inside, of what megatron-core's call is meant to do."""
    with warnings.catch_warnings():
        for message in ("torch.distributed is disabled", "The argument order of load has been"):
            warnings.filterwarnings("ignore", message=message)
        yield


class _Strategy(torch_strategies.TorchDistSaveShardedStrategy):
    """Core's save strategy, which lets its writer be driven without core's collectives."""

    writer: filesystem_async.FileSystemWriterAsync
    metadata: Any  # the folder's index, on the first rank

    def _get_save_and_finalize_callbacks(
        self, writer: Any, planned: tuple[Any, ...], async_strategy: str
    ) -> Any:
        self.writer, self.metadata = writer, planned[1]
        return super()._get_save_and_finalize_callbacks(writer, planned, async_strategy)


def _sharded(tensors: Iterable[StateTensor]) -> dict[str, ShardedTensor]:
    return {
        str(number): ShardedTensor(
            key=key_of(kind, block.name),
            data=tensor.detach(),
            dtype=tensor.dtype,
            local_shape=block.size,
            global_shape=block.shape,
            global_offset=block.offset,
            axis_fragmentations=None,  # blocks need not form a regular grid
        )
        for number, (kind, block, tensor) in enumerate(tensors)
        if tensor.numel()
    }


def _check_whole(metadata: Any) -> None:
    """Core refuses overlapping blocks; missing ones it does not see when one rank saves."""
    for key, entry in metadata.state_dict_metadata.items():
        if not hasattr(entry, "chunks"):
            continue
        stored = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
        if stored != math.prod(entry.size):
            raise ValueError(
                f"{key}: the blocks to be saved hold {stored} of {math.prod(entry.size)} elements"
            )


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Keep back core's advice to write with a library that has no synchronous save."""
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
