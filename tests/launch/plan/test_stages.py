"""The plans of experts that ranks share out, by arithmetic alone."""

from collections import Counter
from statistics import mean

import pytest

from launch.plan.stages import stage_ranks
from megatron_ext import host
from megatron_ext.model.logical import kind_of, logical_shapes
from pretrain.config import load


@pytest.fixture(scope="module", autouse=True)
def _megatron_without_cuda():
    host.prepare()


def config(ep: int):
    model = {"model.layers": 32, "model.experts": 16, "model.ffn": 3072}
    parallel = {"tp": 4, "sequence_parallel": "true", "pp": 2, "dp": 8, "replicas": 1, "ep": ep}
    options = model | {f"parallel.{name}": value for name, value in parallel.items()}
    return load("15b", [f"{key}={value}" for key, value in options.items()]).config


@pytest.mark.parametrize("ep", [1, 4, 8])
def test_every_matrix_of_every_expert_has_one_home_and_the_homes_share_the_work(ep):
    homes: Counter[str] = Counter()
    for ranks in stage_ranks(config(ep)):
        work = [sum(seat.newton_schulz_flops for seat in rank.seats) for rank in ranks]
        assert len(work) == 32
        assert max(work) <= 1.1 * mean(work)
        for rank in ranks:
            for seat in rank.seats:
                here = (seat.tp_rank, seat.dp_rank)
                homes.update(u.name for u in seat.plan.matrices if (u.home, u.shard) == here)
    names = [name for name in logical_shapes(config(ep).model) if kind_of(name) == "matrix"]
    assert homes == Counter(names)


def test_a_rank_holds_its_share_of_the_experts():
    whole, shared = (stage_ranks(config(ep))[0][0] for ep in (1, 8))
    experts = shared.seats[1].plan
    assert {p.expert for p in experts.parameters} == {0, 1}
    held, less = (sum(seat.held for seat in rank.seats) for rank in (whole, shared))
    of_experts = sum(sum(layout.contents) for layout in experts.layouts)
    assert of_experts == 16 * 2 * 3 * 3072 * config(8).model.hidden // 4
    assert held - less == pytest.approx(7 * of_experts, rel=0.05)
