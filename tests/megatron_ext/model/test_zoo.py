"""The recipes of the zoo describe the published models."""

import pytest

from megatron_ext.model import parameter_count, skeleton
from pretrain.config import load

PARAMETERS = {
    "150m": 150_616_064,
    "416m": 416_862_208,
    "914m": 914_343_936,
    "1.76b": 1_758_666_752,
    "3.1b": 3_065_436_160,
    "15b": 15_229_089_792,
}
INNER = {"": "muon", "-adamw": "adamw"}


@pytest.mark.parametrize("inner", INNER)
@pytest.mark.parametrize("size", PARAMETERS)
def test_recipe_gives_the_published_model_and_token_budget(size, inner):
    config = load(size + inner).config
    assert config.optimizer.name == INNER[inner]
    assert parameter_count(config.model) == PARAMETERS[size]
    # Built by megatron-core, on the meta device.
    built = sum(parameter.numel() for parameter in skeleton(config.model).parameters())
    assert built == PARAMETERS[size]
    # Facts: about 20 tokens for each parameter, and whole rounds.
    assert config.tokens_per_step * config.train.steps / PARAMETERS[size] == pytest.approx(20, 0.05)
    assert config.train.steps % config.outer.interval == 0


@pytest.mark.parametrize("recipe", ["416m", "416m-adamw", "3.1b", "3.1b-adamw"])
def test_weight_decay_follows_the_batch_of_a_replica(recipe):
    decay_at_512 = {"416m": 0.01, "416m-adamw": 0.01, "3.1b": 0.001, "3.1b-adamw": 0.001}[recipe]
    config = load(recipe).config
    batch_factor = config.train.global_batch / 512 / config.parallel.replicas
    assert config.optimizer.weight_decay == pytest.approx(decay_at_512 * batch_factor)
