"""Constructs every FP8 recipe of the zoo with the real Transformer Engine, without a GPU.

Each rank of the recipe's tensor and pipeline parallelism is built on the meta device, which
computes nothing, and its parameters are compared with what the optimizer and checkpoints believe of
them. A stand-in answers for the GPU: Transformer Engine's modules ask for one when they are made.
Run by `make check-te`.
"""

import sys
import warnings
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_ext.model.gpt import build_chunk, transformer_config
from megatron_ext.model.logical import describe
from pretrain.config import load
from pretrain.settings import RunConfig

ZOO = ("150m", "416m", "914m", "1.76b", "3.1b", "15b")
CAPABILITY = {"tensorwise": (9, 0), "blockwise": (9, 0), "delayed": (9, 0), "mxfp8": (10, 0)}


def main() -> int:
    """Print a line for each recipe; the exit code is 1 if any could not be built."""
    import transformer_engine

    print(f"transformer-engine {transformer_engine.__version__}, torch {torch.__version__}")
    warnings.simplefilter("ignore")
    failed = 0
    for name in ZOO:
        for recipe in CAPABILITY:
            ends = 0 if recipe == "delayed" else 1
            overrides = [f"fp8.recipe={recipe}", f"fp8.first_last_layers_bf16={ends}"]
            config = load(f"{name}+fp8", overrides).config
            try:
                ranks, parameters = construct(config, CAPABILITY[recipe])
                print(f"{name:6} {recipe:11} {ranks} ranks, {parameters:,} parameters: ok")
            except Exception as error:
                failed += 1
                print(f"{name:6} {recipe:11} {type(error).__name__}: {error}")
    return 1 if failed else 0


def construct(config: RunConfig, capability: tuple[int, int]) -> tuple[int, int]:
    """Build all tensor and pipeline ranks of a replica; how many they are, and their parameters."""
    parallel = config.parallel
    ranks = parallel.tp * parallel.pp
    numel = 0
    for rank in range(ranks):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
        try:
            with _gpu(capability):
                parallel_state.initialize_model_parallel(
                    parallel.tp, parallel.pp, create_gloo_process_groups=False
                )
                numel += _construct_rank(config)
        finally:
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()
    return ranks, numel


def _construct_rank(config: RunConfig) -> int:
    """Parameters of this rank's chunk, which `describe` has found to be what they should be."""
    core = transformer_config(
        config.model,
        config.parallel,
        precision=config.train.precision,
        recompute=config.train.recompute,
        fp8=config.fp8,
    )
    core.init_model_with_meta_device = True
    groups = ProcessGroupCollection.use_mpu_process_groups()
    with torch.device("meta"):
        chunk = build_chunk(config.model, core, groups, None, config.fp8)
    describe([chunk], config.model, config.parallel)
    return sum(parameter.numel() for parameter in chunk.parameters())


def _gpu(capability: tuple[int, int]):
    """Answers as a GPU of this compute capability would."""
    major, minor = capability
    properties = SimpleNamespace(major=major, minor=minor, multi_processor_count=132, name="H100")
    answers = {
        "is_available": lambda: True,
        "current_device": lambda: torch.device("meta"),
        "device_count": lambda: 1,
        "get_device_capability": lambda *_: capability,
        "get_device_properties": lambda *_: properties,
        "get_rng_state": lambda *_: torch.zeros(16, dtype=torch.uint8),
    }
    return mock.patch.multiple(torch.cuda, **answers)


if __name__ == "__main__":
    sys.exit(main())
