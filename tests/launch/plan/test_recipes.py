"""The 15B recipes fit the clusters that they are named after."""

import pytest

from launch.plan.memory import plan_memory
from megatron_ext import host
from pretrain.config import load

VARIANTS = {
    "15b": (16, 128),
    "15b-k1-8": (1, 8),
    "15b-k1-16": (1, 16),
    "15b-k1-64": (1, 64),
    "15b-k1-128": (1, 128),
    "15b-k16-64": (16, 64),
}
MEMORY_BYTES = 0.92 * 80e9  # what a plan may use of an H100


@pytest.mark.parametrize("method", ["", "+fp8"])
@pytest.mark.parametrize("recipe", VARIANTS)
def test_recipe_has_its_number_of_gpus_and_tokens(recipe, method):
    config = load(recipe + method).config
    replicas, gpus = VARIANTS[recipe]
    assert (config.parallel.replicas, config.parallel.world_size) == (replicas, gpus)
    assert (config.fp8.format, config.fp8.backend) == (
        ("hybrid", "transformer_engine") if method else ("none", "transformer_engine")
    )
    tokens = config.train.steps * config.tokens_per_step
    assert tokens == pytest.approx(304.8e9, rel=1e-3)  # 20 a parameter, as published


@pytest.mark.parametrize("recipe", VARIANTS)
def test_recipe_fits_the_memory_of_its_gpus(recipe):
    host.prepare()
    stages = plan_memory(load(recipe).config, on_gpu=True)
    assert max(stage.memory.peak for stage in stages) <= MEMORY_BYTES
