"""The optimizer on experts: each rank's slices of all of them, or of its share of them."""

from functools import cache

import pytest
import torch

from megatron_ext.model.logical import kind_of
from megatron_ext.muon.config import OptimizerConfig
from tests.megatron_ext.muon.test_optimizer import LR, MODEL, check

CASES = [
    (OptimizerConfig(lr=LR, weight_decay=0.1, clip=0.0, arithmetic="fp32"), changed)
    for changed in (
        MODEL.model_copy(update={"experts": 6}),
        MODEL.model_copy(update={"experts": 4, "experts_per_token": 1, "tie_head": True}),
    )
]
LAYOUTS = [
    {"dp": 2},
    {"pp": 2},
    {"tp": 2, "sequence_parallel": True},
    {"tp": 2, "dp": 2, "sequence_parallel": True},
    {"tp": 2, "pp": 2, "dp": 2, "sequence_parallel": True},
    {"dp": 2, "ep": 2},
    {"dp": 4, "ep": 2},
    {"tp": 2, "dp": 2, "ep": 2, "sequence_parallel": True},
]
MORE_LAYOUTS = [
    {"dp": 6, "ep": 2},
    {"pp": 2, "interleave": 2, "dp": 2, "ep": 2},
    {"tp": 2, "pp": 2, "dp": 2, "ep": 2, "sequence_parallel": True},
    {"tp": 2, "dp": 4, "ep": 2, "sequence_parallel": True},
    {"tp": 4, "dp": 2, "ep": 2, "sequence_parallel": True},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_matrix_of_each_expert_is_orthogonalised_by_itself(layout):
    check_agreement(layout)


@pytest.mark.slow
@pytest.mark.parametrize("layout", MORE_LAYOUTS, ids=str)
def test_each_matrix_of_each_expert_is_orthogonalised_by_itself_on_eight_ranks(layout):
    check_agreement(layout)


def check_agreement(layout: dict) -> None:
    for one, many in zip(_of_one_process(), check(layout, *CASES), strict=True):
        for name in one:
            if kind_of(name) == "matrix":
                assert torch.equal(one[name], many[name]), name


@cache
def _of_one_process() -> list[dict[str, torch.Tensor]]:
    return check({}, *CASES)


def test_adamw_trains_experts_where_they_lie():
    """Each on the ranks that hold it, in pieces and rows; clipped by the norm of all."""
    config = OptimizerConfig(name="adamw", lr=LR, weight_decay=0.1, clip=0.5)
    layout = {"tp": 2, "dp": 4, "ep": 2, "sequence_parallel": True}
    check(layout, (config, MODEL.model_copy(update={"experts": 4})))
