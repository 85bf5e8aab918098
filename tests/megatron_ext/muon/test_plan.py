"""The static plan of the 15b recipe, and of hostile shapes, by arithmetic alone."""

import math
from functools import cache
from statistics import mean

import pytest

from megatron_ext import host
from megatron_ext.model import ModelConfig, skeleton
from megatron_ext.model.logical import describe_parameter, kind_of, logical_shapes
from megatron_ext.muon.config import OptimizerConfig
from megatron_ext.muon.plan import StagePlan, plan_stage
from megatron_ext.muon.routing import route_all
from pretrain.config import load


@pytest.fixture(scope="module", autouse=True)
def _megatron_without_cuda():
    host.prepare()


def plans(model: ModelConfig, config: OptimizerConfig, tp: int, pp: int, dp: int):
    """The plan of each pipeline stage."""
    names = [name for name, _ in skeleton(model).named_parameters()]
    routes = route_all(model, config)
    stages: list[list[str]] = [[] for _ in range(pp)]
    for name in names:
        if ".layers." in name:
            stage = int(name.split(".")[2]) * pp // model.layers
        else:
            stage = 0 if name.startswith("embedding") else pp - 1
        stages[stage].append(name)
    return [
        plan_stage([[describe_parameter(name, model, tp) for name in stage]], routes, tp, dp)
        for stage in stages
    ]


@cache
def plans_of_15b() -> list[StagePlan]:
    config = load("15b").config
    return plans(config.model, config.optimizer, tp=4, pp=2, dp=8)


def test_every_matrix_of_15b_has_one_home():
    homes = [unit.name for plan in plans_of_15b() for unit in plan.matrices]
    shapes = logical_shapes(load("15b").config.model)
    assert sorted(homes) == sorted(name for name in shapes if kind_of(name) == "matrix")


def test_homes_of_15b_share_the_newton_schulz_work():
    for plan in plans_of_15b():
        work = [flops for ranks in plan.flops() for flops in ranks]
        assert len(work) == 32
        assert max(work) <= 1.1 * mean(work)


def test_15b_pays_little_for_whole_matrices_in_shards():
    for plan in plans_of_15b():
        assert plan.padding() <= 1.1


@pytest.mark.parametrize("weight_bytes", [2, 4])
def test_15b_sends_at_most_twice_the_fp32_bytes_of_a_ranks_share(weight_bytes):
    for plan in plans_of_15b():
        share = sum(math.prod(p.local_shape) for p in plan.parameters) / plan.dp
        sent = [plan.exchange_bytes(t, d, weight_bytes) for t in range(4) for d in range(8)]
        assert max(sent) <= 2 * 4 * share


def test_experts_of_a_wide_model_have_homes_of_their_own_that_share_the_work():
    model = load("15b").config.model.model_copy(update={"layers": 16, "experts": 8, "ffn": 3072})
    (plan,) = plans(model, OptimizerConfig(lr=0.1), tp=4, pp=1, dp=8)
    homes = [unit.name for unit in plan.matrices]
    assert sorted(homes) == sorted(n for n in logical_shapes(model) if kind_of(n) == "matrix")
    assert sum(".experts." in name for name in homes) == 16 * 8 * 3
    work = [flops for ranks in plan.flops() for flops in ranks]
    assert max(work) <= 1.1 * mean(work)
    assert plan.padding() <= 1.1


def test_a_router_travels_whole_to_the_other_tensor_parallel_ranks():
    small = ModelConfig(
        layers=1, hidden=64, heads=4, ffn=96, vocab_size=64, sequence_length=8, experts=4
    )
    (plan,) = plans(small, OptimizerConfig(lr=0.1), tp=2, pp=1, dp=1)
    sent_gradients, sent_weights = 0, 0
    for rank in range(2):
        sent_gradients += plan.exchange_bytes(rank, 0, weight_bytes=0)
        sent_weights += plan.exchange_bytes(rank, 0, weight_bytes=2)
    shapes = logical_shapes(small)
    matrices = sum(math.prod(s) for n, s in shapes.items() if kind_of(n) == "matrix")
    replicated = sum(math.prod(s) for n, s in shapes.items() if kind_of(n) in ("norm", "router"))
    assert sent_gradients == 4 * matrices / 2
    assert sent_weights - sent_gradients == 2 * (matrices / 2 + replicated)


@pytest.mark.parametrize(
    ("tp", "dp"), [(1, 1), (4, 1), (1, 7), (4, 3), (4, 64)], ids=lambda size: str(size)
)
def test_placements_never_overlap_and_stay_in_one_shard(tp, dp):
    """Also with more shards than there are matrices."""
    model = ModelConfig(
        layers=2, hidden=40, heads=4, kv_heads=2, ffn=52, vocab_size=44, sequence_length=8
    )
    (plan,) = plans(model, OptimizerConfig(lr=0.1), tp, 1, dp)
    (layout,) = plan.layouts
    end = 0
    order = sorted(zip(layout.placements, plan.parameters, strict=True), key=lambda p: p[0].start)
    for place, parameter in order:
        first, last = layout.buckets[place.bucket]
        assert place.start >= end
        assert place.end - place.start == math.prod(parameter.local_shape)
        assert first <= place.start
        assert place.end <= last
        assert (last - first) % dp == 0
        if place.shard is not None:
            size = (last - first) // dp
            assert first + place.shard * size <= place.start
            assert place.end <= first + (place.shard + 1) * size
        end = place.end
