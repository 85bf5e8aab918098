"""Experts that ranks share out: the same run, on any layout, with any number of ranks."""

from functools import cache

import pytest
import torch

from tests.pretrain.corpus import write_corpus
from tests.pretrain.runs import lines, train

STEPS, STOP = 6, 4
EXPERTS = {"model__experts": 4, "optimizer__arithmetic": "fp32", "train__steps": STEPS}
LAYOUTS = {
    "whole": {},
    "dp 2": {"dp": 2},
    "ep 2": {"dp": 2, "ep": 2},
    "ep 2, tp 2": {"dp": 2, "ep": 2, "tp": 2, "sequence_parallel": True},
    "ep 4": {"dp": 4, "ep": 4},
    "ep 2, pp 2": {"dp": 2, "ep": 2, "pp": 2},
    "ep 2, pp 2 × 2, tp 2": {"dp": 2, "ep": 2, "pp": 2, "interleave": 2}
    | {"tp": 2, "sequence_parallel": True},
}
# Options, and how far rounding may carry layouts apart in a few steps.
KINDS = {
    "muon": ({}, 1e-4),
    "adamw": ({"optimizer__name": "adamw", "optimizer__lr": 0.003}, 1e-4),
    "bf16": ({"train__precision": "bf16"}, 1e-2),
}


@pytest.fixture(scope="module")
def blend(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def run(blend, folder, layout: str, **options) -> list[dict]:
    parallel = {f"parallel__{name}": value for name, value in LAYOUTS[layout].items()}
    return train(blend, folder, **(EXPERTS | parallel | options))


def curve(folder) -> list[tuple[float, float]]:
    """Loss and gradient norm of each step."""
    return [(line["loss"], line["grad_norm"]) for line in lines(folder, "metrics")]


def check_alike(one, other, tolerance: float) -> None:
    assert len(one) == len(other) == STEPS
    for left, right in zip(one, other, strict=True):
        assert left == pytest.approx(right, rel=tolerance)


@pytest.fixture(scope="module")
def of_one_process(blend, tmp_path_factory):
    """Of a kind: the curve of the run that one process did without a stop."""

    @cache
    def get(kind: str) -> list[tuple[float, float]]:
        folder = tmp_path_factory.mktemp(kind)
        run(blend, folder, "whole", **KINDS[kind][0])
        return curve(folder)

    return get


@pytest.mark.parametrize(
    ("layout", "kind"),
    [
        ("ep 2, tp 2", "muon"),
        ("ep 4", "adamw"),
        pytest.param("ep 4", "muon", marks=pytest.mark.slow),
        pytest.param("ep 4", "bf16", marks=pytest.mark.slow),
        pytest.param("ep 2, tp 2", "bf16", marks=pytest.mark.slow),
        pytest.param("ep 2, tp 2", "adamw", marks=pytest.mark.slow),
        pytest.param("ep 2, pp 2", "muon", marks=pytest.mark.slow),
        pytest.param("ep 2, pp 2 × 2, tp 2", "muon", marks=pytest.mark.slow),
        pytest.param("ep 2, pp 2 × 2, tp 2", "adamw", marks=pytest.mark.slow),
    ],
)
def test_sharing_experts_out_changes_neither_losses_nor_norms(
    blend, tmp_path, of_one_process, layout, kind
):
    options, tolerance = KINDS[kind]
    run(blend, tmp_path, layout, **options)
    check_alike(curve(tmp_path), of_one_process(kind), tolerance)


@pytest.mark.parametrize(
    ("before", "after"),
    [("ep 2", "dp 2"), pytest.param("dp 2", "ep 2, tp 2", marks=pytest.mark.slow)],
)
def test_a_run_goes_on_with_its_experts_on_other_ranks(
    blend, tmp_path, of_one_process, before, after
):
    run(blend, tmp_path, before, train__stop_at=STOP, train__overlap=True)
    run(blend, tmp_path, after)
    check_alike(curve(tmp_path), of_one_process("muon"), tolerance=1e-4)


def test_replicas_that_share_experts_out_agree_after_an_outer_step(blend, tmp_path):
    rounds = {"parallel__replicas": 2, "outer__interval": STEPS // 2}
    ranks = run(blend, tmp_path / "ep", "ep 2", **rounds)
    for one, other in zip(ranks[:2], ranks[2:], strict=True):
        for (block, mine), (_, theirs) in zip(one["masters"], other["masters"], strict=True):
            assert torch.equal(mine, theirs), block.name
    run(blend, tmp_path / "dp", "dp 2", **rounds)
    check_alike(curve(tmp_path / "ep"), curve(tmp_path / "dp"), tolerance=1e-4)
    sent, also = (lines(tmp_path / name, "rounds") for name in ("ep", "dp"))
    assert [r["bytes_sent"] for r in sent] == [r["bytes_sent"] for r in also]
    assert [r["bytes_sent"] for r in sent] == [r["bytes_planned"] for r in sent]
