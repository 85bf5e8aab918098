"""The one global order of samples, and where in it a run stands.

Each part of the blend is read epoch by epoch, each epoch in an order of its own, and the parts are
mixed sample by sample by their weights. So the order depends on the data, the seed and the sequence
length, and not on how long a run is: a longer run begins with the samples of the shorter one.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from megatron.core.datasets import helpers
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.utils import Split
from torch import Tensor

Windows = Sequence[tuple[int, int]]
"""(first sample, first sample after it) of what is left out: in order, apart, not empty."""


@dataclass(frozen=True)
class Position:
    """Where a run stands after an inner step."""

    step: int = 0
    sample: int = 0
    """The next one of the order, unless it is left out."""
    tokens: int = 0
    """Trained on so far, over all replicas."""


def skip(sample: int, count: int, windows: Windows) -> int:
    """The sample that is `count` behind `sample`, where those in `windows` do not count."""
    for first, after in windows:
        if after <= sample:
            continue
        ahead = max(0, first - sample)
        if count < ahead:
            break
        count -= ahead
        sample = after
    return sample + count


class Part:
    """An indexed dataset, read epoch by epoch. Each epoch drops less than one sample at its end."""

    def __init__(self, prefix: str, split: Split, configs: "Configs"):
        self._prefix = prefix
        self._split = split
        self._configs = configs
        self._indexed = GPTDataset.build_low_level_dataset(prefix, configs(0))
        self._epochs: list[GPTDataset] = []
        self.prepare(1)

    def prepare(self, samples: int) -> None:
        """Index as many epochs as it takes to read `samples`."""
        count = GPTDataset.numel_low_level_dataset(self._indexed)
        documents = np.arange(count, dtype=np.int32)
        while not self._epochs or len(self._epochs) * len(self._epochs[0]) < samples:
            config = self._configs(len(self._epochs))
            self._epochs.append(
                GPTDataset(self._indexed, self._prefix, documents, None, self._split, config)
            )

    def __getitem__(self, sample: int) -> dict[str, Tensor]:
        epoch, index = divmod(sample, len(self._epochs[0]))
        return self._epochs[epoch][index]


class Configs:
    """megatron-core's configuration of each epoch: they differ in the seed."""

    def __init__(self, **common: object):
        self._common = common
        self._made: list[GPTDatasetConfig] = []

    def __call__(self, epoch: int) -> GPTDatasetConfig:
        while len(self._made) <= epoch:
            seed = self._common["random_seed"] + len(self._made)
            self._made.append(GPTDatasetConfig(**self._common | {"random_seed": seed}))
        return self._made[epoch]


class Order:
    """Samples 0 … size - 1 of one split."""

    def __init__(self, parts: Sequence[Part], weights: Sequence[float], size: int, cache: Path):
        """Index the mix, or read its index from the file `cache`."""
        self._parts = parts
        self._size = size
        if not cache.is_file():
            _write_mix(cache, weights, size)
        # [size]: which part, and its how manyth sample
        mix = np.load(cache, mmap_mode="r")
        self._which, self._sample = mix["part"], mix["sample"]
        for index, part in enumerate(parts):
            mine = np.flatnonzero(self._which == index)
            part.prepare(int(self._sample[mine[-1]]) + 1 if len(mine) else 0)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self._parts[self._which[index]][int(self._sample[index])]


def _write_mix(cache: Path, weights: Sequence[float], size: int) -> None:
    """At every sample the part comes that is farthest behind its weight."""
    which, sample = np.zeros(size, dtype=np.int16), np.zeros(size, dtype=np.int64)
    shares = np.asarray(weights, dtype=np.float64) / sum(weights)
    helpers.build_blending_indices(which, sample, shares, len(weights), size, False)
    mix = np.empty(size, dtype=[("part", np.int16), ("sample", np.int64)])
    mix["part"], mix["sample"] = which, sample
    np.save(cache, mix)
